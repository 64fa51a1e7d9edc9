# SPDX-License-Identifier: Apache-2.0
"""The fused local experts: w1, w3, SwiGLU times routing weight, QDQ, w2, summed over the experts of a rank."""

import nki
import nki.isa as nisa
import nki.language as nl

from .experts_stream import down, finish_up, up
from .experts_tiles import start


@nki.jit
def local_experts(
    x: nl.NkiTensor, routing: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, scale: nl.NkiTensor, limit: float,
    quantize: bool = True, round_experts: bool = False,
) -> nl.NkiTensor:  # fmt: skip
    """The weighted sum of all local experts over every row. See ``active_experts``, which reads chosen experts only."""
    e = start(x, routing, w13, w2, scale, limit, quantize, round_experts)
    up(e, 0, 0)
    finish_up(e, 0)
    for expert in range(1, w13.shape[0]):
        up(e, expert, expert % 2)
        down(e, expert - 1, (expert - 1) % 2, False)
        finish_up(e, expert % 2)
    down(e, w13.shape[0] - 1, (w13.shape[0] - 1) % 2, True)
    return e.out


@nki.jit
def active_experts(
    x: nl.NkiTensor, routing: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, scale: nl.NkiTensor, limit: float,
    quantize: bool = True, round_experts: bool = False,
) -> nl.NkiTensor:  # fmt: skip
    """The same sum, reading only experts with a routing weight that is not 0."""
    e = start(x, routing, w13, w2, scale, limit, quantize, round_experts)
    experts = w13.shape[0]
    chosen_sb = nl.ndarray((1, experts, e.rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=chosen_sb, data=e.routing[0:1], op0=nl.not_equal, operand0=0.0)
    any_sb = nl.ndarray((1, experts), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=any_sb, op=nl.maximum, data=chosen_sb, axis=2)
    active_sb = nl.ndarray((1, experts + 1), nl.int32, buffer=nl.sbuf)
    nisa.nonzero_with_count(dst=active_sb, src=any_sb, padding_val=0)
    count = nisa.register_alloc()
    nisa.register_load(count, active_sb[:, experts : experts + 1])
    now_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    before_sb = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=before_sb, src=active_sb[:, 0:1])
    up(e, before_sb, 0)
    finish_up(e, 0)

    def one_expert(i: nl.NkiTensor) -> None:
        nisa.tensor_copy(dst=now_sb, src=active_sb.ap([[experts + 1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
        up(e, now_sb, 1)
        down(e, before_sb, 0, False)
        finish_up(e, 1)
        nisa.tensor_copy(dst=e.hidden[0], src=e.hidden[1])
        nisa.tensor_copy(dst=e.scales[0], src=e.scales[1])
        nisa.tensor_copy(dst=before_sb, src=now_sb)

    nl.fori_loop(1, count, one_expert)
    down(e, before_sb, 0, True)
    return e.out
