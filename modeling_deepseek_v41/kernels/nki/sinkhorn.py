# SPDX-License-Identifier: Apache-2.0
"""On the device: softmax and Sinkhorn rounds of a small matrix per row, by scaling its rows and columns.

Stream i of row t lies on partition i T + t, of T rows. A normalisation divides by (sum + eps), so comb stays diag(u) K diag(v),
where K is the softmax + eps, and what u and v are the reciprocals of follows from what it was before:

    1 / u = K v + eps / u before;  1 / v = K^T u + eps / v before

Half a round is a matmul of one column and a reciprocal; the term of eps is a matmul beside them that waits for neither.
"""

import nki.isa as nisa
import nki.language as nl


def indicator(left: nl.NkiTensor, right: nl.NkiTensor) -> nl.NkiTensor:
    """left^T right of 0/1 tiles [K, ..] fp32, of which K agree in one place at most: a 0/1 tile fp32 @ SBUF."""
    sizes = []
    for tile in (left, right):
        size = 1
        for extent in tile.shape[1:]:
            size *= extent
        sizes.append(size)
    found_psum = nl.ndarray((sizes[0], sizes[1]), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=found_psum, stationary=left, moving=right, accumulate=False)
    found_sb = nl.ndarray((sizes[0], sizes[1]), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=found_sb, src=found_psum, engine=nisa.engine.scalar)
    return found_sb


def softmax(logits_sb: nl.NkiTensor, eps: float) -> nl.NkiTensor:
    """Softmax over the columns of [P, n] fp32, + eps: [P, n] fp32 @ SBUF."""
    parts = logits_sb.shape[0]
    most_sb = nl.ndarray((parts, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=logits_sb, axis=1, negate=True)
    soft_sb = nl.ndarray(logits_sb.shape, nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((parts, 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=soft_sb, op=nl.exp, data=logits_sb, bias=most_sb, reduce_op=nl.add, reduce_res=sum_sb,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    nisa.reciprocal(dst=sum_sb, data=sum_sb)
    nisa.tensor_scalar(dst=soft_sb, data=soft_sb, op0=nl.multiply, operand0=sum_sb, op1=nl.add, operand1=eps)
    return soft_sb


def sinkhorn(
    soft_sb: nl.NkiTensor, row_sb: nl.NkiTensor, stream_sb: nl.NkiTensor, identity_sb: nl.NkiTensor, rounds: int, eps: float
) -> nl.NkiTensor:
    """soft_sb [hc T, hc], (from, row) and to, after a column normalisation and ``rounds`` row and column ones: the same shape.

    row_sb [hc T, T] and stream_sb [hc T, hc]: 1 where a partition has the row, the stream. identity_sb [hc T, hc T]. All fp32.
    """
    size, hc = soft_sb.shape
    rows = row_sb.shape[1]
    eps_sb = nl.ndarray((size, size), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=eps_sb, data=identity_sb, op0=nl.multiply, operand0=eps, engine=nisa.engine.scalar)
    ones_sb = nl.ndarray((size, 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones_sb, value=1.0, engine=nisa.engine.gpsimd)
    same_row = row_sb.expand_dim(1).broadcast(1, hc)
    columns_sb = nl.ndarray((size, hc, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=columns_sb, data1=soft_sb.expand_dim(2).broadcast(2, rows), data2=same_row, op=nl.multiply)
    turned_psum = nl.ndarray((size, size), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=columns_sb)
    rows_sb = nl.ndarray((size, size), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows_sb, src=turned_psum, engine=nisa.engine.scalar)

    u_sb, row_sums = ones_sb, ones_sb
    v_sb, column_sums = half_round(columns_sb, u_sb, eps_sb, ones_sb)
    for _ in range(rounds):
        u_sb, row_sums = half_round(rows_sb, v_sb, eps_sb, row_sums)
        v_sb, column_sums = half_round(columns_sb, u_sb, eps_sb, column_sums)

    comb_sb = nl.ndarray((size, hc), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=comb_sb, data=soft_sb, op0=nl.multiply, operand0=u_sb, engine=nisa.engine.scalar)
    by_stream_sb = nl.ndarray((size, hc), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=by_stream_sb, data=stream_sb, op0=nl.multiply, operand0=v_sb, engine=nisa.engine.scalar)
    v_psum = nl.ndarray((size, hc), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=v_psum, stationary=same_row, moving=by_stream_sb, accumulate=False)
    nisa.tensor_tensor(dst=comb_sb, data1=v_psum, data2=comb_sb, op=nl.multiply)
    return comb_sb


def half_round(
    tile_sb: nl.NkiTensor, factor_sb: nl.NkiTensor, eps_sb: nl.NkiTensor, before_sb: nl.NkiTensor
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """The reciprocals of sums = tile_sb^T factor_sb + eps before_sb, and the sums: [P, 1] fp32 @ SBUF."""
    size = (factor_sb.shape[0], 1)
    sums_psum = nl.ndarray(size, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums_psum, stationary=eps_sb, moving=before_sb, accumulate=False)
    nisa.nc_matmul(dst=sums_psum, stationary=tile_sb, moving=factor_sb, accumulate=True)
    inverse_sb = nl.ndarray(size, nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse_sb, data=sums_psum)
    sums_sb = nl.ndarray(size, nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=sums_sb, src=sums_psum, engine=nisa.engine.scalar)
    return inverse_sb, sums_sb
