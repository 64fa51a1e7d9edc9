# SPDX-License-Identifier: Apache-2.0
"""What stands before a sublayer in one launch: its mixing coefficients and, with the coefficients before it, its input."""

import nki
import nki.isa as nisa
import nki.language as nl

from .exchange import exchange
from .fold import folded, load, load_per_part, load_per_row
from .rms_norm import LEAST_SQUARE
from .sinkhorn import indicator, sinkhorn, softmax
from .split import PARTITIONS, tiles
from .stream_sums import load_weight, members, square_sums, store_products, store_row_sums, turned, weighted_sum


@nki.jit
def sublayer_input(
    x: nl.NkiTensor, pre_mix: nl.NkiTensor, fn: nl.NkiTensor, scale: nl.NkiTensor, base: nl.NkiTensor, weight: nl.NkiTensor,
    rounds: int, eps: float, norm_eps: float,
) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:  # fmt: skip
    """h = rms_norm(sum over streams of pre_mix times x), and pre, post and comb, the mixes of raw = flatten(x) fn^T.

    Dimensions:
        M: rows, any number, T = 128 / hc at a time. hc: streams, to 10. D: columns. C: cores, each with D / C columns of every
        stream, J parts of W. R = 128 / J: rows on the partitions at a time.

    Args:
        x [M, hc, D] bf16 or fp32 @ HBM. pre_mix [M, hc] fp32 @ HBM: the previous sublayer's pre.
        fn [C, W, hc J, (2 + hc) hc], scale, base [hc, 2 + hc] fp32 @ HBM: streams_layout.py. weight [1, D] fp32 @ HBM.
        rounds: of row and column normalisation after the first column one. eps, norm_eps: hc_eps, rms_norm_eps.

    Returns:
        h [M, D] of x's dtype, pre, post [M, hc] and comb [M, hc, hc] (from, to) fp32 @ shared HBM.

    Notes:
        - Reference: hyper_connections.sublayer_input; the mixes within 1e-5.
        - A core multiplies its half of the columns; the cores exchange their sums once, [hc T, 4 + hc] fp32: the products and
          the squares of both norms. What follows of the mixes both do for all rows.
        - x is loaded once, parts and rows on the partitions: the collapse reads it so, the product its transpose.
        - norm_eps counts as 2^-80 at least: rsqrt's range on the device.

    Pseudocode:
        g = round(sum over c of pre_mix[:, c] * x[:, c])
        raw, sx, sg = own + received of (x fn^T, sum(x^2), sum(g^2))
        h = round(g * rsqrt(sg / D + norm_eps) * weight);  logits = raw * rsqrt(sx / (hc D) + norm_eps) * scale + base
        pre = sigmoid(logits[0]) + eps;  post = 2 sigmoid(logits[1]);  comb = sinkhorn(softmax(logits[2:]) + eps)

    Cost:
        Per T rows of a core: hc J + 2 (2 rounds + 1) + 6 nc_matmul and, per R rows, three more and hc transposes; 2 rounds + 2
        reciprocals on VectorE; a half of a round takes 0.165 us. Bound: latency. Predicted for 6 rows of 4 x 5120, two cores:
        19.3 us, of which 4 us are load and store, 2.1 us the exchange and 6.4 us 39 halves of rounds; VectorE 3.3 us. In
        three launches 38.7 us and 9.9 us. 128 rows 108 us, bound 53: ScalarE.
    """
    rows, hc, dim = x.shape
    cores, width, k_tiles, count = fn.shape
    parts, share = k_tiles // hc, dim // cores
    assert cores == nl.num_programs(), f"fn {fn.shape}: for {cores} cores, launched on {nl.num_programs()}"
    assert dim % cores == 0 and width * k_tiles == hc * share, f"fn {fn.shape}, x {x.shape}: other columns"
    assert count == (2 + hc) * hc <= PARTITIONS and parts <= PARTITIONS, f"fn {fn.shape}: to 128 mixes and parts of a stream"
    for name, found, shape in (("scale", scale, (hc, 2 + hc)), ("base", base, (hc, 2 + hc)), ("weight", weight, (1, dim))):
        assert found.shape == shape, f"{name} {found.shape}, expected {shape}"
    assert pre_mix.shape == (rows, hc), f"pre_mix {pre_mix.shape}, expected {(rows, hc)}"
    h = nl.ndarray((rows, dim), x.dtype, buffer=nl.shared_hbm)
    pre = nl.ndarray((rows, hc), nl.float32, buffer=nl.shared_hbm)
    post = nl.ndarray((rows, hc), nl.float32, buffer=nl.shared_hbm)
    comb = nl.ndarray((rows, hc, hc), nl.float32, buffer=nl.shared_hbm)
    first = nl.program_id() * share
    own_x, own_h, own_weight = x[:, :, first : first + share], h[:, first : first + share], weight[0, first : first + share]
    eps_sb = nl.ndarray((PARTITIONS, 1), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=eps_sb, value=max(norm_eps, LEAST_SQUARE), engine=nisa.engine.gpsimd)
    fn_tiles: list = []
    for start, n in tiles(rows, PARTITIONS // hc):
        end, groups = start + n, tiles(n, PARTITIONS // parts)
        streams: list = []
        factors: list = []
        for at, r in groups:
            streams.append(load(own_x[start + at : start + at + r], parts))
        identity_sb = nl.shared_identity_matrix(max(hc * n, 2 + hc), nl.float32)
        for at, r in groups:
            factors.append(load_per_row(pre_mix[start + at : start + at + r], parts))
        if start == 0:
            fn_tiles = load_weight(fn[nl.program_id()])
        scale_sb, base_sb = load_per_stream(scale, n), load_per_stream(base, n)

        columns_sb, member_tiles = turned(streams, groups), members(groups, parts, hc, identity_sb)
        row_sb, stream_sb = row_and_stream(identity_sb, hc, n)
        collapsed: list = []
        part_sums: list = []
        for g in range(len(groups)):
            collapsed.append(weighted_sum(streams[g], factors[g]))
            part_sums.append(square_sums(streams[g], collapsed[g]))
        sums_sb = nl.ndarray((hc * n, 4 + hc), nl.float32, buffer=nl.sbuf)
        store_products(sums_sb[:, 0 : 2 + hc], columns_sb, fn_tiles, identity_sb)
        store_row_sums(sums_sb[:, 2 + hc : 4 + hc], part_sums, member_tiles)
        if cores > 1:
            received_sb = nl.ndarray(sums_sb.shape, nl.float32, buffer=nl.sbuf)
            exchange(sums_sb, received_sb, 0)
            nisa.tensor_tensor(dst=sums_sb, data1=sums_sb, data2=received_sb, op=nl.add)

        norm_sb = root(sums_sb[:, 2 + hc : 3 + hc], hc * dim, eps_sb)
        logits_sb = nl.ndarray((hc * n, 2 + hc), nl.float32, buffer=nl.sbuf)
        raw = sums_sb[:, 0 : 2 + hc]
        nisa.scalar_tensor_tensor(
            dst=logits_sb, data=raw, op0=nl.multiply, operand0=norm_sb, op1=nl.multiply, operand1=scale_sb
        )
        nisa.tensor_tensor(dst=logits_sb, data1=logits_sb, data2=base_sb, op=nl.add)
        for g in range(len(groups)):
            at, r = groups[g]
            squares_psum = nl.ndarray((parts * r, 1), nl.float32, buffer=nl.psum)
            one_row = identity_sb[0:n, at : at + r].expand_dim(1).broadcast(1, parts)
            nisa.nc_matmul(dst=squares_psum, stationary=one_row, moving=sums_sb[0:n, 3 + hc : 4 + hc], accumulate=False)
            store_scaled(own_h[start + at : start + at + r], collapsed[g], root(squares_psum, dim, eps_sb), own_weight)
        soft_sb = softmax(logits_sb[:, 2 : 2 + hc], eps)
        store_gates(pre[start:end], post[start:end], logits_sb[:, 0:2], eps)
        comb_sb = sinkhorn(soft_sb, row_sb, stream_sb, identity_sb[0 : hc * n, 0 : hc * n], rounds, eps)
        if nl.program_id() == cores - 1:
            nisa.dma_copy(dst=comb[start:end].permute((1, 0, 2)), src=comb_sb)
    return h, pre, post, comb


def load_per_stream(values: nl.NkiTensor, rows: int) -> nl.NkiTensor:
    """values [hc, n] @ HBM as [hc T, n] @ SBUF, the same for all rows."""
    hc, n = values.shape
    values_sb = nl.ndarray((hc * rows, n), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=values_sb, src=values.expand_dim(1).broadcast(1, rows))
    return values_sb


def row_and_stream(identity_sb: nl.NkiTensor, hc: int, rows: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """[hc T, T], 1 where the row is the partition's, and [hc T, hc], 1 where the stream is."""
    one_row, one_stream = identity_sb[0:rows, 0:rows], identity_sb[0:hc, 0:hc]
    row_sb = indicator(one_row.expand_dim(1).broadcast(1, hc), one_row)
    return row_sb, indicator(one_stream.expand_dim(2).broadcast(2, rows), one_stream)


def root(sums: nl.NkiTensor, count: int, eps_sb: nl.NkiTensor) -> nl.NkiTensor:
    """rsqrt(sums / count + eps): [P, 1] fp32 @ SBUF of sums [P, 1]."""
    root_sb = nl.ndarray(sums.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=root_sb, op=nl.rsqrt, data=sums, scale=1.0 / count, bias=eps_sb[0 : sums.shape[0]])
    return root_sb


def store_scaled(target: nl.NkiTensor, x_sb: nl.NkiTensor, root_sb: nl.NkiTensor, weight: nl.NkiTensor) -> None:
    """target [R, J W] @ HBM = x_sb [J R, W] times root_sb [J R, 1] and weight [J W] @ HBM, rounded to x's dtype."""
    size, width = x_sb.shape
    parts, rows = target.shape[1] // width, target.shape[0]
    weight_sb = load_per_part(weight, parts, rows)
    normed_sb = nl.ndarray((size, width), nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=normed_sb, data=x_sb, op0=nl.multiply, operand0=root_sb, engine=nisa.engine.scalar)
    out_sb = nl.ndarray((size, width), x_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=out_sb, data1=normed_sb, data2=weight_sb, op=nl.multiply, engine=nisa.engine.gpsimd)
    nisa.dma_copy(dst=folded(target, parts), src=out_sb)


def store_gates(pre: nl.NkiTensor, post: nl.NkiTensor, logits: nl.NkiTensor, eps: float) -> None:
    """pre [T, hc] @ HBM = sigmoid of logits[:, 0] + eps, post [T, hc] @ HBM = 2 sigmoid of logits[:, 1]; core 0 stores them."""
    gates_sb = nl.ndarray(logits.shape, nl.float32, buffer=nl.sbuf)
    pre_sb, post_sb = gates_sb[:, 0:1], gates_sb[:, 1:2]
    nisa.activation(dst=gates_sb, op=nl.sigmoid, data=logits)
    nisa.tensor_scalar(dst=pre_sb, data=pre_sb, op0=nl.add, operand0=eps, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=post_sb, data=post_sb, op0=nl.multiply, operand0=2.0, engine=nisa.engine.scalar)
    if nl.program_id() == 0:
        nisa.dma_copy(dst=pre.permute((1, 0)), src=pre_sb)
        nisa.dma_copy(dst=post.permute((1, 0)), src=post_sb)
