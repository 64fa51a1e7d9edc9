# SPDX-License-Identifier: Apache-2.0
"""Several linears in one launch: one input or one per group. The weights stream without a gap, and 4 us are paid once."""

import nki
import nki.language as nl

from .linear_stream import check, project, rows_per_pass, store, turned_rows
from .split import tiles


@nki.jit
def linears(
    x: nl.NkiTensor, weight: nl.NkiTensor, second: nl.NkiTensor, third: nl.NkiTensor | None = None, columns: tuple = (),
    quantize: tuple = (), rounds: tuple = (),
) -> tuple:  # fmt: skip
    """x W^T of two or three weights, each as ``linear`` gives it.

    For linears of one input that cannot be stacked, since one takes it through the QDQ and another as it is, or their results
    are rounded differently: the router beside the shared expert, the compressor and the index weights beside wq_a and wkv.

    Dimensions:
        M: rows, any number, in passes that read each weight once (512 rows of 5120 columns, 256 with both forms of x).
        K: contraction. N: a weight's output columns. C: cores.

    Args:
        x [M, K] bf16 @ HBM.
        weight, second, third [C, min(K, 128), KT S] bf16 @ HBM: linear_layout.pack. Those without QDQ best come first, they
        hide it.
        columns: N of each. quantize: of each, whether x goes through the activation QDQ. rounds: of each, whether the result
        is rounded to bf16.

    Returns:
        A tuple of [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear, after formats.qdq_fp8 where ``quantize``; bit for bit the results of ``linear``.

    Pseudocode:
        x_t, q_t = transpose(x), transpose(qdq(x));  for each weight: out = round((q_t if quantize else x_t)^T weight)

    Cost:
        That of ``linear``, with the latencies of load and store once. Bound: the weights' bytes at 362.5 GB/s per core.
        Predicted, 6 rows, two cores: 5120 x (384 and 576), router and w1 with w3 of the shared expert, 20.1 us, 25.4 in two
        launches, 1.48 times the bound; 5120 x (1024, 32 and 1792), compressor, index weights, wq_a and wkv, 47.5 us, 58.8 in
        three launches, 1.18 times the bound.
    """
    rows, contraction = x.shape
    weights = [weight, second]
    if third is not None:
        weights.append(third)
    found = len(columns), len(quantize), len(rounds)
    expected = len(weights), len(weights), len(weights)
    assert found == expected, f"columns, quantize, rounds: expected one for each of {len(weights)} weights, found {found}"
    outs = []
    for i in range(len(weights)):
        assert weights[i].dtype == nl.bfloat16 and x.dtype == nl.bfloat16, (
            f"x {x.dtype}, weight {weights[i].dtype}: bfloat16 only"
        )
        check(x, weights[i], columns[i], quantize[i])
        outs.append(nl.ndarray((rows, columns[i]), nl.bfloat16 if rounds[i] else nl.float32, buffer=nl.shared_hbm))
    for start, count in tiles(rows, rows_per_pass(contraction, 2)):
        part = slice(start, start + count)
        plain_sb, rounded_sb = None, None
        for i in range(len(weights)):
            if quantize[i] and rounded_sb is None:
                rounded_sb = turned_rows(x[part], nl.bfloat16, True)
            if not quantize[i] and plain_sb is None:
                plain_sb = turned_rows(x[part], nl.bfloat16, False)
        stores: list = []
        for i in range(len(weights)):
            x_t_sb = rounded_sb if quantize[i] else plain_sb
            stores += project(outs[i][part], x_t_sb, weights[i], contraction, last=i == len(weights) - 1)
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
