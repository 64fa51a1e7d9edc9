# SPDX-License-Identifier: Apache-2.0
"""The engram's gate: how much of the looked-up value each residual stream takes."""

import nki
import nki.isa as nisa
import nki.language as nl

from .fold import folded, load, load_per_part, row_sums, rows_at_a_time, same_row, sum_folds
from .rms_norm import rms_scale
from .split import core_share, tiles

MOST_VALUES = 5120
"""Of a part of a row's streams: what SBUF has room for."""
LEAST_DOT = 1e-6


@nki.jit
def engram_gate(x: nl.NkiTensor, key: nl.NkiTensor, value: nl.NkiTensor, weight: nl.NkiTensor, eps: float) -> nl.NkiTensor:
    """x + gate * value per stream; the gate is the sigmoid of the signed root of the normalised weighted dot of x and key.

    Dimensions:
        M: rows, any number. hc: streams. D: columns; hc D / J at most 5120. Each core has half of the rows.

    Args:
        x, key [M, hc, D], value [M, D] bf16 or fp32, of one dtype @ HBM. weight [hc, D] fp32 @ HBM: q_weight * k_weight.

    Returns:
        [M, hc, D] of x's dtype @ shared HBM.

    Notes:
        Reference: engram.layer.Engram.forward. A row's three sums per stream, of x key weight, x^2 and key^2, lie on J
        partitions and are added up by one matmul with 0 and 1. The squares run on ScalarE beside VectorE's products.

    Pseudocode:
        dot = sum(x * key * weight) * rms_scale(x) * rms_scale(key) * D^-0.5
        gate = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6)));  out = round(x + gate * value)

    Cost:
        Per tile of rows: 5 dma_copy and the identity, 2 nc_matmul, 11 + hc VectorE, 2 hc + 5 ScalarE instructions.
        Predicted for 6 rows of 4 x 5120, two cores: 14.2 us.
    """
    rows, hc, dim = x.shape
    for name, found, shape in (("key", key, (rows, hc, dim)), ("value", value, (rows, dim)), ("weight", weight, (hc, dim))):
        assert found.shape == shape, f"{name} {found.shape}, expected {shape}"
    assert key.dtype == x.dtype and value.dtype == x.dtype, f"x {x.dtype}, key {key.dtype}, value {value.dtype}: not the same"
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, rows_at_a_time(dim, hc, MOST_VALUES)):
        start += first
        end, parts = start + count, sum_folds(count, dim)
        x_sb, key_sb = load(x[start:end], parts), load(key[start:end], parts)
        value_sb = load(value[start:end], parts)
        weight_sb = load_per_part(weight, parts, count)
        gate_sb = gates(stream_sums(x_sb, key_sb, weight_sb, same_row(count, parts)), dim, eps)
        out_sb = nl.ndarray(x_sb.shape, x.dtype, buffer=nl.sbuf)
        for c in range(hc):
            nisa.scalar_tensor_tensor(
                dst=out_sb[:, c], data=value_sb, op0=nl.multiply, operand0=gate_sb[:, c : c + 1], op1=nl.add,
                operand1=x_sb[:, c],
            )  # fmt: skip
        nisa.dma_copy(dst=folded(out[start:end], parts), src=out_sb)
    return out


def stream_sums(x_sb: nl.NkiTensor, key_sb: nl.NkiTensor, weight_sb: nl.NkiTensor, same_sb: nl.NkiTensor) -> nl.NkiTensor:
    """[P, 3, hc] @ PSUM, over the rows of x_sb, key_sb, weight_sb [P, hc, W]: of x key weight, x^2, key^2."""
    partitions, hc, width = x_sb.shape
    part_sb = nl.ndarray((partitions, 3, hc), nl.float32, buffer=nl.sbuf)
    product_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=product_sb, data1=x_sb, data2=key_sb, op=nl.multiply)
    nisa.tensor_tensor(dst=product_sb, data1=product_sb, data2=weight_sb, op=nl.multiply)
    nisa.tensor_reduce(dst=part_sb[:, 0], op=nl.add, data=product_sb, axis=2)
    square_sb = nl.ndarray((partitions, width), nl.float32, buffer=nl.sbuf)
    for which, data in ((1, x_sb), (2, key_sb)):
        for c in range(hc):
            nisa.activation(
                dst=square_sb, op=nl.square, data=data[:, c], reduce_op=nl.add, reduce_res=part_sb[:, which, c : c + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )  # fmt: skip
    return row_sums(part_sb, same_sb)


def gates(sums_psum: nl.NkiTensor, dim: int, eps: float) -> nl.NkiTensor:
    """[P, hc] fp32 @ SBUF of the sums [P, 3, hc] @ PSUM."""
    partitions, _, hc = sums_psum.shape
    scale_sb = rms_scale(sums_psum[:, 1:3], dim, eps)
    dot_sb = nl.ndarray((partitions, hc), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=dot_sb, data1=sums_psum[:, 0], data2=scale_sb[:, 0], op=nl.multiply)
    nisa.scalar_tensor_tensor(
        dst=dot_sb, data=dot_sb, op0=nl.multiply, operand0=dim**-0.5, op1=nl.multiply, operand1=scale_sb[:, 1]
    )
    root_sb = nl.ndarray((partitions, hc), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=root_sb, op=nl.abs, data=dot_sb)
    nisa.tensor_scalar(dst=root_sb, data=root_sb, op0=nl.maximum, operand0=LEAST_DOT)
    nisa.activation(dst=root_sb, op=nl.sqrt, data=root_sb)
    nisa.activation(dst=dot_sb, op=nl.sign, data=dot_sb)
    nisa.tensor_tensor(dst=dot_sb, data1=dot_sb, data2=root_sb, op=nl.multiply)
    nisa.activation(dst=dot_sb, op=nl.sigmoid, data=dot_sb)
    return dot_sb
