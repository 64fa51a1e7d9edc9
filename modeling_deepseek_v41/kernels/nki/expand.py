# SPDX-License-Identifier: Apache-2.0
"""The residual streams after a sublayer, mixed on the tensor engine."""

import nki
import nki.isa as nisa
import nki.language as nl

from .fold import folded
from .split import BANK, PARTITIONS, core_share, tiles

MOST_COLUMNS = 16384


@nki.jit
def expand(y: nl.NkiTensor, residual: nl.NkiTensor, post: nl.NkiTensor, comb: nl.NkiTensor) -> nl.NkiTensor:
    """Stream j is post[j] * y + sum over i of comb[i, j] * residual[i], rounded to the streams' dtype.

    Dimensions:
        M: rows, any number. hc: streams. D: columns, to 16384. R = min(M, 128 / (hc + 1)): rows at a time, each in J parts.

    Args:
        y [M, D], residual [M, hc, D] bf16 or fp32 @ HBM. post [M, hc], comb [M, hc (from), hc (to)] fp32 @ HBM.

    Returns:
        [M, hc, D] of the streams' dtype @ shared HBM.

    Notes:
        Reference: hyper_connections.expand. The sublayer's result is stream hc. A row's part meets its coefficients in a
        stationary tile [(hc + 1) J R, hc J R] that is zero for other rows and parts, so that one pass of the tensor engine
        mixes 120 partitions; on VectorE the same takes hc (hc + 1) instructions over all columns, ten times as long.
        Against bf16 streams the coefficients stand as three bf16 parts, together their 24 bits: three quarters of what an
        fp32 product takes, and the streams stay as they are.

    Pseudocode:
        x = [residual, y];  c = [comb, post];  out[m, j] = round(sum over i of c[m, i, j] * x[m, i])

    Cost:
        Per R rows of a core: 5 dma_copy with the store, 1 + 3 D / (512 J) nc_matmul, 9 small instructions of ScalarE and GpSimd
        and a copy per 512 columns, of ScalarE and VectorE in turn. Bound: DMA of 2 hc + 1 streams. Predicted for 6 rows of
        4 x 5120, two cores: 6.6 us; 128 rows 30.8 us, bound 16.3: the tensor engine's 19.3 us and what each R rows wait for.
    """
    rows, hc, dim = residual.shape
    for name, found, shape in (("y", y, (rows, dim)), ("post", post, (rows, hc)), ("comb", comb, (rows, hc, hc))):
        assert found.shape == shape, f"{name} {found.shape}, expected {shape}"
    assert y.dtype == residual.dtype, f"y {y.dtype}, residual {residual.dtype}: expected the same"
    assert hc < PARTITIONS and dim <= MOST_COLUMNS, f"residual {residual.shape}: to 127 streams of {MOST_COLUMNS} columns"
    out = nl.ndarray((rows, hc, dim), residual.dtype, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, PARTITIONS // (hc + 1)):
        start += first
        end = start + count
        mix(out[start:end], y[start:end], residual[start:end], post[start:end], comb[start:end])
    return out


def mix(out: nl.NkiTensor, y: nl.NkiTensor, residual: nl.NkiTensor, post: nl.NkiTensor, comb: nl.NkiTensor) -> None:
    """``expand`` for (hc + 1) M at most 128. Partitions are (stream, part, row)."""
    rows, hc, dim = residual.shape
    parts = PARTITIONS // ((hc + 1) * rows)
    while dim % parts != 0:
        parts -= 1
    size, width = parts * rows, dim // parts
    coefficients = stationary_tiles(post, comb, parts, residual.dtype)
    streams_sb = nl.ndarray(((hc + 1) * size, width), residual.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=streams_sb[0 : hc * size], src=folded(residual, parts).permute((2, 0, 1, 3)))
    nisa.dma_copy(dst=streams_sb[hc * size : (hc + 1) * size], src=folded(y, parts))
    out_sb = nl.ndarray((hc * size, width), out.dtype, buffer=nl.sbuf)
    for at, n in tiles(width, BANK):
        mixed_psum = nl.ndarray((hc * size, n), nl.float32, buffer=nl.psum)
        for i in range(len(coefficients)):
            moving = streams_sb[:, at : at + n]
            nisa.nc_matmul(dst=mixed_psum, stationary=coefficients[i], moving=moving, accumulate=i > 0)
        engine = nisa.engine.scalar if at // BANK % 2 == 0 else nisa.engine.vector
        nisa.tensor_copy(dst=out_sb[:, at : at + n], src=mixed_psum, engine=engine)
    nisa.dma_copy(dst=folded(out, parts).permute((2, 0, 1, 3)), src=out_sb)


def stationary_tiles(post: nl.NkiTensor, comb: nl.NkiTensor, parts: int, dtype: str) -> list:
    """[(hc + 1, J, M), (hc, J, M)]: a row's coefficients where part and row agree, else 0; for bf16 as three tiles."""
    rows, hc = post.shape
    size = parts * rows
    coefficients_sb = nl.ndarray(((hc + 1) * size, hc), nl.float32, buffer=nl.sbuf)
    source = comb.permute((1, 0, 2)).expand_dim(1).broadcast(1, parts)
    nisa.dma_copy(dst=coefficients_sb[0 : hc * size], src=source)
    nisa.dma_copy(dst=coefficients_sb[hc * size : (hc + 1) * size], src=post.expand_dim(0).broadcast(0, parts))
    identity_sb = nl.shared_identity_matrix(size, nl.float32)
    same_psum = nl.ndarray(((hc + 1) * size, size), nl.float32, buffer=nl.psum)
    repeated = identity_sb.expand_dim(1).broadcast(1, hc + 1)
    nisa.nc_matmul(dst=same_psum, stationary=repeated, moving=identity_sb, accumulate=False)
    same_sb = nl.ndarray(same_psum.shape, dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=same_sb, src=same_psum, engine=nisa.engine.scalar)
    found = []
    for part_sb in bf16_parts(coefficients_sb) if dtype == nl.bfloat16 else [coefficients_sb]:
        tile_sb = nl.ndarray(((hc + 1) * size, hc, size), dtype, buffer=nl.sbuf)
        same, part = same_sb.expand_dim(1).broadcast(1, hc), part_sb.expand_dim(2).broadcast(2, size)
        nisa.tensor_tensor(dst=tile_sb, data1=same, data2=part, op=nl.multiply, engine=nisa.engine.gpsimd)
        found.append(tile_sb)
    return found


def bf16_parts(x_sb: nl.NkiTensor) -> list:
    """Three bf16 tiles whose sum x_sb [P, n] fp32 is, all its 24 bits; x_sb is overwritten."""
    found = []
    for i in range(3):
        part_sb = nl.ndarray(x_sb.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=part_sb, src=x_sb, engine=nisa.engine.scalar)
        found.append(part_sb)
        if i < 2:
            nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=part_sb, op=nl.subtract, engine=nisa.engine.gpsimd)
    return found
