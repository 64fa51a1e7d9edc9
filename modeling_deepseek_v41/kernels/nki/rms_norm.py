# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, the collapse of the residual streams, and both in one, few rows folded over all partitions."""

import nki
import nki.isa as nisa
import nki.language as nl

from .fold import folded, load, load_per_part, load_per_row, row_sums, rows_at_a_time, same_row, sum_folds
from .split import PARTITIONS, core_share, tiles

LEAST_SQUARE = 2.0**-80
"""Of mean + eps: within what rsqrt takes. Rows of such values come out as zeros, in fp32 too."""
MOST_COLUMNS = 8192
"""Of a row's part: what SBUF has room for."""


@nki.jit
def rms_norm(x: nl.NkiTensor, weight: nl.NkiTensor, eps: float) -> nl.NkiTensor:
    """x rsqrt(mean(x^2) + eps) weight over each row, rounded to x's dtype.

    Dimensions:
        M: rows, any number. D: columns, to 8192. J: parts of a row; each core has half of the rows.

    Args:
        x [M, D] bf16 or fp32 @ HBM. weight [1, D] fp32 @ HBM.

    Returns:
        [M, D] of x's dtype @ shared HBM.

    Notes:
        Reference: linear.rms_norm. A row lies on J partitions, whose sums of squares a matmul with 0 and 1 adds up.
        mean + eps below 2^-80 counts as 2^-80: rsqrt's range on the device.

    Pseudocode:
        s = rsqrt(row_sums(sum(x^2)) / D + eps);  out = round(x * s * weight)

    Cost:
        Per 128 rows of a core: 3 dma_copy and the identity, 2 nc_matmul, 2 activation, 2 tensor_copy and 3 further
        VectorE instructions. Predicted for 6 rows of 5120, two cores: 6.2 us, of which 4 us are load and store.
    """
    rows, dim = x.shape
    assert weight.shape == (1, dim), f"weight {weight.shape}, expected {(1, dim)}"
    assert dim <= MOST_COLUMNS, f"x {x.shape}: at most {MOST_COLUMNS} columns"
    out = nl.ndarray((rows, dim), x.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, PARTITIONS):
        start += first
        parts = sum_folds(count, dim)
        x_sb = load(x[start : start + count], parts)
        normalise(folded(out[start : start + count], parts), x_sb, weight, parts, eps)
    return out


@nki.jit
def collapse(x: nl.NkiTensor, pre: nl.NkiTensor, weight: nl.NkiTensor, eps: float) -> nl.NkiTensor:
    """A sublayer's input: RMSNorm of the sum over streams of pre times x, both rounded to x's dtype.

    Dimensions:
        M: rows, any number. hc: streams. D: columns, hc D / J at most 8192. Each core has half of the rows.

    Args:
        x [M, hc, D] bf16 or fp32 @ HBM. pre [M, hc] fp32 @ HBM. weight [1, D] fp32 @ HBM.

    Returns:
        [M, D] of x's dtype @ shared HBM.

    Notes:
        Reference: hyper_connections.collapse. In one pass: the sum does not go to memory, which saves a store and a load, 4 us.

    Pseudocode:
        h = round(sum over c of pre[:, c] * x[:, c]);  out = rms_norm(h)

    Cost:
        That of ``rms_norm`` and hc VectorE instructions and one DMA. Predicted for 6 rows of 4 x 5120, two cores: 8.1 us.
    """
    rows, hc, dim = x.shape
    assert pre.shape == (rows, hc), f"pre {pre.shape}, expected {(rows, hc)}"
    assert weight.shape == (1, dim), f"weight {weight.shape}, expected {(1, dim)}"
    out = nl.ndarray((rows, dim), x.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, rows_at_a_time(dim, hc, MOST_COLUMNS)):
        start += first
        parts = sum_folds(count, dim)
        x_sb = load(x[start : start + count], parts)
        pre_sb = load_per_row(pre[start : start + count], parts)
        h_sb = nl.ndarray((parts * count, dim // parts), x.dtype, buffer=nl.sbuf)
        weighted_sum(h_sb, x_sb, pre_sb)
        normalise(folded(out[start : start + count], parts), h_sb, weight, parts, eps)
    return out


@nki.jit
def collapse_streams(x: nl.NkiTensor, pre: nl.NkiTensor) -> nl.NkiTensor:
    """The sum over streams of pre times x, rounded to x's dtype: the collapse of the drafter, whose norm comes later.

    Dimensions:
        M: rows, any number. hc: streams. D: columns, hc D / J at most 8192. Each core has half of the rows.

    Args:
        x [M, hc, D] bf16 or fp32 @ HBM. pre [M, hc] fp32 @ HBM.

    Returns:
        [M, D] of x's dtype @ shared HBM.

    Notes:
        Reference: hyper_connections.weighted_sum.

    Pseudocode:
        out = round(sum over c of pre[:, c] * x[:, c])

    Cost:
        Per tile of rows: 3 dma_copy and hc VectorE instructions. Predicted for 5 rows of 4 x 5120, two cores: 6.8 us.
    """
    rows, hc, dim = x.shape
    assert pre.shape == (rows, hc), f"pre {pre.shape}, expected {(rows, hc)}"
    out = nl.ndarray((rows, dim), x.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, rows_at_a_time(dim, hc, MOST_COLUMNS)):
        start += first
        parts = sum_folds(count, dim)
        h_sb = nl.ndarray((parts * count, dim // parts), x.dtype, buffer=nl.sbuf)
        weighted_sum(h_sb, load(x[start : start + count], parts), load_per_row(pre[start : start + count], parts))
        nisa.dma_copy(dst=folded(out[start : start + count], parts), src=h_sb)
    return out


def weighted_sum(h_sb: nl.NkiTensor, x_sb: nl.NkiTensor, pre_sb: nl.NkiTensor) -> None:
    """h_sb [P, W] = sum over c of pre_sb [P, hc] times x_sb [P, hc, W], in fp32: hc VectorE instructions."""
    hc = x_sb.shape[1]
    sum_sb = h_sb if hc == 1 else nl.ndarray(h_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=sum_sb, data=x_sb[:, 0], op0=nl.multiply, operand0=pre_sb[:, 0:1])
    for c in range(1, hc):
        nisa.scalar_tensor_tensor(
            dst=h_sb if c + 1 == hc else sum_sb, data=x_sb[:, c], op0=nl.multiply, operand0=pre_sb[:, c : c + 1],
            op1=nl.add, operand1=sum_sb,
        )  # fmt: skip


def rms_scale(sums_psum: nl.NkiTensor, dim: int, eps: float) -> nl.NkiTensor:
    """rsqrt(sums / dim + eps): [P, n] fp32 @ SBUF of row sums of squares [P, n] @ PSUM."""
    scale_sb = nl.ndarray(sums_psum.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=scale_sb, data=sums_psum, op0=nl.multiply, operand0=1.0 / dim, op1=nl.add, operand1=eps)
    nisa.tensor_scalar(dst=scale_sb, data=scale_sb, op0=nl.maximum, operand0=LEAST_SQUARE)
    nisa.activation(dst=scale_sb, op=nl.rsqrt, data=scale_sb)
    return scale_sb


def normalise(target: nl.NkiTensor, x_sb: nl.NkiTensor, weight: nl.NkiTensor, parts: int, eps: float) -> None:
    """target [J, M, D / J] @ HBM = RMSNorm of x_sb [J M, D / J]; weight [1, D] @ HBM."""
    dim, rows = weight.shape[1], x_sb.shape[0] // parts
    weight_sb = load_per_part(weight[0], parts, rows)
    same_sb = same_row(rows, parts)
    squares_sb = nl.ndarray(x_sb.shape, nl.float32, buffer=nl.sbuf)
    part_sb = nl.ndarray((x_sb.shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=squares_sb, op=nl.square, data=x_sb, reduce_op=nl.add, reduce_res=part_sb, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    scale_sb = rms_scale(row_sums(part_sb, same_sb), dim, eps)
    out_sb = nl.ndarray(x_sb.shape, x_sb.dtype, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=out_sb, data=x_sb, op0=nl.multiply, operand0=scale_sb, op1=nl.multiply, operand1=weight_sb)
    nisa.dma_copy(dst=target, src=out_sb)
