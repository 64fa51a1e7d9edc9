# SPDX-License-Identifier: Apache-2.0
"""On the device: from the products of w1 and w3 to the input of w2: clamps, SwiGLU, routing weight, QDQ."""

import nki.isa as nisa
import nki.language as nl

from .experts_plan import GROUP, Plan
from .rounding import grid_floor, magnitude, round_to_grid


class Scratch(nl.NKIObject):
    """Work tiles for the largest piece of g tiles of ``width`` columns, M rows; M is filled up to a power of two in PSUM."""

    gate_up: nl.NkiTensor
    """[W, 2, g, M] bf16"""
    wide: nl.NkiTensor
    """[W, 2, g, M] fp32"""
    narrow: nl.NkiTensor
    """[W, g, M] bf16"""
    amax: nl.NkiTensor
    """[M, 2, g * W / 32] fp32: the largest magnitudes of the groups, and the exponents that come of them"""
    floor: nl.NkiTensor
    """[M, g * W] fp32"""
    by_row: nl.NkiTensor
    """[M, g * W] bf16 @ PSUM"""
    by_column: nl.NkiTensor
    """[W, g, M] fp32 @ PSUM"""


def scratch(shape: Plan, rows: int, stride: int) -> Scratch:
    """The tiles; ``stride`` is the rows' distance in PSUM."""
    most, width = max(shape.up_pieces), shape.width
    columns = most * width
    return Scratch(
        gate_up=nl.ndarray((width, 2, most, rows), nl.bfloat16, buffer=nl.sbuf),
        wide=nl.ndarray((width, 2, most, rows), nl.float32, buffer=nl.sbuf),
        narrow=nl.ndarray((width, most, rows), nl.bfloat16, buffer=nl.sbuf),
        amax=nl.ndarray((rows, 2, columns // GROUP), nl.float32, buffer=nl.sbuf),
        floor=nl.ndarray((rows, columns), nl.float32, buffer=nl.sbuf),
        by_row=nl.ndarray((rows, columns), nl.bfloat16, buffer=nl.psum),
        by_column=nl.ndarray((width, most, stride), nl.float32, buffer=nl.psum),
    )


def swiglu(
    h: nl.NkiTensor, products: nl.NkiTensor, scale: nl.NkiTensor, routing: nl.NkiTensor, limit: float, work: Scratch
) -> None:
    """h [W, g, M] bf16 = silu(gate) * up * routing: 5 VectorE instructions and 1 ScalarE one, 3 less where limit is 0.

    products [W, 2, g, M] fp32 @ PSUM, of w1 and w3; scale [W, 2, g] fp32; routing [W, M] fp32. gate and up are rounded to
    bf16; gate is clamped from above, up on both sides.
    """
    _, _, g, rows = products.shape
    gate_up, wide = work.gate_up[:, :, 0:g], work.wide[:, 0, 0:g]
    nisa.tensor_tensor(dst=gate_up, data1=products, data2=scale.expand_dim(3).broadcast(3, rows), op=nl.multiply)
    gate, up = gate_up[:, 0], gate_up[:, 1]
    if limit > 0:
        nisa.tensor_scalar(dst=gate, data=gate, op0=nl.minimum, operand0=limit)
        nisa.tensor_scalar(dst=up, data=up, op0=nl.minimum, operand0=limit, op1=nl.maximum, operand1=-limit)
    nisa.activation(dst=wide, op=nl.silu, data=gate)
    nisa.tensor_tensor(dst=wide, data1=wide, data2=up, op=nl.multiply)
    nisa.tensor_tensor(dst=h, data1=wide, data2=routing.expand_dim(1).broadcast(1, g), op=nl.multiply)


def find_floors(h: nl.NkiTensor, work: Scratch) -> None:
    """The QDQ of h [W, g, M] bf16, part 1: work.floor [M, g W], per value the least exponent that it is rounded at.

    A group's 32 columns lie on 32 partitions, so the magnitudes are transposed to find each group's largest. 4 VectorE, 1
    ScalarE and g TensorE instructions.
    """
    width, g, _ = h.shape
    columns, groups = g * width, g * width // GROUP
    by_row = work.by_row[:, 0:columns]
    magnitude(work.narrow[:, 0:g], h)
    for t in range(g):
        nisa.nc_transpose(dst=by_row[:, t * width : (t + 1) * width], data=work.narrow[:, t])
    amax, exponents = work.amax[:, 0, 0:groups], work.amax[:, 1, 0:groups]
    nisa.tensor_reduce(dst=amax, op=nl.maximum, data=by_row.reshape_dim(1, (groups, GROUP)), axis=2)
    grid_floor(exponents, amax)
    floor = work.floor[:, 0:columns].reshape_dim(1, (groups, GROUP))
    nisa.activation(dst=floor, op=nl.copy, data=exponents.expand_dim(2).broadcast(2, GROUP))


def round_hidden(h: nl.NkiTensor, work: Scratch) -> None:
    """Part 2: h rounded in place, with the floors transposed back. 4 VectorE and g TensorE instructions."""
    width, g, rows = h.shape
    floor = work.by_column[:, 0:g, 0:rows]
    for t in range(g):
        nisa.nc_transpose(dst=floor[:, t], data=work.floor[:, t * width : (t + 1) * width])
    round_to_grid(h, h, floor, work.narrow[:, 0:g], work.wide[:, 0, 0:g], work.wide[:, 1, 0:g])
