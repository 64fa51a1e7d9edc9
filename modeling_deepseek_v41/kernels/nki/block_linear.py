# SPDX-License-Identifier: Apache-2.0
"""A linear that reads the release's fp8 weights as they are, 32 x 32 blocks with a scale each: half the bytes of bf16."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP
from .linear import load_columns
from .split import PARTITIONS, core_share, tiles

BLOCKS = PARTITIONS // GROUP
"""Blocks of 32 in a tile of 128."""
MOST_ROWS = 32
PIECE_BYTES = 4096
"""Per partition of a DMA of weights, where one tile of columns has less."""


@nki.jit
def block_linear(
    x: nl.NkiTensor, weight: nl.NkiTensor, scale: nl.NkiTensor, columns: int, quantize: bool = True, rounds: bool = True
) -> nl.NkiTensor:
    """x W^T accumulated in fp32, W fp8 codes times block scales, x through the activation QDQ where ``quantize``.

    For decode, 1 to 32 rows. The weight is exact but for what linear_layout.pack_blocks counts as inexact; ``linear`` with the
    weight decoded to bf16 at load is exact always and the default.

    Dimensions:
        M: rows, 1 to 32. K: contraction, a multiple of 32; KT = ceil(K / 128). N: output columns, a multiple of 32. C: cores;
        S: columns of a core, whole blocks.

    Args:
        x [M, K] bf16 @ HBM.
        weight [C, min(K, 128), KT S] float8_e4m3 @ HBM, scale [C, 4, KT, S / 32] bf16 @ HBM: linear_layout.pack_blocks.
        columns: N.

    Returns:
        [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear with formats.decode_fp8. A block's scale is applied to x, where it is exact in bf16: of each tile
        of 128 output columns, x comes four times, with the scales of its four blocks of columns. Weights are stationary; of a
        tile's 128 x 4 M results those are kept where column and scale are of one block. GpSimd does every third
        multiplication, VectorE the others. A tile's results are
        gathered while the next one's are summed.

    Pseudocode:
        x_t = transpose(qdq(x))
        for n in tiles of 128:  xs = x_t * scale[:, blocks of n];  s = sum over k of weight[k, n]^T xs[k];  out[n] = diagonal(s)

    Cost:
        Per core and 128 columns: KT nc_matmul, a transpose, a multiplication of 4 KT M values, 5 copies; a DMA per 4 KiB of
        weights per partition. Bound: K S bytes at 362.5 GB/s. Predicted for 6 rows, two cores, with QDQ: 5120 x 1792 21.1 us,
        bound 12.7; 1280 x 4096 14.8, bound 7.2; 4096 x 1024 13.2, bound 5.8; 1024 x 5120 15.2, bound 7.2. ``linear`` in bf16
        takes 32.3, 21.2, 18.3 and 21.3.
    """
    rows, contraction = x.shape
    cores = nl.num_programs()
    k_tiles, parts = (contraction + PARTITIONS - 1) // PARTITIONS, min(contraction, PARTITIONS)
    share = (columns + GROUP * cores - 1) // (GROUP * cores) * GROUP
    assert 1 <= rows <= MOST_ROWS, f"x {x.shape}: expected 1 to {MOST_ROWS} rows"
    assert x.dtype == nl.bfloat16, f"x: expected bfloat16, found {x.dtype}"
    assert contraction % GROUP == 0 and columns % GROUP == 0, f"{contraction} x {columns}: expected multiples of {GROUP}"
    shape, scales = (cores, parts, k_tiles * share), (cores, BLOCKS, k_tiles, share // GROUP)
    assert weight.shape == shape, f"weight: expected {shape} for {contraction} x {columns}, found {weight.shape}"
    assert scale.shape == scales, f"scale: expected {scales}, found {scale.shape}"
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    first, mine = core_share(columns, GROUP)
    if mine == 0:
        return out
    x_t_sb = nl.ndarray((parts, k_tiles, rows), nl.bfloat16, buffer=nl.sbuf)
    if contraction < k_tiles * parts:
        nisa.memset(dst=x_t_sb[:, k_tiles - 1], value=0.0)
    load_columns(x_t_sb, x, quantize)
    blocks = parts // GROUP
    scale_sb = nl.ndarray((parts, k_tiles, share // GROUP), nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=scale_sb, src=scale[nl.program_id(), 0:blocks].expand_dim(1).broadcast(1, GROUP))
    out_sb = nl.ndarray((rows, mine), out.dtype, buffer=nl.sbuf)
    pending: list = []
    together = PARTITIONS * max(PIECE_BYTES // (k_tiles * PARTITIONS), 1)
    for left, loaded in tiles(mine, together):
        end = min(left + together, share)
        weight_sb = nl.ndarray((parts, k_tiles * (end - left)), weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_sb, src=weight[nl.program_id(), :, k_tiles * left : k_tiles * end])
        for at, width in tiles(loaded, PARTITIONS):
            wide, place = min(PARTITIONS, end - left - at), left + at
            tile = weight_sb[:, k_tiles * at : k_tiles * (at + wide)].reshape_dim(1, (k_tiles, wide))
            scaled_sb = nl.ndarray((parts, k_tiles, width // GROUP, rows), nl.bfloat16, buffer=nl.sbuf)
            factor = scale_sb[:, :, place // GROUP : (place + width) // GROUP].expand_dim(3).broadcast(3, rows)
            engine = nisa.engine.vector if place // PARTITIONS % 3 < 2 else nisa.engine.gpsimd
            repeated = x_t_sb.expand_dim(2).broadcast(2, width // GROUP)
            nisa.tensor_tensor(dst=scaled_sb, data1=repeated, data2=factor, op=nl.multiply, engine=engine)
            pending.append((out_sb[:, place : place + width], multiply(tile[:, :, 0:width], scaled_sb, contraction)))
            if len(pending) > 1:
                keep_own_blocks(pending[-2][0], pending[-2][1])
    keep_own_blocks(pending[-1][0], pending[-1][1])
    nisa.dma_copy(dst=out[:, first : first + mine], src=out_sb)
    return out


def multiply(weight_sb: nl.NkiTensor, scaled_sb: nl.NkiTensor, contraction: int) -> nl.NkiTensor:
    """[width, width / 32, M] @ PSUM of weight_sb [P, KT, width] and scaled_sb [P, KT, width / 32, M]."""
    parts, k_tiles, blocks, rows = scaled_sb.shape
    sums_psum = nl.ndarray((blocks * GROUP, blocks, rows), nl.float32, buffer=nl.psum)
    for k in range(k_tiles):
        used = min(parts, contraction - k * PARTITIONS)
        nisa.nc_matmul(dst=sums_psum, stationary=weight_sb[0:used, k], moving=scaled_sb[0:used, k], accumulate=k > 0)
    return sums_psum


def keep_own_blocks(out_sb: nl.NkiTensor, sums_psum: nl.NkiTensor) -> None:
    """out_sb [M, width] = the sums in which column and scale are of one block, as rows."""
    width, blocks, rows = sums_psum.shape
    kept_sb = nl.ndarray((width, rows), nl.float32, buffer=nl.sbuf)
    for b in range(blocks):
        block = slice(b * GROUP, (b + 1) * GROUP)
        engine = nisa.engine.scalar if b % 2 == 0 else nisa.engine.vector
        nisa.tensor_copy(dst=kept_sb[block], src=sums_psum[block, b], engine=engine)
    rows_psum = nl.ndarray((rows, width), nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=rows_psum, data=kept_sb)
    nisa.tensor_copy(dst=out_sb, src=rows_psum, engine=nisa.engine.scalar)
