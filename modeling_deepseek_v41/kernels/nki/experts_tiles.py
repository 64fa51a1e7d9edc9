# SPDX-License-Identifier: Apache-2.0
"""On the device: what the experts kernel checks, allocates and loads before the first expert."""

import nki.isa as nisa
import nki.language as nl

from .experts_hidden import Scratch, scratch
from .experts_plan import DOWN_BYTES, PARTITIONS, UP_BYTES, Plan, plan, slots

BANK = 2048
"""Bytes of a PSUM bank, per partition."""


FEW_ROWS = 16
"""Up to so many, two VectorE instructions over all tiles of a piece of w2 are quicker than one per tile."""


class Experts(nl.NKIObject):
    """The operands, the options, and the tiles that the kernel works in. T: tiles of columns, KT: hidden tiles."""

    w13: nl.NkiTensor
    w2: nl.NkiTensor
    out: nl.NkiTensor
    shape: Plan
    limit: float
    quantize: bool
    x_t: nl.NkiTensor
    """[KW, KT, M] bf16"""
    routing: nl.NkiTensor
    """[128, E, M] fp32, the same on every partition"""
    weight: nl.NkiTensor
    """[W, M] fp32: the routing weights of the expert at hand"""
    up_slots: list
    down_slots: list
    """[KW, bytes], [W, bytes] fp8: pieces of weights go through them in turn"""
    products: list
    """[W, 2, tiles, M] fp32 @ PSUM"""
    sums: list
    """[KW, tiles, M] fp32 @ PSUM"""
    hidden: list
    """[W, T, M] bf16, of two experts"""
    scales: list
    """[max(KW, W), 2 T + KT] fp32, of two experts"""
    scaled: nl.NkiTensor | None
    """[KW, tiles, M]: an expert's result before the sum, bf16 where it is rounded; None where tiles are added one by one"""
    received: nl.NkiTensor | None
    """[KW, KT / 2, M] fp32: on two cores, the other one's sum for this one's half"""
    total: nl.NkiTensor
    """[KW, KT, M] fp32: the sum over the experts"""
    work: Scratch
    rows: int


def start(
    x: nl.NkiTensor, routing: nl.NkiTensor, w13: nl.NkiTensor, w2: nl.NkiTensor, limit: float,
    quantize: bool, round_experts: bool,
) -> Experts:  # fmt: skip
    """Check the operands, allocate every tile, load the routing weights, clear the sum."""
    w13, w2 = w13.view(nl.float8_e4m3), w2.view(nl.float8_e4m3)
    rows, hidden = x.shape
    experts, cores, width, down_bytes = w2.shape
    assert 1 <= rows <= PARTITIONS, f"x {x.shape}: expected 1 to {PARTITIONS} rows"
    assert x.dtype == nl.bfloat16, f"x: expected bfloat16, found {x.dtype}"
    assert cores == nl.num_programs(), f"w2 {w2.shape}: laid out for {cores} cores, launched on {nl.num_programs()}"
    assert down_bytes % hidden == 0, f"w2 {w2.shape}: no multiple of hidden {hidden}"
    tiles = down_bytes // hidden
    shape = plan(hidden, width * tiles, cores)
    hidden_tiles, partitions = shape.hidden_tiles, max(width, shape.hidden_width)
    up_shape = (experts, cores, partitions, shape.scale_bytes + 2 * hidden_tiles * shape.columns)
    assert shape.width == width, f"w2 {w2.shape}: expected {shape.width} partitions for {shape.columns} columns per core"
    assert w13.shape == up_shape, f"w13: expected {up_shape}, found {w13.shape}"
    assert routing.shape == (experts, rows), f"routing: expected {(experts, rows)}, found {routing.shape}"
    assert not (round_experts and cores > 1), f"round_experts on {cores} cores: each has a part of an expert's sum only"

    stride = 1
    while stride < rows:
        stride *= 2
    buffers = 2 if stride <= 32 else 1
    most_up, most_down = max(shape.up_pieces), max(shape.down_pieces)
    products, sums, pair, scales = [], [], [], []
    for _ in range(buffers):
        products.append(nl.ndarray((width, 2, most_up, stride), nl.float32, buffer=nl.psum))
        sums.append(nl.ndarray((shape.hidden_width, most_down, stride), nl.float32, buffer=nl.psum))
    for _ in range(2):
        pair.append(nl.ndarray((width, tiles, rows), nl.bfloat16, buffer=nl.sbuf))
        scales.append(nl.ndarray((partitions, shape.scale_bytes // 2), nl.float32, buffer=nl.sbuf))
    total = nl.ndarray((shape.hidden_width, hidden_tiles, rows), nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
    received, scaled = None, None
    if round_experts or rows <= FEW_ROWS:
        kind = nl.bfloat16 if round_experts else nl.float32
        scaled = nl.ndarray((shape.hidden_width, most_down, rows), kind, buffer=nl.sbuf)
    if cores > 1:
        received = nl.ndarray((shape.hidden_width, hidden_tiles // 2, rows), nl.float32, buffer=nl.sbuf)
    routing_sb = nl.ndarray((PARTITIONS, experts, rows), nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=routing_sb, src=routing.ap([[0, PARTITIONS], [rows, experts], [1, rows]]))
    return Experts(
        w13=w13, w2=w2, out=nl.ndarray((rows, hidden), nl.float32, buffer=nl.shared_hbm),
        shape=shape, limit=limit, quantize=quantize, rows=rows,
        x_t=nl.ndarray((shape.hidden_width, hidden_tiles, rows), x.dtype, buffer=nl.sbuf), routing=routing_sb,
        weight=nl.ndarray((width, rows), nl.float32, buffer=nl.sbuf),
        up_slots=weight_slots(partitions, shape.up_sizes, UP_BYTES, w13.dtype),
        down_slots=weight_slots(width, shape.down_sizes, DOWN_BYTES, w2.dtype),
        products=products, sums=sums, hidden=pair, scales=scales,
        scaled=scaled, total=total, received=received, work=scratch(shape, rows, stride),
    )  # fmt: skip


def weight_slots(partitions: int, sizes: list, budget: int, dtype: str) -> list:
    """Buffers for weight pieces of ``sizes`` bytes per partition, used in turn."""
    found = []
    for size in slots(sizes, budget):
        found.append(nl.ndarray((partitions, size), dtype, buffer=nl.sbuf))
    return found


def load_columns(e: Experts, x: nl.NkiTensor) -> None:
    """x [M, hidden] @ HBM to x_t by transposes: hidden column k * KW + p is on partition p."""
    width, count = e.shape.hidden_width, e.shape.hidden_tiles
    x_sb = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x_sb, src=x)
    stride = e.sums[0].shape[2]
    x_t_psum = nl.ndarray((width, min(count, BANK // 2 // stride), stride), x.dtype, buffer=nl.psum)
    for first in range(0, count, x_t_psum.shape[1]):
        n = min(x_t_psum.shape[1], count - first)
        for k in range(n):
            at = (first + k) * width
            nisa.nc_transpose(dst=x_t_psum[:, k, 0 : e.rows], data=x_sb[:, at : at + width])
        nisa.tensor_copy(dst=e.x_t[:, first : first + n], src=x_t_psum[:, 0:n, 0 : e.rows])
