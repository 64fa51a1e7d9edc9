# SPDX-License-Identifier: Apache-2.0
"""The attention's output projection in one launch: wo_a, the QDQ of what it gives, wo_b."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .experts_stream import SMALL_EXCHANGE
from .linear_stream import check, load_columns, pieces, project, store
from .split import BANK, PARTITIONS, tiles

SLOTS = BANK // PARTITIONS
"""Tiles of 128 columns that lie beside each other on the partitions."""
MOST_ROWS = PARTITIONS // SLOTS


@nki.jit
def output_projection(
    o: nl.NkiTensor, wo_a: nl.NkiTensor, wo_b: nl.NkiTensor, low: int, columns: int, quantize: bool = True, rounds: bool = True
) -> nl.NkiTensor:
    """wo_b(qdq(round(wo_a(o)))), sums in fp32: the output of a rank with one group of heads.

    For decode. The weights of wo_b stream while wo_a's result is rounded and the cores exchange their halves of it.

    Dimensions:
        M: rows, 1 to 32. K: heads times head_dim, a multiple of 128. C: cores. L: columns of wo_a, a multiple of 128 C.
        N: columns of wo_b; S = ceil(N / C).

    Args:
        o [M, K] bf16 @ HBM. wo_a [C, 128, K / 128 L / C] and wo_b [C, 128, L / 128 S] bf16 @ HBM: linear_layout.pack.
        low: L. columns: N. quantize: the QDQ between them. rounds: the result is rounded to bf16, as it is where no other rank
        adds to it.

    Returns:
        [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear twice with formats.qdq_fp8 between. A core has half of wo_a's columns. Four tiles of 128 of them
        lie on the partitions 32 apart: o meets them in stationary tiles that are zero for the other three, so that all add up
        in one PSUM tile, and the QDQ works on 128 columns of 128 partitions, not on 512 of M.

    Pseudocode:
        l = qdq(round(o wo_a[own columns]));  l_t = [transpose(l), the other core's];  out[:, own columns] = round(l_t^T wo_b)

    Cost:
        Per core: K L / (C 128^2) matmuls of 128 columns, L / 128 ceil(S / 512) of 512. Bound: the weights' bytes at 362.5 GB/s.
        Predicted for 6 rows, 4096 x 1024 and 1024 x 5120, two cores: 33.6 us, 1.29 times the bound of 26.0; 38.8 us in two
        launches, which also store and load what is between.
    """
    rows, contraction = o.shape
    cores, core = nl.num_programs(), nl.program_id()
    share = low // cores
    assert 1 <= rows <= MOST_ROWS, f"o {o.shape}: expected 1 to {MOST_ROWS} rows"
    assert contraction % PARTITIONS == 0 and low % (PARTITIONS * cores) == 0, (
        f"{contraction} x {low} on {cores} cores: expected multiples of {PARTITIONS} per core"
    )
    assert o.dtype == nl.bfloat16 and wo_a.dtype == nl.bfloat16 and wo_b.dtype == nl.bfloat16, "bfloat16 only"
    check(o, wo_a, low, False)
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    l_t_sb = nl.ndarray((PARTITIONS, low // PARTITIONS, rows), nl.bfloat16, buffer=nl.sbuf)
    each = share // PARTITIONS
    own = l_t_sb[:, core * each : (core + 1) * each]
    stationary_sb = slot_tiles(o, min(SLOTS, each))
    for first, width in tiles(share, BANK):
        stream = wo_a[core, :, contraction // PARTITIONS * first : contraction // PARTITIONS * (first + width)]
        sums_psum = slot_sums(stationary_sb, stream, width)
        l_sb = nl.ndarray(sums_psum.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=l_sb, src=sums_psum)
        if quantize:
            groups = l_sb.reshape_dim(1, (PARTITIONS // GROUP, GROUP))
            qdq(groups, groups)
        slots = width // PARTITIONS
        turned_psum = nl.ndarray((PARTITIONS, l_sb.shape[0]), nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=turned_psum, data=l_sb)
        turned = turned_psum.reshape_dim(1, (l_sb.shape[0] // MOST_ROWS, MOST_ROWS))[:, 0:slots, 0:rows]
        nisa.tensor_copy(dst=own[:, first // PARTITIONS : first // PARTITIONS + slots], src=turned)
    if cores > 1:
        other = 1 - core
        received = l_t_sb[:, other * each : (other + 1) * each]
        engine = nisa.dma_engine.gpsimd_dma if each * rows <= SMALL_EXCHANGE else nisa.dma_engine.dma
        nisa.sendrecv(src=own, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=0, dma_engine=engine)
    store(project(out, l_t_sb, wo_b, low))
    return out


def slot_tiles(o: nl.NkiTensor, slots: int) -> nl.NkiTensor:
    """[128, K / 128, slots, slots * 32] bf16 @ SBUF: o's columns at 32 s for slot s, else 0."""
    rows, contraction = o.shape
    k_tiles = contraction // PARTITIONS
    stationary_sb = nl.ndarray((PARTITIONS, k_tiles, slots, slots * MOST_ROWS), nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=stationary_sb, value=0.0)
    o_t_sb = nl.ndarray((PARTITIONS, k_tiles, rows), nl.bfloat16, buffer=nl.sbuf)
    load_columns(o_t_sb, o, False)
    for s in range(slots):
        at = s * MOST_ROWS
        engine = nisa.engine.vector if s % 2 == 0 else nisa.engine.scalar
        nisa.tensor_copy(dst=stationary_sb[:, :, s, at : at + rows], src=o_t_sb, engine=engine)
    return stationary_sb


def slot_sums(stationary_sb: nl.NkiTensor, stream: nl.NkiTensor, width: int) -> nl.NkiTensor:
    """[slots * 32, 128] fp32 @ PSUM: at 32 s, n the product with column 128 s + n of stream [128, K / 128 width] @ HBM."""
    _, k_tiles, _, across = stationary_sb.shape
    sums_psum = nl.ndarray((across, PARTITIONS), nl.float32, buffer=nl.psum)
    k = 0
    for n in pieces(k_tiles, 2 * width, True):
        weight_sb = nl.ndarray((PARTITIONS, n, width), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_sb, src=stream[:, k * width : (k + n) * width].reshape_dim(1, (n, width)))
        for i in range(n):
            for s in range(width // PARTITIONS):
                moving = weight_sb[:, i, s * PARTITIONS : (s + 1) * PARTITIONS]
                nisa.nc_matmul(dst=sums_psum, stationary=stationary_sb[:, k + i, s], moving=moving, accumulate=k + i + s > 0)
        k += n
    return sums_psum
