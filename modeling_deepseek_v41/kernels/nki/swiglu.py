# SPDX-License-Identifier: Apache-2.0
"""The clamped SwiGLU between an expert's linears, times the routing weight, with the QDQ for the second one."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .fold import flat, folded, folds, load_per_row
from .split import PARTITIONS, core_share, tiles

CHUNK = 2048
"""Columns of a part at a time."""


@nki.jit
def swiglu(
    gate_up: nl.NkiTensor, routing: nl.NkiTensor | None = None, limit: float = 0.0, quantize: bool = False
) -> nl.NkiTensor:
    """silu(gate) * up * routing, gate and up the halves of gate_up, rounded to its dtype, through the QDQ where ``quantize``.

    Dimensions:
        M: rows, any number. I: columns. J: parts of a row; each core has half of the rows.

    Args:
        gate_up [M, 2 I] bf16 or fp32 @ HBM. routing [M, 1] fp32 @ HBM, none for 1.
        limit: gate is at most that, up within plus and minus; 0 is no clamp.
        quantize: I is a multiple of 32, gate_up bf16.

    Returns:
        [M, I] of gate_up's dtype @ shared HBM.

    Notes:
        Reference: experts.swiglu. For the shared expert and prefill; the routed experts' kernel does the same in passing.
        The QDQ in the same pass saves a store, a load and a launch.

    Pseudocode:
        gate = min(gate, limit);  up = max(min(up, limit), -limit);  h = round(silu(gate) * routing * up);  out = qdq(h)

    Cost:
        Per 128 rows and 2,048 columns of a part: 3 dma_copy, 3 VectorE and 1 ScalarE instruction; 8 and 2 more for the QDQ.
        Predicted for 6 rows of 288 with QDQ, two cores: 5.7 us.
    """
    rows, both = gate_up.shape
    columns = both // 2
    assert both % 2 == 0, f"gate_up {gate_up.shape}: two halves, found {both} columns"
    assert routing is None or routing.shape == (rows, 1), f"routing {routing.shape}, expected {(rows, 1)}"
    assert not quantize or columns % GROUP == 0, f"quantize: {columns} columns are no multiple of {GROUP}"
    assert not quantize or gate_up.dtype == nl.bfloat16, f"quantize: gate_up is {gate_up.dtype}, expected bfloat16"
    out = nl.ndarray((rows, columns), gate_up.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, PARTITIONS):
        start += first
        parts = folds(count, columns, GROUP if quantize else 1)
        source = folded(gate_up[start : start + count].reshape_dim(1, (2, columns)), parts)
        target = folded(out[start : start + count], parts)
        routing_sb = None if routing is None else load_per_row(routing[start : start + count], parts)
        for at, n in tiles(columns // parts, CHUNK):
            activate(target[:, :, at : at + n], source[:, :, :, at : at + n], routing_sb, limit, quantize)
    return out


def activate(target: nl.NkiTensor, source: nl.NkiTensor, routing_sb: nl.NkiTensor | None, limit: float, quantize: bool) -> None:
    """target [J, M, n] @ HBM of source [J, M, 2, n] @ HBM; routing_sb [J M, 1]."""
    gate_up_sb = nl.ndarray(flat(source), source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=gate_up_sb, src=source)
    h_sb = nl.ndarray(flat(target), target.dtype, buffer=nl.sbuf)
    gated(h_sb, gate_up_sb, routing_sb, limit, quantize)
    nisa.dma_copy(dst=target, src=h_sb)


def gated(h_sb: nl.NkiTensor, gate_up_sb: nl.NkiTensor, routing_sb: nl.NkiTensor | None, limit: float, quantize: bool) -> None:
    """h_sb [P, n] of gate_up_sb [P, 2, n], which is clamped in place, and routing_sb [P, 1] fp32, none for 1."""
    gate, up = gate_up_sb[:, 0], gate_up_sb[:, 1]
    if limit > 0:
        nisa.tensor_scalar(dst=gate, data=gate, op0=nl.minimum, operand0=limit)
        nisa.tensor_scalar(dst=up, data=up, op0=nl.minimum, operand0=limit, op1=nl.maximum, operand1=-limit)
    silu_sb = nl.ndarray(h_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=silu_sb, op=nl.silu, data=gate)
    weight = 1.0 if routing_sb is None else routing_sb
    nisa.scalar_tensor_tensor(dst=h_sb, data=silu_sb, op0=nl.multiply, operand0=weight, op1=nl.multiply, operand1=up)
    if quantize:
        groups = h_sb.reshape_dim(1, (h_sb.shape[1] // GROUP, GROUP))
        qdq(groups, groups)
