# SPDX-License-Identifier: Apache-2.0
"""Few long rows on many partitions: row m's part j, ``dim`` / J columns, lies on partition j M + m."""

import nki.isa as nisa
import nki.language as nl

from .split import PARTITIONS

DECODE_ROWS = 4
"""Rows of a core in decode and verification."""


def folds(rows: int, dim: int, unit: int = 1) -> int:
    """J, the most parts of rows of ``dim`` columns, whole ``unit`` columns each, that together have 128 partitions."""
    most = max(PARTITIONS // rows, 1)
    for parts in range(most, 1, -1):
        if dim % (parts * unit) == 0:
            return parts
    return 1


def sum_folds(rows: int, dim: int, unit: int = 1) -> int:
    """``folds`` of rows that are summed over their columns: the same for up to DECODE_ROWS rows.

    So the order of a sum in decode depends neither on how many rows run beside it nor on which core it is.
    """
    return folds(max(rows, DECODE_ROWS), dim, unit)


def rows_at_a_time(dim: int, streams: int, most: int, unit: int = 1) -> int:
    """The most rows, 128 or a half of that and so on, of which a part has at most ``most`` values in all ``streams``."""
    rows = PARTITIONS
    while streams * dim > most * sum_folds(rows, dim, unit) and rows > 1:
        rows //= 2
    assert streams * dim <= most * sum_folds(rows, dim, unit), (
        f"{streams} streams of {dim} columns: more than {most} values of a part"
    )
    return rows


def folded(x: nl.NkiTensor, parts: int) -> nl.NkiTensor:
    """[M, .., D] @ HBM as [J, M, .., D / J], the order of a folded tile: the source or destination of a DMA."""
    last = len(x.shape) - 1
    split = x.reshape_dim(last, (parts, x.shape[last] // parts))
    order = [last]
    for i in range(last + 2):
        if i != last:
            order.append(i)
    return split.permute(tuple(order))


def flat(source: nl.NkiTensor) -> tuple:
    """The shape [J M, ..] of the tile for a source [J, M, ..]."""
    sizes = [source.shape[0] * source.shape[1]]
    for i in range(2, len(source.shape)):
        sizes.append(source.shape[i])
    return tuple(sizes)


def load(x: nl.NkiTensor, parts: int) -> nl.NkiTensor:
    """x [M, .., D] @ HBM as a tile [J M, .., D / J], one DMA."""
    source = folded(x, parts)
    x_sb = nl.ndarray(flat(source), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    return x_sb


def load_per_row(x: nl.NkiTensor, parts: int) -> nl.NkiTensor:
    """x [M, ..] @ HBM as a tile [J M, ..]: every part of a row has all of the row's values."""
    source = x.expand_dim(0).broadcast(0, parts)
    x_sb = nl.ndarray(flat(source), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=source)
    return x_sb


def load_per_part(weight: nl.NkiTensor, parts: int, rows: int) -> nl.NkiTensor:
    """weight [.., D] @ HBM, of one row, as a tile [J M, .., D / J]: the same for all rows."""
    source = folded(weight.expand_dim(0), parts).broadcast(1, rows)
    weight_sb = nl.ndarray(flat(source), weight.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=weight_sb, src=source)
    return weight_sb


def same_row(rows: int, parts: int) -> nl.NkiTensor:
    """[J M, J M] fp32, 1 where both partitions are of one row: as a matmul's stationary tile it sums over a row's parts."""
    identity_sb = nl.shared_identity_matrix(rows, nl.float32)
    member_sb = nl.ndarray((rows, parts, rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=member_sb, src=identity_sb.expand_dim(1).broadcast(1, parts))
    member = member_sb.flatten_dims(1, 2)
    same_psum = nl.ndarray((parts * rows, parts * rows), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=same_psum, stationary=member, moving=member, accumulate=False)
    same_sb = nl.ndarray((parts * rows, parts * rows), nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=same_sb, src=same_psum)
    return same_sb


def row_sums(part_sb: nl.NkiTensor, same_sb: nl.NkiTensor) -> nl.NkiTensor:
    """part_sb [J M, n] fp32 summed over the parts of each row: [J M, n] fp32 @ PSUM, the sum on every part."""
    sums_psum = nl.ndarray(part_sb.shape, nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums_psum, stationary=same_sb, moving=part_sb, accumulate=False)
    return sums_psum
