# SPDX-License-Identifier: Apache-2.0
"""A linear that reads the release's fp8 weights as they are, 32 x 32 blocks with a scale each: half the bytes of bf16."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP
from .linear_stream import load_columns
from .split import BANK, PARTITIONS, core_share, tiles

BLOCKS = PARTITIONS // GROUP
"""Blocks of 32 in a tile of 128."""
MOST_ROWS = 32
"""Per pass over the weight."""
PIECE_BYTES = 4096
"""Per partition of a DMA of weights, where one tile of columns has less."""


@nki.jit
def block_linear(
    x: nl.NkiTensor, weight: nl.NkiTensor, scale: nl.NkiTensor, columns: int, quantize: bool = True, rounds: bool = True
) -> nl.NkiTensor:
    """x W^T accumulated in fp32, W fp8 codes times block scales, x through the activation QDQ where ``quantize``.

    For decode, 1 to 32 rows; more run in passes of 32, each of which reads the weight once. The weight is exact but for what
    linear_layout.pack_blocks counts as inexact; ``linear`` with the weight decoded to bf16 at load is exact always and the
    default.

    Dimensions:
        M: rows, any number. K: contraction, a multiple of 32; KT = ceil(K / 128). N: output columns, a multiple of 32.
        C: cores; S: columns of a core, whole blocks.

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
        multiplication, VectorE the others. The results of up to four tiles are gathered while the next ones' are summed.

    Pseudocode:
        x_t = transpose(qdq(x))
        for n in tiles of 128:  xs = x_t * scale[:, blocks of n];  s = sum over k of weight[k, n]^T xs[k];  out[n] = diagonal(s)

    Cost:
        Per core and 128 columns: KT nc_matmul, a transpose, a multiplication of 4 KT M values, up to 5 copies; a DMA per 4 KiB
        of weights per partition. Bound: K S bytes at 362.5 GB/s. Predicted for 6 rows, two cores, with QDQ, us; the ratio to
        the bound, and without the 4 us of load and store; ``linear`` in bf16:

            5120 x 1792  19.7, bound 12.7, 1.56, 1.24; 31.7     4096 x 1024  13.4, bound 5.8, 2.31, 1.62; 17.8
            1280 x 4096  14.8, bound  7.2, 2.04, 1.49; 20.8     1024 x 5120  14.9, bound 7.2, 2.07, 1.51; 21.0

        3.5 us of it are the QDQ before the first product and 0.7 us what follows the last one.
    """
    rows, contraction = x.shape
    cores = nl.num_programs()
    k_tiles, parts = (contraction + PARTITIONS - 1) // PARTITIONS, min(contraction, PARTITIONS)
    share = (columns + GROUP * cores - 1) // (GROUP * cores) * GROUP
    assert x.dtype == nl.bfloat16, f"x: expected bfloat16, found {x.dtype}"
    assert contraction % GROUP == 0 and columns % GROUP == 0, f"{contraction} x {columns}: expected multiples of {GROUP}"
    shape, scales = (cores, parts, k_tiles * share), (cores, BLOCKS, k_tiles, share // GROUP)
    assert weight.shape == shape, f"weight: expected {shape} for {contraction} x {columns}, found {weight.shape}"
    assert scale.shape == scales, f"scale: expected {scales}, found {scale.shape}"
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    first, mine = core_share(columns, GROUP)
    if mine == 0:
        return out
    scale_sb = spread(scale[nl.program_id()], parts)
    for start, count in tiles(rows, MOST_ROWS):
        x_t_sb = nl.ndarray((parts, k_tiles, count), nl.bfloat16, buffer=nl.sbuf)
        if contraction < k_tiles * parts:
            nisa.memset(dst=x_t_sb[:, k_tiles - 1], value=0.0)
        load_columns(x_t_sb, x[start : start + count], quantize)
        project(out[start : start + count, first : first + mine], x_t_sb, weight[nl.program_id()], scale_sb, contraction)
    return out


def spread(scale: nl.NkiTensor, parts: int) -> nl.NkiTensor:
    """scale [4, KT, S / 32] bf16 @ HBM on the 32 partitions of each block of k: [parts, KT, S / 32] bf16 @ SBUF."""
    blocks, width = parts // GROUP, scale.shape[1] * scale.shape[2]
    block_sb = nl.ndarray((blocks, width), nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=block_sb, src=scale[0:blocks].flatten_dims(1, 2))
    member_sb = nl.ndarray((blocks, blocks, GROUP), nl.bfloat16, buffer=nl.sbuf)
    identity_sb = nl.shared_identity_matrix(blocks, nl.bfloat16)
    nisa.tensor_copy(dst=member_sb, src=identity_sb.expand_dim(2).broadcast(2, GROUP))
    scale_sb = nl.ndarray((parts, width), nl.bfloat16, buffer=nl.sbuf)
    for first, count in tiles(width, BANK):
        part_psum = nl.ndarray((parts, count), nl.float32, buffer=nl.psum)
        moving = block_sb[:, first : first + count]
        nisa.nc_matmul(dst=part_psum, stationary=member_sb.flatten_dims(1, 2), moving=moving, accumulate=False)
        nisa.tensor_copy(dst=scale_sb[:, first : first + count], src=part_psum, engine=nisa.engine.scalar)
    return scale_sb.reshape_dim(1, (scale.shape[1], scale.shape[2]))


def project(out: nl.NkiTensor, x_t_sb: nl.NkiTensor, stream: nl.NkiTensor, scale_sb: nl.NkiTensor, contraction: int) -> None:
    """out [M, columns of the core] @ HBM of x_t_sb [P, KT, M] and stream [P, KT S] @ HBM; scale_sb [P, KT, S / 32]."""
    rows, mine = out.shape
    parts, k_tiles, _ = x_t_sb.shape
    share = scale_sb.shape[2] * GROUP
    out_sb = nl.ndarray((rows, mine), out.dtype, buffer=nl.sbuf)
    pending: list = []
    together = PARTITIONS * max(PIECE_BYTES // (k_tiles * PARTITIONS), 1)
    last = (mine - 1) // PARTITIONS * PARTITIONS
    loads = tiles(last, together)
    loads.append((last, mine - last))
    for left, loaded in loads:
        end = min(left + -(-loaded // PARTITIONS) * PARTITIONS, share)
        weight_sb = nl.ndarray((parts, k_tiles * (end - left)), stream.dtype, buffer=nl.sbuf)
        cut = (k_tiles if left < last else -(-3 * k_tiles // 4)) * (end - left)
        for first, count in ((0, cut), (cut, k_tiles * (end - left) - cut)):
            if count > 0:
                source = stream[:, k_tiles * left + first : k_tiles * left + first + count]
                nisa.dma_copy(dst=weight_sb[:, first : first + count], src=source)
        for at, width in tiles(loaded, BANK):
            count, wide = -(-width // PARTITIONS), min(width, PARTITIONS)
            sums_psum = nl.ndarray((wide, count, wide // GROUP, rows), nl.float32, buffer=nl.psum)
            for i in range(count):
                place = left + at + i * PARTITIONS
                scaled_sb = nl.ndarray((parts, k_tiles, wide // GROUP, rows), nl.bfloat16, buffer=nl.sbuf)
                factor = scale_sb[:, :, place // GROUP : (place + wide) // GROUP].expand_dim(3).broadcast(3, rows)
                engine = nisa.engine.vector if place // PARTITIONS % 3 < 2 else nisa.engine.gpsimd
                repeated = x_t_sb.expand_dim(2).broadcast(2, wide // GROUP)
                nisa.tensor_tensor(dst=scaled_sb, data1=repeated, data2=factor, op=nl.multiply, engine=engine)
                stored = min(PARTITIONS, share - place)
                first = k_tiles * (at + i * PARTITIONS)
                tile = weight_sb[:, first : first + k_tiles * stored].reshape_dim(1, (k_tiles, stored))
                multiply(sums_psum[:, i], tile[:, :, 0:wide], scaled_sb, contraction)
            pending.append((out_sb[:, left + at : left + at + width], sums_psum))
            if len(pending) > 1:
                keep_own_blocks(pending[-2][0], pending[-2][1])
    keep_own_blocks(pending[-1][0], pending[-1][1])
    nisa.dma_copy(dst=out, src=out_sb)


def multiply(sums: nl.NkiTensor, weight_sb: nl.NkiTensor, scaled_sb: nl.NkiTensor, contraction: int) -> None:
    """sums [width, width / 32, M] @ PSUM of weight_sb [P, KT, width] and scaled_sb [P, KT, width / 32, M]."""
    parts, k_tiles, _, _ = scaled_sb.shape
    for k in range(k_tiles):
        used = min(parts, contraction - k * PARTITIONS)
        nisa.nc_matmul(dst=sums, stationary=weight_sb[0:used, k], moving=scaled_sb[0:used, k], accumulate=k > 0)


def keep_own_blocks(out_sb: nl.NkiTensor, sums_psum: nl.NkiTensor) -> None:
    """out_sb [M, tiles * width] = of the sums [width, tiles, width / 32, M] those whose column and scale are of one block."""
    width, count, blocks, rows = sums_psum.shape
    kept_sb = nl.ndarray((width, count, rows), nl.float32, buffer=nl.sbuf)
    for b in range(blocks):
        block = slice(b * GROUP, (b + 1) * GROUP)
        engine = nisa.engine.scalar if b % 2 == 0 else nisa.engine.vector
        nisa.tensor_copy(dst=kept_sb[block], src=sums_psum[block, :, b], engine=engine)
    rows_psum = nl.ndarray((rows, count, width), nl.float32, buffer=nl.psum)
    for i in range(count):
        nisa.nc_transpose(dst=rows_psum[:, i], data=kept_sb[:, i])
    nisa.tensor_copy(dst=out_sb, src=rows_psum.flatten_dims(1, 2), engine=nisa.engine.scalar)
