# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding of a row's last columns, forth or back, with the QDQ of what is cached in the same pass."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .cache_qdq import COMPRESSED_GROUP, INDEX_GROUP, qdq_fp4
from .fold import folded, load
from .split import PARTITIONS, core_share, tiles

MOST_COLUMNS = 2048
"""Of a part: what the QDQ has room for."""
GROUPS = {"fp8": GROUP, "fp4_ue8m0": INDEX_GROUP, "fp4_e4m3": COMPRESSED_GROUP}
"""Columns with a scale."""


@nki.jit
def rotate(x: nl.NkiTensor, table: nl.NkiTensor, back: bool = False, quantize: bool = False, form: str = "fp8") -> nl.NkiTensor:
    """x with its last R columns rotated by the row's angles, rounded; then through the QDQ ``form`` where ``quantize``.

    Dimensions:
        T: tokens, any number. H: heads, 1 to 128. D: columns; R of them rotate. J: parts of a row, each R columns or more.

    Args:
        x [T, H, D] bf16 or fp32 @ HBM. table [T, 2, R] fp32 @ HBM: a token's row of rope.rope_table.
        back: by the conjugate angles, as the attention's output is.
        quantize: as it is cached, x bf16. form: fp8 for window KV, fp4_e4m3 for compressed KV, fp4_ue8m0 for index keys and
        queries; D is a multiple of 32 (fp4_e4m3: 16).

    Returns:
        [T, H, D] of x's dtype @ shared HBM.

    Notes:
        Reference: rope.rotate, then formats.qdq_fp8, qdq_fp4_e4m3 or qdq_fp4_ue8m0 where ``quantize``. Each core has half of
        the tokens. A head's row lies on J partitions; parts without rotary columns rotate by 0, so that every instruction works
        on all partitions. The QDQ in the same pass saves a load and a store, 4 us, of ``activation_qdq`` or ``cache_qdq``.

    Pseudocode:
        a, b = x[even], x[odd];  out = [a cos - b sin, b cos + a sin] on adjacent pairs;  out = qdq(round(out))

    Cost:
        Per 128 partitions: 3 dma_copy, 2 memset, 4 VectorE instructions over R columns; for the QDQ 8 VectorE and 2 ScalarE
        ones (fp8), 12 (fp4_ue8m0) or 19 (fp4_e4m3) VectorE ones. Predicted for 6 tokens, two cores: 8 heads of 512 (q) 5.2 us;
        1 of 512 with QDQ in fp8 (window KV) 6.5 us, in fp4_e4m3 (compressed KV) 7.8 us; 32 of 128 in fp4_ue8m0 (index queries)
        8.2 us.
    """
    check(x, table, quantize, form)
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tokens, heads, dim = x.shape
    rotary, unit = table.shape[2], GROUPS[form] if quantize else 1
    first, mine = core_share(tokens)
    for start, count in tiles(mine, PARTITIONS // heads):
        start += first
        end, rows = start + count, count * heads
        parts = parts_of(rows, dim, rotary, unit)
        x_sb = load(x[start:end].flatten_dims(0, 1), parts)
        angles = table[start:end].expand_dim(1).broadcast(1, heads)
        turn_pairs(x_sb[:, dim // parts - rotary : dim // parts], load_angles(angles, rows, parts), back)
        if quantize:
            groups = x_sb.reshape_dim(1, (dim // parts // unit, unit))
            if form == "fp8":
                qdq(groups, groups)
            else:
                qdq_fp4(groups, form)
        nisa.dma_copy(dst=folded(out[start:end].flatten_dims(0, 1), parts), src=x_sb)
    return out


def check(x: nl.NkiTensor, table: nl.NkiTensor, quantize: bool, form: str) -> None:
    """Refuses shapes and dtypes that do not fit."""
    tokens, heads, dim = x.shape
    rotary = table.shape[2]
    assert table.shape == (tokens, 2, rotary), f"table {table.shape}, expected {(tokens, 2, rotary)}"
    assert heads <= PARTITIONS, f"x {x.shape}: at most {PARTITIONS} heads"
    assert rotary % 2 == 0 and rotary <= dim, f"table {table.shape}: an even number of columns, at most {dim}"
    assert dim <= MOST_COLUMNS, f"x {x.shape}: at most {MOST_COLUMNS} columns"
    assert form in GROUPS, f"form {form}: expected fp8, fp4_ue8m0 or fp4_e4m3"
    assert not quantize or x.dtype == nl.bfloat16, f"quantize: x is {x.dtype}, expected bfloat16"
    assert not quantize or dim % GROUPS[form] == 0, f"quantize: x {x.shape}, columns no multiple of {GROUPS[form]}"


def parts_of(rows: int, dim: int, rotary: int, unit: int) -> int:
    """The most parts of a row, each with all rotary columns and of whole units, that together have 128 partitions."""
    parts = max(min(PARTITIONS // rows, dim // rotary), 1)
    while dim % (parts * unit) != 0:
        parts -= 1
    return parts


def load_angles(angles: nl.NkiTensor, rows: int, parts: int) -> nl.NkiTensor:
    """angles [T, H, 2, R] @ HBM as [J T H, 2, R] fp32: those of the last part; cos 1 and sin 0 for the others."""
    rotary = angles.shape[3]
    angles_sb = nl.ndarray((parts * rows, 2, rotary), nl.float32, buffer=nl.sbuf)
    if parts > 1:
        nisa.memset(dst=angles_sb[:, 0], value=1.0)
        nisa.memset(dst=angles_sb[:, 1], value=0.0)
    nisa.dma_copy(dst=angles_sb[(parts - 1) * rows : parts * rows], src=angles)
    return angles_sb


def turn_pairs(x: nl.NkiTensor, angles_sb: nl.NkiTensor, back: bool) -> None:
    """x [P, R], adjacent pairs, turned in place by angles_sb [P, 2, R]: 4 VectorE instructions."""
    rotary = x.shape[1]
    pairs = x.reshape_dim(1, (rotary // 2, 2))
    sin = angles_sb[:, 1].reshape_dim(1, (rotary // 2, 2))
    straight_sb = nl.ndarray(x.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=straight_sb, data1=x, data2=angles_sb[:, 0], op=nl.multiply)
    crossed_sb = nl.ndarray((x.shape[0], rotary // 2, 2), nl.float32, buffer=nl.sbuf)
    for side in range(2):
        nisa.tensor_tensor(dst=crossed_sb[:, :, side], data1=pairs[:, :, 1 - side], data2=sin[:, :, side], op=nl.multiply)
    crossed = crossed_sb.flatten_dims(1, 2)
    nisa.tensor_tensor(dst=x, data1=straight_sb, data2=crossed, op=nl.subtract if back else nl.add)
