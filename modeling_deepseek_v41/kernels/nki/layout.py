# SPDX-License-Identifier: Apache-2.0
"""Moves that kernels share: gathered rows, rows as columns through PSUM, block-diagonal stationary tiles."""

import nki.isa as nisa
import nki.language as nl

from .split import tiles

BANK_BYTES = 2048
"""Of a PSUM bank in one partition."""


def gather(table: nl.NkiTensor, index_sb: nl.NkiTensor) -> list:
    """Rows of ``table`` by index_sb [P, I]: I tiles [P, D], zeros where the index is -1."""
    parts, gathers = index_sb.shape
    rows_sb = nl.ndarray((parts, gathers, table.shape[1]), table.dtype, buffer=nl.sbuf)
    nisa.memset(dst=rows_sb, value=0.0)
    found = []
    for i in range(gathers):
        chosen = table.vector_select(0, index_sb[:, i : i + 1])
        nisa.dma_copy(dst=rows_sb[:, i, :], src=chosen, oob_mode=nisa.oob_mode.skip)
        found.append(rows_sb[:, i, :])
    return found


def columns(row_tiles: list, dim: int, chunk: int) -> nl.NkiTensor:
    """Tiles of rows [n, D] as columns [D % chunk, D / chunk, all n <= 512], by transposes through PSUM, in two copies."""
    total = 0
    for rows_sb in row_tiles:
        total += rows_sb.shape[0]
    count, dtype = dim // chunk, row_tiles[0].dtype
    columns_sb = nl.ndarray((chunk, count, total), dtype, buffer=nl.sbuf)
    together = min(-(-count // 2), BANK_BYTES // (total * (2 if dtype == nl.bfloat16 else 4)))
    for first, n in tiles(count, together):
        columns_psum = nl.ndarray((chunk, n, total), dtype, buffer=nl.psum)
        place = 0
        for rows_sb in row_tiles:
            end = place + rows_sb.shape[0]
            for c in range(n):
                at = (first + c) * chunk
                nisa.nc_transpose(dst=columns_psum[:, c, place:end], data=rows_sb[:, at : at + chunk])
            place = end
        engine = nisa.engine.vector if first // together % 2 == 0 else nisa.engine.scalar
        nisa.tensor_copy(dst=columns_sb[:, first : first + n], src=columns_psum, engine=engine)
    return columns_sb


def transposed(p_sb: nl.NkiTensor, first: int, parts: int, count: int) -> nl.NkiTensor:
    """Columns first .. first + count * parts of p_sb [n, keys] as [parts, count, n]."""
    p_t_psum = nl.ndarray((parts, count, p_sb.shape[0]), p_sb.dtype, buffer=nl.psum)
    for i in range(count):
        place = first + i * parts
        nisa.nc_transpose(dst=p_t_psum[:, i, :], data=p_sb[:, place : place + parts])
    p_t_sb = nl.ndarray(p_t_psum.shape, p_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=p_t_sb, src=p_t_psum)
    return p_t_sb


def diagonal(packed: nl.NkiTensor, members: int) -> nl.NkiTensor:
    """[P, X, (members, H)] to [P, X, members, (members, H)], zero where the two queries differ.

    Slice t is a stationary tile that adds to the rows of query t alone, so that all queries share one PSUM tile.
    """
    parts, count, width = packed.shape
    diagonal_sb = nl.ndarray((parts, count, members, width), packed.dtype, buffer=nl.sbuf)
    nisa.memset(dst=diagonal_sb, value=0.0)
    heads = width // members
    blocks = [[count * members * width, parts], [members * width, count], [width + heads, members], [1, heads]]
    nisa.tensor_copy(dst=diagonal_sb.ap(blocks), src=packed.reshape_dim(2, (members, heads)))
    return diagonal_sb
