# SPDX-License-Identifier: Apache-2.0
"""On the device: what a sublayer's input sums over the residual streams, a core's half of the columns each.

T rows are split into groups of R whose parts fill the partitions: part j of row r on partition j R + r, its streams behind each
other. Sums that the mixes need have stream i of row t on partition i T + t.
"""

import nki.isa as nisa
import nki.language as nl

from .experts_plan import shrinking
from .sinkhorn import indicator

LEAST_BYTES = 1920
"""Per partition of the last DMAs of fn: short enough for the tensor engine, long enough for the DMAs."""


def load_weight(fn: nl.NkiTensor) -> list:
    """This core's fn [W, hc J, count] @ HBM as tiles [W, .., count] @ SBUF, one after the other."""
    width, k_tiles, count = fn.shape
    found: list = []
    at = 0
    for n in shrinking(k_tiles, k_tiles, max(LEAST_BYTES // (4 * count), 1)):
        tile_sb = nl.ndarray((width, n, count), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile_sb, src=fn[:, at : at + n])
        found.append(tile_sb)
        at += n
    return found


def turned(streams: list, groups: list) -> nl.NkiTensor:
    """The streams [J R, hc, W] of each group as columns [W, hc J, T] fp32."""
    size, hc, width = streams[0].shape
    parts, rows = size // groups[0][1], groups[-1][0] + groups[-1][1]
    columns_sb = nl.ndarray((width, hc, parts, rows), nl.float32, buffer=nl.sbuf)
    for g in range(len(groups)):
        at, r = groups[g]
        for s in range(hc):
            turned_psum = nl.ndarray((width, parts * r), streams[g].dtype, buffer=nl.psum)
            nisa.nc_transpose(dst=turned_psum, data=streams[g][:, s])
            nisa.tensor_copy(dst=columns_sb[:, s, :, at : at + r], src=turned_psum, engine=nisa.engine.scalar)
    return columns_sb.flatten_dims(1, 2)


def weighted_sum(x_sb: nl.NkiTensor, pre_sb: nl.NkiTensor) -> nl.NkiTensor:
    """The sum over streams of pre_sb [P, hc] times x_sb [P, hc, W], rounded to x's dtype: ScalarE's products, GpSimd's sums."""
    size, hc, width = x_sb.shape
    terms_sb = nl.ndarray((size, hc, width), nl.float32, buffer=nl.sbuf)
    sum_sb = nl.ndarray((size, width), x_sb.dtype, buffer=nl.sbuf)
    for s in range(hc):
        target = sum_sb if hc == 1 else terms_sb[:, s]
        factor = pre_sb[:, s : s + 1]
        nisa.tensor_scalar(dst=target, data=x_sb[:, s], op0=nl.multiply, operand0=factor, engine=nisa.engine.scalar)
    for s in range(1, hc):
        target = sum_sb if s + 1 == hc else terms_sb[:, 0]
        nisa.tensor_tensor(dst=target, data1=terms_sb[:, 0], data2=terms_sb[:, s], op=nl.add, engine=nisa.engine.gpsimd)
    return sum_sb


def square_sums(x_sb: nl.NkiTensor, h_sb: nl.NkiTensor) -> nl.NkiTensor:
    """The sums of squares of each partition of x_sb [P, hc, W] and of h_sb [P, W]: [P, 2] fp32 @ SBUF."""
    sums_sb = nl.ndarray((x_sb.shape[0], 2), nl.float32, buffer=nl.sbuf)
    for i, data in ((0, x_sb), (1, h_sb)):
        squares_sb = nl.ndarray(data.shape, nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=squares_sb, op=nl.square, data=data, reduce_op=nl.add, reduce_res=sums_sb[:, i : i + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
    return sums_sb


def store_products(sums: nl.NkiTensor, columns_sb: nl.NkiTensor, fn_tiles: list, identity_sb: nl.NkiTensor) -> None:
    """sums [hc T, 2 + hc] = columns_sb [W, hc J, T] times fn_tiles, pre, post and comb of the partition's stream and row."""
    rows, count, each = columns_sb.shape[2], fn_tiles[0].shape[2], sums.shape[1]
    hc = each - 2
    one_stream, one_mix = identity_sb[0:hc, 0:hc], identity_sb[0:each, 0:each]
    stream_sb = indicator(one_stream.expand_dim(2).broadcast(2, each), one_stream)
    mix_sb = indicator(one_mix.expand_dim(1).broadcast(1, hc), one_mix)
    raw_psum = nl.ndarray((count, rows), nl.float32, buffer=nl.psum)
    k = 0
    for tile_sb in fn_tiles:
        for i in range(tile_sb.shape[1]):
            nisa.nc_matmul(dst=raw_psum, stationary=tile_sb[:, i], moving=columns_sb[:, k], accumulate=k > 0)
            k += 1
    own_sb = nl.ndarray((count, hc, rows), nl.float32, buffer=nl.sbuf)
    own = stream_sb.expand_dim(2).broadcast(2, rows)
    nisa.tensor_tensor(dst=own_sb, data1=raw_psum.expand_dim(1).broadcast(1, hc), data2=own, op=nl.multiply)
    sums_psum = nl.ndarray(sums.shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums_psum, stationary=own_sb, moving=mix_sb, accumulate=False)
    nisa.tensor_copy(dst=sums, src=sums_psum)


def members(groups: list, parts: int, hc: int, identity_sb: nl.NkiTensor) -> list:
    """For each group [J R, hc T]: 1 where part and stream are of one row."""
    rows = groups[-1][0] + groups[-1][1]
    one_row = identity_sb[0:rows, 0:rows]
    found: list = []
    for at, r in groups:
        of_part = one_row[:, at : at + r].expand_dim(1).broadcast(1, parts)
        found.append(indicator(of_part, one_row.expand_dim(1).broadcast(1, hc)))
    return found


def store_row_sums(sums: nl.NkiTensor, part_sums: list, member_tiles: list) -> None:
    """sums [hc T, n] = the part_sums [J R, n] of each group summed over the parts of each row."""
    sums_psum = nl.ndarray(sums.shape, nl.float32, buffer=nl.psum)
    for g in range(len(part_sums)):
        nisa.nc_matmul(dst=sums_psum, stationary=member_tiles[g], moving=part_sums[g], accumulate=g > 0)
    nisa.tensor_copy(dst=sums, src=sums_psum, engine=nisa.engine.scalar)
