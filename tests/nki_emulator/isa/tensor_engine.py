# SPDX-License-Identifier: Apache-2.0
"""Matmul into PSUM, and transposes."""

import numpy as np

from .. import costs
from ..access import matmul_state, read_rows, write
from ..dtypes import FP8, SIZE, to_float32
from ..enums import engine as engines
from ..enums import matmul_perf_mode
from ..machine import current, instruction, record
from ..memory import PSUM, SBUF
from ..operands import choose, tile
from ..rules import fail
from ..tensor import NkiTensor

OPERAND_DTYPES = ("float8_e4m3", "float8_e5m2", "bfloat16", "float16", "float32")


@instruction
def nc_matmul(
    dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, accumulate=None,
    tile_position=(), tile_size=(), perf_mode=matmul_perf_mode.none, name=None,
) -> None:  # fmt: skip
    """dst[M, N] = stationary[K, M].T @ moving[K, N], in fp32, overwriting or accumulating in PSUM."""
    double_row = perf_mode in (matmul_perf_mode.double_row, "double_row")
    _check(dst, stationary, moving, double_row, is_transpose, tile_position, tile_size)
    weights, data = read_rows(stationary, "stationary"), read_rows(moving, "moving")
    fp32 = stationary.dtype == "float32"
    columns = data.shape[1] // (2 if double_row else 1)
    factor = costs.FP32_TRANSPOSE if is_transpose and fp32 else costs.FP32_MATMUL if fp32 else 1
    cycles = max(columns, weights.shape[1] // costs.FAST_LOAD) * factor
    if is_transpose:
        write(dst, _permuted(weights, to_float32(data, moving.dtype)))
        record("tensor", cycles, reads=[stationary, moving], writes=[dst])
        return
    product = _product(to_float32(weights, stationary.dtype), to_float32(data, moving.dtype), double_row).reshape(dst.shape)
    kept = _accumulated(dst, accumulate)
    if kept.any():
        product = np.where(kept, _psum_values(dst, kept) + product, product)
    write(dst, product, matmul=True)
    record("tensor", cycles, reads=[stationary, moving, *([dst] if kept.any() else [])], writes=[dst])


def _check(dst, stationary, moving, double_row, is_transpose, tile_position, tile_size) -> None:
    tile("dst", dst, (PSUM,))
    tile("stationary", stationary, (SBUF,), free_dimensions=4)
    tile("moving", moving, (SBUF,), free_dimensions=4)
    for operand, tensor in (("stationary", stationary), ("moving", moving)):
        if tensor.dtype not in OPERAND_DTYPES and not is_transpose:
            fail("dtype-operand", operand, f"{tensor!r}, expected {', '.join(OPERAND_DTYPES)}")
    if (stationary.dtype == "float32") != (moving.dtype == "float32") and not is_transpose:
        fail("matmul-dtype", "moving", f"{stationary.dtype} with {moving.dtype}")
    if dst.dtype != (stationary.dtype if is_transpose else "float32"):
        fail("matmul-dtype", "dst", f"{dst!r}, expected {stationary.dtype if is_transpose else 'float32'}")
    if stationary.shape[0] != moving.shape[0]:
        fail("shape", "moving", f"{moving!r} against stationary {stationary!r}: the contraction differs")
    if stationary.start_partition != moving.start_partition:
        fail("matmul-rows", "moving", f"from partition {moving.start_partition}, stationary from {stationary.start_partition}")
    pair = 2 if double_row else 1
    if double_row:
        if is_transpose or tile_position or tile_size:
            fail("double-row", "perf_mode", "with a transpose or tiling")
        for operand, tensor in (("stationary", stationary), ("moving", moving)):
            if tensor.dtype not in FP8 or tensor.ndim < 3 or tensor.shape[1] != 2:
                fail("double-row", operand, repr(tensor))
    rows, columns, n = stationary.shape[0], stationary.free // pair, moving.free // pair
    if columns > 128 or n > 512:
        fail("matmul-tile", "stationary, moving", f"K={rows} M={columns} N={n}")
    if (dst.shape[0], dst.free) != (columns, n):
        fail("shape", "dst", f"{dst!r}, expected [{columns}, {n}]")
    _check_tiling(stationary, columns, tile_position, tile_size)
    _, _, low, high, _ = dst.box()
    if low // costs.PSUM_BANK_BYTES != (high - 1) // costs.PSUM_BANK_BYTES:
        fail("psum-bank", "dst", f"{dst!r}: bytes {low} to {high} of a partition")


def _check_tiling(stationary: NkiTensor, columns: int, tile_position, tile_size) -> None:
    if bool(tile_position) != bool(tile_size):
        fail("argument", "tile_position, tile_size", "one without the other")
    if not tile_size:
        return
    (row, column), (height, width) = tile_position, tile_size
    if height not in (32, 64, 128) or row % height or row + height > 128 or column != 0 or width != 128:
        fail("argument", "tile_position, tile_size", f"{tile_position}, {tile_size}: rows of 32, 64 or 128, columns (0, 128)")
    if stationary.shape[0] > height or columns > width or stationary.start_partition != row:
        fail("matmul-tile", "stationary", f"{stationary!r} in the tile {tile_position}, {tile_size}")


def _product(weights: np.ndarray, data: np.ndarray, double_row: bool) -> np.ndarray:
    if double_row:
        weights = np.concatenate(np.split(weights, 2, axis=1))
        data = np.concatenate(np.split(data, 2, axis=1))
    with np.errstate(invalid="ignore", over="ignore"):
        return weights.T @ data


def _permuted(weights: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Transpose mode moves bits: moving has one 1 per column, an identity or a permutation."""
    if not (np.isin(selector, (0.0, 1.0)).all() and (selector.sum(0) == 1).all()):
        fail("argument", "moving", "is_transpose takes an identity or a permutation as moving tile")
    return weights.T[:, selector.argmax(0)]


def _accumulated(dst: NkiTensor, accumulate: bool | None) -> np.ndarray:
    """Which elements of dst the product is added to. A group must have been started by a matmul."""
    written, by_matmul = matmul_state(dst)
    if accumulate is None:
        loop = current().loops[-1] if current().loops else None
        if loop is not None and dst.storage.loop is not loop:
            fail("loop-accumulate", "accumulate", f"None on {dst!r}, which was allocated outside the loop")
        if (written & ~by_matmul).any():
            fail("psum-group", "dst", f"{dst!r} was last written by another instruction than a matmul")
        return by_matmul
    if accumulate and not by_matmul.all():
        fail("psum-group", "dst", f"{dst!r}: accumulate=True where no matmul started a group")
    return np.full(dst.shape, bool(accumulate))


def _psum_values(dst: NkiTensor, kept: np.ndarray) -> np.ndarray:
    from ..access import read

    if kept.all():
        return read(dst, "dst")
    return np.where(
        kept, np.ndarray(dst.shape, np.float32, dst.storage.raw.data, dst.offset * 4, [4 * s for s in dst.strides]), 0
    )


@instruction
def nc_transpose(dst, data, engine=engines.unknown, name=None) -> None:
    """dst = data.T over partitions and elements per partition; bit-accurate. Tensor engine into PSUM, or vector up to 32x32."""
    tile("data", data, free_dimensions=4)
    tile("dst", dst, free_dimensions=4)
    small = max(data.shape[0], data.free) <= 32
    default = engines.vector if small and not (data.buffer is SBUF and dst.buffer is PSUM) else engines.tensor
    chosen = choose(engine, (engines.tensor, engines.vector), default)
    if dst.dtype != data.dtype:
        fail("dtype-operand", "dst", f"{dst!r}, expected {data.dtype}")
    if (dst.shape[0], dst.free) != (data.free, data.shape[0]):
        fail("shape", "dst", f"{dst!r} against data {data!r}")
    limit = 128 if chosen is engines.tensor else 32
    if max(data.shape[0], data.free) > limit:
        fail("transpose-tile", "data", f"{data!r} on the {chosen.name} engine")
    if chosen is engines.tensor and not (data.buffer is SBUF and dst.buffer is PSUM):
        fail("buffer", "dst", f"{data!r} to {dst!r}: the tensor engine transposes from SBUF to PSUM")
    write(dst, read_rows(data, "data").T)
    factor = costs.FP32_TRANSPOSE if SIZE[data.dtype] == 4 else 1
    cycles = data.shape[0] * factor if chosen is engines.tensor else data.free
    record(chosen.name, cycles, reads=[data], writes=[dst])
