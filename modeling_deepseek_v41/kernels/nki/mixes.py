# SPDX-License-Identifier: Apache-2.0
"""The mixing coefficients of hyper-connections: norm, gates, softmax and Sinkhorn rounds."""

import nki
import nki.isa as nisa
import nki.language as nl

from .split import PARTITIONS, core_share


@nki.jit
def mixes(
    raw: nl.NkiTensor, x: nl.NkiTensor, scale: nl.NkiTensor, base: nl.NkiTensor, rounds: int, eps: float, norm_eps: float
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
    """pre, post and comb of each row from raw = flatten(x) fn^T and the streams x themselves.

    Dimensions:
        T: rows, 1 to 128. hc: streams, 1 to 11. M = (2 + hc) hc mixes. P F = hc d, the values of a row's streams.

    Args:
        raw [T, M] float32 @ HBM.
        x [T, P, F] float32 or bfloat16 @ HBM, P <= 128: a row's streams in any split over partitions.
        scale, base [1, M] float32 @ HBM.
        rounds: of row and column normalisation after the first column one. eps, norm_eps: hc_eps, rms_norm_eps.

    Returns:
        pre [T, hc], post [T, hc], comb [T, hc, hc] (from, to), float32 @ shared HBM.

    Notes:
        - Reference: hyper_connections.mixes, within 1e-5: divisions are multiplications by reciprocals.
        - The rounds run transposed, comb as [hc hc, T]: a matmul with a 0/1 tile gives every element the sum of its row or
          column at once, and a further partition of ones, weighted eps, adds eps to it. So half a round is three
          instructions: matmul, reciprocal, multiply.
        - Each core has its own rows.

    Pseudocode:
        logits = raw * rsqrt(mean(x^2) + norm_eps) * scale + base
        pre = sigmoid(logits[:hc]) + eps;  post = 2 sigmoid(logits[hc : 2 hc]);  comb = softmax(logits[2 hc :]) + eps
        comb *= 1 / (column sum + eps), then ``rounds`` times: comb *= 1 / (row sum + eps); comb *= 1 / (column sum + eps)

    Cost:
        2 rounds + 1 halves of three dependent instructions, 0.37 us each: 14.4 us of latency at 19 rounds, a third of it
        busy, whatever the number of rows. 2 transposes, 3 matmuls and the norm, gates and softmax around them. Predicted
        for 6 rows of 4 x 5120, two cores: 20 us, all latency; it should overlap with other work.
    """
    total, parts, per_part = x.shape
    count = scale.shape[1]
    hc = 1
    while (2 + hc) * hc < count:
        hc += 1
    square = hc * hc
    assert 1 <= total <= PARTITIONS and parts <= PARTITIONS, f"x {x.shape}: at most 128 rows, and partitions of a row"
    assert count == (2 + hc) * hc and square < PARTITIONS, f"scale {scale.shape}: expected (2 + hc) hc mixes, hc up to 11"
    assert raw.shape == (total, count) and base.shape == (1, count), f"raw {raw.shape}, base {base.shape}, {count} mixes"
    pre = nl.ndarray((total, hc), nl.float32, buffer=nl.shared_hbm)
    post = nl.ndarray((total, hc), nl.float32, buffer=nl.shared_hbm)
    comb = nl.ndarray((total, hc, hc), nl.float32, buffer=nl.shared_hbm)
    first, rows = core_share(total)
    if rows == 0:
        return pre, post, comb
    last = first + rows

    logits_sb = _logits(raw[first:last], x[first:last], scale, base, norm_eps)
    gates_sb = nl.ndarray((rows, 2 * hc), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gates_sb, op=nl.sigmoid, data=logits_sb[:, 0 : 2 * hc])
    nisa.tensor_scalar(dst=gates_sb[:, 0:hc], data=gates_sb[:, 0:hc], op0=nl.add, operand0=eps)
    nisa.tensor_scalar(dst=gates_sb[:, hc : 2 * hc], data=gates_sb[:, hc : 2 * hc], op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=pre[first:last], src=gates_sb[:, 0:hc])
    nisa.dma_copy(dst=post[first:last], src=gates_sb[:, hc : 2 * hc])

    # [rows, hc hc + 1]: the softmax, and the ones that carry eps
    comb_sb = nl.ones((rows, square + 1), nl.float32)
    _softmax(comb_sb[:, 0:square].reshape_dim(1, (hc, hc)), logits_sb[:, 2 * hc : count].reshape_dim(1, (hc, hc)), eps)
    turned_psum = nl.ndarray((square + 1, rows), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned_psum, data=comb_sb)
    turned_sb = nl.ndarray((square + 1, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=turned_sb, src=turned_psum)
    row_sums, column_sums = _sums(hc, eps)
    _normalise(turned_sb, column_sums)
    for _ in range(rounds):
        _normalise(turned_sb, row_sums)
        _normalise(turned_sb, column_sums)
    back_psum = nl.ndarray((rows, square), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=back_psum, data=turned_sb[0:square, :])
    nisa.tensor_copy(dst=comb_sb[:, 0:square], src=back_psum)
    nisa.dma_copy(dst=comb[first:last].flatten_dims(1, 2), src=comb_sb[:, 0:square])
    return pre, post, comb


def _logits(raw: nl.NkiTensor, x: nl.NkiTensor, scale: nl.NkiTensor, base: nl.NkiTensor, norm_eps: float) -> nl.NkiTensor:
    """raw * rsqrt(mean(x^2) + norm_eps) * scale + base, [rows, M]."""
    rows, parts, per_part = x.shape
    count = scale.shape[1]
    x_sb = nl.ndarray((parts, rows, per_part), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x.permute((1, 0, 2)))
    raw_sb = nl.ndarray((rows, count), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=raw_sb, src=raw)
    scale_sb = nl.ndarray((rows, count), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=scale_sb, src=scale.broadcast(0, rows))
    base_sb = nl.ndarray((rows, count), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=base_sb, src=base.broadcast(0, rows))
    squares_sb = nl.ndarray((parts, rows, per_part), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=squares_sb, op=nl.square, data=x_sb)
    part_sb = nl.ndarray((parts, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=part_sb, op=nl.add, data=squares_sb, axis=2)
    mean_psum = nl.ndarray((rows, 1), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=mean_psum, stationary=part_sb, moving=nl.ones((parts, 1), nl.float32), accumulate=False)
    norm_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=norm_sb, data=mean_psum, op0=nl.multiply, operand0=1.0 / (parts * per_part), op1=nl.add, operand1=norm_eps
    )
    nisa.activation(dst=norm_sb, op=nl.rsqrt, data=norm_sb)
    logits_sb = nl.ndarray((rows, count), nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=logits_sb, data=raw_sb, op0=nl.multiply, operand0=norm_sb, op1=nl.multiply, operand1=scale_sb)
    nisa.tensor_tensor(dst=logits_sb, data1=logits_sb, data2=base_sb, op=nl.add)
    return logits_sb


def _softmax(dst: nl.NkiTensor, logits: nl.NkiTensor, eps: float) -> None:
    """Softmax over the last axis of [rows, hc, hc], + eps."""
    rows, hc, _ = dst.shape
    most_sb = nl.ndarray((rows, hc), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=logits, axis=2)
    nisa.tensor_tensor(dst=dst, data1=logits, data2=most_sb.expand_dim(2).broadcast(2, hc), op=nl.subtract)
    nisa.activation(dst=dst, op=nl.exp, data=dst)
    sum_sb = nl.ndarray((rows, hc), nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sum_sb, op=nl.add, data=dst, axis=2)
    nisa.reciprocal(dst=sum_sb, data=sum_sb)
    nisa.tensor_tensor(dst=dst, data1=dst, data2=sum_sb.expand_dim(2).broadcast(2, hc), op=nl.multiply)
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.add, operand0=eps)


def _sums(hc: int, eps: float) -> list:
    """Stationary tiles [hc hc + 1, hc hc] that sum over each element's row and over its column; the last partition is eps."""
    square = hc * hc
    identity_sb = nl.shared_identity_matrix(hc, nl.float32)
    found = []
    for same in (identity_sb.expand_dim(2).broadcast(2, hc), identity_sb.expand_dim(1).broadcast(1, hc)):
        member_sb = nl.ndarray((hc, hc, hc), nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=member_sb, src=same)
        member = member_sb.flatten_dims(1, 2)
        together_psum = nl.ndarray((square, square), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=together_psum, stationary=member, moving=member, accumulate=False)
        sums_sb = nl.ndarray((square + 1, square), nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=sums_sb, value=eps)
        nisa.tensor_copy(dst=sums_sb[0:square, :], src=together_psum)
        found.append(sums_sb)
    return found


def _normalise(turned_sb: nl.NkiTensor, sums_sb: nl.NkiTensor) -> None:
    """Divides every element of [hc hc + 1, rows], the last partition of ones left out, by (its sum + eps)."""
    square, rows = sums_sb.shape[1], turned_sb.shape[1]
    sum_psum = nl.ndarray((square, rows), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sum_psum, stationary=sums_sb, moving=turned_sb, accumulate=False)
    inverse_sb = nl.ndarray((square, rows), nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse_sb, data=sum_psum)
    nisa.tensor_tensor(dst=turned_sb[0:square, :], data1=turned_sb[0:square, :], data2=inverse_sb, op=nl.multiply)
