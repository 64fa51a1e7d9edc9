# SPDX-License-Identifier: Apache-2.0
"""The fused local experts: w1, w3, SwiGLU times routing weight, QDQ, w2, summed over the experts of a rank."""

import nki
import nki.isa as nisa
import nki.language as nl

from .experts_stream import down, finish, finish_floors, up
from .experts_tiles import Experts, load_columns, start


@nki.jit
def local_experts(
    x: nl.NkiTensor, routing: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, limit: float,
    quantize: bool = True, round_experts: bool = False,
) -> nl.NkiTensor:  # fmt: skip
    """out = sum over experts e of h_e W2_e^T, h_e = QDQ(bf16(silu(gate) * up * routing[e])), gate, up = bf16(x W13_e^T).

    Static: every expert is read. ``active_experts`` is the same with the experts that a row chose only. Made for decode, 1
    to 16 rows, where reading the weights is all of the time; runs up to 128.

    Dimensions:
        M: rows, 1 to 128. E: local experts. C: cores, 1 or 2. hidden: a multiple of 32 C. Columns per core: inter / C, filled
        up to a multiple of 32. KW, W: the widest tiles, at most 128, that divide hidden (for two cores into an even number)
        and the columns. T = columns / W; KT = hidden / KW.

    Args:
        x [M, hidden] bf16 @ HBM, past its own QDQ.
        routing [E, M] fp32 @ HBM, 0 where the row did not choose the expert.
        w13 [E, C, max(KW, W), bytes] float8_e4m3, or its bits as uint8, @ HBM: experts_layout.pack; scales, then the
            pieces of w1 and w3.
        w2 [E, C, W, T * hidden], likewise: experts_layout.pack; the pieces of w2.
        limit: gate is at most that, up within plus and minus; 0 is no clamp.
        quantize: h passes the activation QDQ, as release numerics ask.
        round_experts: each expert's result is rounded to bf16 before the sum, as release numerics ask where one core has
            all of an expert's columns. Refused on two cores.

    Returns:
        [M, hidden] fp32 @ shared HBM.

    Notes:
        Weights are fp8_exact: codes of trn2's own e4m3, which the tensor engine reads, times a power of two per row, which
        scales the sums. No weight is decoded, and the vector engine touches none.
        Each core has half of the columns, so half of the contraction of w2. The cores meet once, behind the last expert, and
        not at the end: each makes the other's half of the result first and sends it while its own half's weights arrive.
        w13 of an expert comes before w2 of the one before it, so that the tensor engine never waits for SwiGLU and QDQ.
        A result that one core sums alone is bf16-rounded per expert by the reference; parts of it cannot be.
        Reference: experts_reference.local_experts.

    Pseudocode:
        for e in 0 .. E:                                      # e = E: w2 of the last expert only
            if e < E:  for piece of w1, w3:  gate, up = (piece x^T) * scale;  h[e] = swiglu(gate, up) * routing[e];  QDQ(h[e])
            if e > 0:  for piece of w2:      total += (piece h[e - 1]) * scale
        exchange halves of the total;  out = total^T

    Cost (per core, predicted by the emulator's schedule; inter 2304 and hidden 5120 on two cores, 6 rows):
        Per expert 1,080 nc_matmul (28.8 us), 9 DMAs of 17.7 MB (50.5 us with their descriptors; 48.8 us, the bytes alone, is
        the bound), 51 VectorE instructions (4.2 us), 18 transposes, 24 and 18 of them for the QDQ.
        One expert takes 56.0 us from first to last, 1.15 x the bound, with the QDQ of h or without: it hides behind the
        weights. Each further expert takes 50.5 us. inter 288: 240 nc_matmul and 7.7 us per further expert, bound 6.1 us,
        6.8 us with the zeros that fill 288 columns to twice 160. At 128 rows the tensor engine is the bound, 57.6 us per
        expert of 2304 columns; for 288 it is VectorE, 18 us.
    """
    e = start(x, routing, w13, w2, limit, quantize, round_experts)
    load_columns(e, x)
    up(e, 0, 0)
    finish_floors(e, 0)
    finish(e, 0)
    for expert in range(1, w13.shape[0]):
        up(e, expert, expert % 2)
        down(e, expert - 1, (expert - 1) % 2, expert % 2)
    down(e, w13.shape[0] - 1, (w13.shape[0] - 1) % 2, None)
    return e.out


@nki.jit
def active_experts(
    x: nl.NkiTensor, routing: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, limit: float,
    quantize: bool = True, round_experts: bool = False,
) -> nl.NkiTensor:  # fmt: skip
    """``local_experts``, to the bit, that reads only the experts with a routing weight that is not 0.

    Dimensions, Args and Returns are those of ``local_experts``.

    Notes:
        Which experts are read is decided on the device: their list and number come from ``routing``, the loop runs so often,
        and its register is the offset of the weights' DMAs. The first expert's w1 and w3 come before the loop and the last
        one's w2 behind it, so that iterations overlap as in the static form. Where no expert was chosen the first one is
        read and adds zeros.
        Tiles exist once, not once per iteration: what an iteration hands to the next is copied.

    Pseudocode:
        active, count = nonzero(any(routing != 0, rows))
        h[0] = up(active[0])
        for i in 1 .. count - 1:  h[1] = up(active[i]);  total += down(active[i - 1], h[0]);  h[0] = h[1]
        total += down(active[count - 1], h[0])

    Cost:
        max(count, 1) experts of ``local_experts``, and 2.4 us for the list: count * (bound + 1.7 us) + 7.7 us at inter 2304.
    """
    e = start(x, routing, w13, w2, limit, quantize, round_experts)
    active_sb, count = list_active(e)
    load_columns(e, x)
    now, before = nisa.register_alloc(), nisa.register_alloc()
    nisa.register_load(before, active_sb[:, 0:1])
    up(e, before, 0)
    finish_floors(e, 0)
    finish(e, 0)
    index_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)

    def one_expert(i: nisa.VirtualRegister) -> None:
        place = active_sb.ap([[active_sb.shape[1], 1], [1, 1]], scalar_offset=i, indirect_dim=1)
        nisa.tensor_copy(dst=index_sb, src=place, engine=nisa.engine.gpsimd)
        nisa.register_load(now, index_sb)
        up(e, now, 1)
        down(e, before, 0, 1)
        nisa.tensor_copy(dst=e.hidden[0], src=e.hidden[1])
        nisa.tensor_copy(dst=e.scales[0], src=e.scales[1])
        nisa.register_move(before, now)

    nl.fori_loop(1, count, one_expert)
    down(e, before, 0, None)
    return e.out


def list_active(e: Experts) -> tuple[nl.NkiTensor, nisa.VirtualRegister]:
    """[1, E + 1] int32 @ SBUF, the numbers of the chosen experts first, then zeros; and a register with their count."""
    _, experts, rows = e.routing.shape
    chosen_sb = nl.ndarray((1, experts, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=chosen_sb, data=e.routing[0:1], op0=nl.not_equal, operand0=0.0)
    any_sb = nl.ndarray((1, experts), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=any_sb, op=nl.maximum, data=chosen_sb, axis=2)
    active_sb = nl.ndarray((1, experts + 1), nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=active_sb, src=any_sb, padding_val=0)
    count = nisa.register_alloc()
    nisa.register_load(count, active_sb[:, experts : experts + 1])
    return active_sb, count
