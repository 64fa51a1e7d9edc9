# SPDX-License-Identifier: Apache-2.0
"""Several linears in one launch: one input or one for each. The weights stream without a gap, and 4 us are paid once."""

import nki
import nki.language as nl

from .fold import folded, folds
from .linear_stream import check, load_chunk, project, rows_per_pass, store, turn_chunk, turned_rows
from .slots import MOST_ROWS
from .split import PARTITIONS, tiles


@nki.jit
def linears(
    x: nl.NkiTensor, weight: nl.NkiTensor, second: nl.NkiTensor, third: nl.NkiTensor | None = None, columns: tuple = (),
    quantize: bool = True,
) -> tuple:  # fmt: skip
    """x W^T of two or three weights, each rounded to bf16; x, of all or one of each, through the activation QDQ on request.

    For decode, where the weights are too small to be worth a launch each: the three wkv of the drafter's main_x, the wkv of the
    engrams. The QDQ runs while the first weights are on their way.

    Dimensions:
        J: inputs, 1 or one per weight. M: rows, 1 to 32. K: contraction. N: a weight's output columns. C: cores.

    Args:
        x [J, M, K] bf16 @ HBM.
        weight, second, third [C, min(K, 128), KT S] bf16 @ HBM: linear_layout.pack.
        columns: N of each.

    Returns:
        A tuple of [M, N] bf16 @ shared HBM.

    Notes:
        Reference: rows.linear, after formats.qdq_fp8 where ``quantize``; bit for bit the results of ``linear``.

    Pseudocode:
        for each weight: out = round(transpose(qdq(x[own]))^T weight)

    Cost:
        That of ``linear``, with the latencies of load and store once. Bound: the weights' bytes at 362.5 GB/s per core.
        Predicted, 6 rows, two cores, with the QDQ, which is hidden: one input, 5120 x (512, 512 and 512), 28.1 us, 1.29 times
        the bound, 46.1 in three launches behind one of the QDQ; two inputs, 6144 x (400 and 400), 20.4 us, 1.50 times the
        bound, whose bytes take 13.6 us, 39.6 in four launches.
    """
    inputs, rows, contraction = x.shape
    k_tiles = (contraction + PARTITIONS - 1) // PARTITIONS
    weights: list = []
    for one in (weight, second, third):
        if one is not None:
            weights.append(one)
    assert len(columns) == len(weights), f"columns: expected one for each of {len(weights)} weights, found {len(columns)}"
    assert inputs == 1 or inputs == len(weights), f"x {x.shape}: expected one input, or one for each of {len(weights)} weights"
    assert rows <= MOST_ROWS, f"x {x.shape}: expected 1 to {MOST_ROWS} rows"
    assert x.dtype == nl.bfloat16, f"x {x.dtype}: bfloat16 only"
    outs: list = []
    for i in range(len(weights)):
        assert weights[i].dtype == nl.bfloat16, f"weight {weights[i].dtype}: bfloat16 only"
        check(x[0], weights[i], columns[i], quantize)
        outs.append(nl.ndarray((rows, columns[i]), nl.bfloat16, buffer=nl.shared_hbm))
    fold, stores = folds(rows, contraction, PARTITIONS), []
    x_t_sb = nl.ndarray((min(contraction, PARTITIONS), inputs, k_tiles, rows), nl.bfloat16, buffer=nl.sbuf)
    chunk = load_chunk(folded(x[0], fold), quantize)
    for i in range(len(weights)):
        if i < inputs:
            turn_chunk(x_t_sb[:, i], chunk, 0, fold)
        if i + 1 < inputs:
            chunk = load_chunk(folded(x[i + 1], fold), quantize)
        own_sb = x_t_sb[:, i if inputs > 1 else 0]
        stores += project(outs[i], own_sb, weights[i], contraction, last=i + 1 == len(weights))
    store(stores)
    return tuple(outs)


@nki.jit
def grouped_linear(x: nl.NkiTensor, weight: nl.NkiTensor, columns: int, rounds: bool = True) -> nl.NkiTensor:
    """x[:, g] W[g]^T for every group: the grouped output projection wo_a where a rank has several groups.

    Dimensions:
        M: rows, any number. G: groups. K: contraction. N: output columns of a group. C: cores.

    Args:
        x [M, G, K] bf16 @ HBM.
        weight [G, C, min(K, 128), KT S] bf16 @ HBM: linear_layout.pack of each group's [N, K].
        columns: N.

    Returns:
        [M, G, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.grouped. Each core has half of every group's columns.

    Pseudocode:
        for g: out[:, g] = round(transpose(transpose(x[:, g])) weight[g])

    Cost:
        G times that of ``linear`` less 4 us for each group but one. Predicted for 6 rows and 8 groups of 4096 x 1024 (one rank
        for all heads), two cores: 103.3 us, 142 in eight launches, 1.12 times the bound.
    """
    rows, groups, contraction = x.shape
    assert weight.shape[0] == groups, f"weight {weight.shape}: expected {groups} groups, as x {x.shape} has"
    assert x.dtype == nl.bfloat16 and weight.dtype == nl.bfloat16, f"x {x.dtype}, weight {weight.dtype}: bfloat16 only"
    out = nl.ndarray((rows, groups, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    for g in range(groups):
        check(x[:, g], weight[g], columns, False)
    for start, count in tiles(rows, rows_per_pass(contraction)):
        part = slice(start, start + count)
        before: list = []
        turned = turned_rows(x[part, 0], nl.bfloat16, False)
        for g in range(groups):
            x_t_sb = turned
            if g + 1 < groups:
                turned = turned_rows(x[part, g + 1], nl.bfloat16, False)
            stores = project(out[part, g], x_t_sb, weight[g], contraction, last=g == groups - 1)
            store(before)
            before = stores
        store(before)
    return out
