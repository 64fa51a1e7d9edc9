# SPDX-License-Identifier: Apache-2.0
"""What every rank does with all rows of a mixture of experts, in one launch: router, activation QDQ and shared expert."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .exchange import exchange
from .fold import folded, folds, load
from .linear_stream import store, turn_chunk
from .route import EIGHT, choose, score
from .shared_expert import down, hidden
from .slots import MOST_ROWS, SLOTS, between_zeros, fill, gather_slots, identity, slot_products, slots_of, turn_slots
from .split import BANK, PARTITIONS


@nki.jit
def route_and_share(
    x: nl.NkiTensor, gate: nl.NkiTensor, bias: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, columns: int, k: int,
    normalises: bool, factor: float, limit: float,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:  # fmt: skip
    """ids, weights = route(gate(x)); xq = qdq(x); y = w2(qdq(swiglu(w1(xq), w3(xq)))) of a part of the shared expert's columns.

    For decode. w1 and w3 stream first, then the router, then w2: what follows a sum hides under the weights behind it.

    Dimensions:
        M: rows, 1 to 32. K: columns of x, a multiple of 128 C. C: cores. E: experts, a multiple of 4 C, 8 to 512 C. k: to E.
        I: columns of w1 and of w3, a multiple of 32 up to 512; IT = ceil(I / 128).

    Args:
        x [M, K] bf16 @ HBM, before its QDQ.
        gate [C, 128, K / 128 E / C] bf16 @ HBM: linear_layout.pack of the router. bias [1, E] fp32 @ HBM.
        w13 [2, 128, K / 128 I] bf16 @ HBM: linear_layout.pack of w1 on w3 for two cores, which is w1's and w3's own stream.
        w2 [C, min(I, 128), IT K / C] bf16 @ HBM: linear_layout.pack.
        columns: I. k, normalises, factor: as ``route`` takes them. limit: gate is at most that, up within plus and minus; 0 is
        no clamp; h is below 2^107.

    Returns:
        ids [M, k] int32 and weights [M, k] fp32 of ``route``, xq [M, K] bf16, which the routed experts take, and y [M, K] fp32,
        a part of a sum; all @ shared HBM.

    Notes:
        Reference: moe.route_and_share. No weight has a layout of its own: each is read by ``linear``, too.
        Of w1 and w3 a core has half of K, so it rounds and turns half of x; the cores add up each other's sums. Of the router
        and of w2 it has half of the columns. The cores exchange x as columns, sums, and scores: 2 us each, under the weights.
        Logits and h lie in slots (slots.py); scores come back to rows by a product with an identity, to which bias is added.

    Pseudocode:
        xq = qdq(x[own half]);  gate, up = round(xq w13 + the other core's);  h = qdq(round(silu(min(gate)) clamp(up)))
        s = sqrt(softplus(x gate[own columns])) and the other core's;  ids = top(s + bias);  w = s[ids] / sum * factor
        y[:, own columns] = h w2

    Cost:
        Per core: 2 IT K / (128 C) matmuls of up to 128 columns, K / 128 times the router's slots (slots_of) of 64 or more, and
        IT K / (128 C) of w2, of M. Bound: all bytes at 362.5 GB/s. Predicted for 6 rows of 5120, 384 experts and 288 columns,
        two cores: 25.7 us, 1.30 times the bound of 19.7, of which 1.4 us are the zeros that fill w2 up to 384 rows; VectorE is
        busy for 5.6 us. In six launches 62.0 us and 9.1. 5 rows and 128 experts: 24.4 us, bound 16.0.
    """
    check(x, gate, bias, w13, w2, columns, k)
    (rows, dim), experts, cores, core = x.shape, bias.shape[1], nl.num_programs(), nl.program_id()
    ids = nl.ndarray((rows, k), nl.int32, buffer=nl.shared_hbm)
    weights = nl.ndarray((rows, k), nl.float32, buffer=nl.shared_hbm)
    quantised = nl.ndarray((rows, dim), nl.bfloat16, buffer=nl.shared_hbm)
    y = nl.ndarray((rows, dim), nl.float32, buffer=nl.shared_hbm)
    share, mine = dim // cores, experts // cores
    own, here = slice(core * share, (core + 1) * share), slice(core * mine, (core + 1) * mine)
    slots, part = (columns + PARTITIONS - 1) // PARTITIONS, share // PARTITIONS * columns
    xq_sb, xq_wide_sb, x_wide_sb = both_forms(x, slots, slots_of(mine)[0])
    h_sb = hidden(xq_wide_sb, w13[:, :, core * part : (core + 1) * part], columns, limit, 1)
    biased_psum = add_bias(bias[:, here], rows)
    slots_sb = own_scores(x_wide_sb, gate[core], mine)
    h_t_sb = nl.ndarray((h_sb.shape[1], slots, rows), nl.bfloat16, buffer=nl.sbuf)
    turn_slots(h_t_sb, h_sb)
    scores_sb, biased_sb = all_scores(slots_sb, biased_psum, experts, 3)
    store(down(y[:, own], h_t_sb, w2[core], columns))
    if core == 0:
        choose(ids, weights, scores_sb, biased_sb, normalises, factor)
    nisa.dma_copy(dst=folded(quantised[:, own], xq_sb.shape[0] // rows), src=xq_sb)
    return ids, weights, quantised, y


def check(
    x: nl.NkiTensor, gate: nl.NkiTensor, bias: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, columns: int, k: int
) -> None:
    """Refuses what does not fit together or fill whole tiles."""
    (rows, dim), (one, experts), cores = x.shape, bias.shape, nl.num_programs()
    assert 1 <= rows <= MOST_ROWS, f"{rows} rows: expected 1 to {MOST_ROWS}"
    assert dim % (PARTITIONS * cores) == 0, (
        f"x {x.shape} on {cores} cores: expected a multiple of {PARTITIONS} columns per core"
    )
    assert one == 1 and experts >= EIGHT and experts % (SLOTS * cores) == 0 and experts <= BANK * cores, (
        f"bias {bias.shape} on {cores} cores: expected a multiple of {SLOTS} experts per core, {EIGHT} to {BANK * cores}"
    )
    assert 1 <= k <= experts, f"k {k} of {experts} experts"
    assert columns % GROUP == 0 and 0 < columns <= SLOTS * PARTITIONS, (
        f"{columns} columns: expected a multiple of {GROUP} up to {SLOTS * PARTITIONS}"
    )
    k_tiles, used = dim // PARTITIONS, min(columns, PARTITIONS)
    assert gate.shape == (cores, PARTITIONS, k_tiles * experts // cores), f"gate {gate.shape} for {dim} x {experts}"
    assert w13.shape == (2, PARTITIONS, k_tiles * columns), f"w13 {w13.shape} for {dim} x {columns}"
    hidden_tiles = (columns + PARTITIONS - 1) // PARTITIONS
    assert w2.shape == (cores, used, hidden_tiles * dim // cores), f"w2 {w2.shape} for {columns} x {dim}"
    found = f"{x.dtype}, {gate.dtype}, {w13.dtype}, {w2.dtype}"
    for operand in (x, gate, w13, w2):
        assert operand.dtype == nl.bfloat16, f"x, gate, w13, w2: {found}; bfloat16 only"


def both_forms(x: nl.NkiTensor, slots: int, router_slots: int) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """This core's half of x [M, K] @ HBM through the QDQ, folded, that as columns for ``slots``, and all of x, as it is, as
    columns for ``router_slots`` (slots.py). The cores exchange their columns of the latter."""
    (rows, dim), core = x.shape, nl.program_id()
    share = dim // nl.num_programs()
    k_tiles, fold = share // PARTITIONS, folds(rows, share, PARTITIONS)
    x_sb = load(x[:, core * share : (core + 1) * share], fold)
    xq_wide_sb, x_wide_sb = between_zeros(k_tiles, slots), between_zeros(dim // PARTITIONS, router_slots)
    x_t_sb = nl.ndarray((PARTITIONS, dim // PARTITIONS, rows), nl.bfloat16, buffer=nl.sbuf)
    here = x_t_sb[:, core * k_tiles : (core + 1) * k_tiles]
    turn_chunk(here, x_sb, 0, fold)
    if nl.num_programs() > 1:
        exchange(here, x_t_sb[:, (1 - core) * k_tiles : (2 - core) * k_tiles], 0)
    xq_sb = nl.ndarray(x_sb.shape, nl.bfloat16, buffer=nl.sbuf)
    groups = x_sb.shape[1] // GROUP
    qdq(xq_sb.reshape_dim(1, (groups, GROUP)), x_sb.reshape_dim(1, (groups, GROUP)))
    xq_t_sb = nl.ndarray((PARTITIONS, k_tiles, rows), nl.bfloat16, buffer=nl.sbuf)
    turn_chunk(xq_t_sb, xq_sb, 0, fold)
    fill(xq_wide_sb, xq_t_sb, slots)
    fill(x_wide_sb, x_t_sb, router_slots)
    return xq_sb, xq_wide_sb, x_wide_sb


def shares(k_tiles: int) -> list:
    """k_tiles as a half, a third and the rest: few DMAs, since each has its overhead, and little work behind the last."""
    found: list = []
    for n in (k_tiles // 2, k_tiles // 3, k_tiles - k_tiles // 2 - k_tiles // 3):
        if n > 0:
            found.append(n)
    return found


def own_scores(x_wide_sb: nl.NkiTensor, stream: nl.NkiTensor, mine: int) -> nl.NkiTensor:
    """``route.score`` in slots [slots 32, width] fp32 of this core's ``mine`` experts, whose weights are stream @ HBM."""
    slots, width = slots_of(mine)
    logits_psum = nl.ndarray((slots * MOST_ROWS, width), nl.float32, buffer=nl.psum)
    slot_products(logits_psum, x_wide_sb, stream, shares(stream.shape[1] // mine))
    slots_sb = nl.ndarray(logits_psum.shape, nl.float32, buffer=nl.sbuf)
    score(slots_sb, logits_psum)
    return slots_sb


def add_bias(bias: nl.NkiTensor, rows: int) -> nl.NkiTensor:
    """bias [1, n] @ HBM for every row [M, n] fp32 @ PSUM, to which scores are added."""
    bias_sb = nl.ndarray(bias.shape, nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=bias_sb, src=bias)
    one_sb = nl.ndarray((1, rows), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=one_sb, value=1.0, engine=nisa.engine.gpsimd)
    biased_psum = nl.ndarray((rows, bias.shape[1]), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=biased_psum, stationary=one_sb, moving=bias_sb, accumulate=False)
    return biased_psum


def all_scores(slots_sb: nl.NkiTensor, biased_psum: nl.NkiTensor, experts: int, pipe: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Scores [M, E] fp32 @ SBUF of both cores' slots, and those plus bias; through ``pipe`` and the next one."""
    cores, core, (rows, mine) = nl.num_programs(), nl.program_id(), biased_psum.shape
    identity_sb = identity()
    scores_psum = nl.ndarray((rows, mine), nl.float32, buffer=nl.psum)
    gather_slots(biased_psum, slots_sb, identity_sb, True)
    gather_slots(scores_psum, slots_sb, identity_sb, False)
    found: list = []
    for psum in (biased_psum, scores_psum):
        all_sb = nl.ndarray((rows, experts), nl.float32, buffer=nl.sbuf)
        here = all_sb[:, core * mine : (core + 1) * mine]
        nisa.tensor_copy(dst=here, src=psum, engine=nisa.engine.scalar)
        if cores > 1:
            exchange(here, all_sb[:, (1 - core) * mine : (2 - core) * mine], pipe + len(found))
        found.append(all_sb)
    return found[1], found[0]
