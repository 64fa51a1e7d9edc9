# SPDX-License-Identifier: Apache-2.0
"""A linear whose time is that of reading its weight: bf16, fp32, or fp8_exact codes with a scale per output column."""

import nki
import nki.language as nl

from .linear_stream import check, project, rows_per_pass, store, turned_rows
from .split import tiles


@nki.jit
def linear(
    x: nl.NkiTensor, weight: nl.NkiTensor, columns: int, scale: nl.NkiTensor | None = None,
    quantize: bool = False, rounds: bool = True,
) -> nl.NkiTensor:  # fmt: skip
    """x W^T accumulated in fp32, x through the activation QDQ where ``quantize``.

    Made for decode, where reading the weight is all of the time: 1 to 128 rows. More rows run in passes of up to 512, each of
    which reads the weight once. Linears that share an input run as one, their weights stacked.

    Dimensions:
        M: rows. K: contraction; KT = ceil(K / 128). N: output columns. C: cores; each has S = ceil(N / C) columns.

    Args:
        x [M, K] bf16 or fp32 @ HBM; fp32 only with an fp32 weight.
        weight [C, min(K, 128), KT S] bf16, fp32 or float8_e4m3 @ HBM: linear_layout.pack.
        columns: N.
        scale [1, N] fp32 @ HBM: of the results, for fp8_exact codes. Every other weight has none.
        quantize: the QDQ of x, for weights that are stored in fp8; x is bf16, K a multiple of 32.
        rounds: the result is rounded to bf16.

    Returns:
        [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear, after formats.qdq_fp8 where ``quantize``. bf16 and fp8 products are exact.
        x is stationary and the weight moves: results lie as rows, and 128 rows take 1.2 times as long as one. A tile of
        128 x 128 weights takes the tensor engine 53 ns, the DMAs 90 ns in bf16; in fp8 45 ns, so that it is bound by the
        tensor engine, 1.2 times the memory's bound; in fp32 213 ns and 181 ns.
        The QDQ happens where x is folded over all partitions; with 128 rows ``activation_qdq`` beforehand takes half as long,
        since the cores share it.

    Pseudocode:
        x_t = transpose(qdq(x))
        for n in tiles of 512 of this core's columns:
            for piece of weight[n]: for k in piece: sums += x_t[k]^T weight[k, n]
            out[:, n] = round(sums * scale[n])

    Cost:
        Per core: KT ceil(S / 512) matmuls per 128 rows, a DMA per 24 KiB of weights per partition, K / (128 J) transposes of
        x in J parts. Bound: K S values at 362.5 GB/s. Predicted, 6 rows, two cores, us; the ratio to the bound, and without
        the 4 us that the first load and the store take at any size (``linears`` pays them once for several weights):

            wq_a and wkv, QDQ  5120 x 1792  31.7, bound 25.3, 1.25, 1.10  head         5120 x 2020  35.3, bound 28.5, 1.24, 1.10
            wq_b, QDQ          1280 x 4096  20.8, bound 14.5, 1.44, 1.16  router       5120 x 384   11.2, bound  5.4, 2.06, 1.33
            wo_a, QDQ          4096 x 1024  17.8, bound 11.6, 1.54, 1.19  fn, fp32     20480 x 24   10.8, bound  2.7, 3.98, 2.51
            wo_b, QDQ          1024 x 5120  21.0, bound 14.5, 1.45, 1.17  fp8, QDQ     5120 x 576   13.6, bound  4.1, 3.34, 2.36

        fn is bound by the tensor engine (fp32, 4.3 us) and by loading x; in fp8 the QDQ takes 3.3 us before the first matmul.
    """
    rows, contraction = x.shape
    check(x, weight, columns, quantize)
    assert scale is None or scale.shape == (1, columns), f"scale: expected (1, {columns}), found {scale.shape}"
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() * ((columns + nl.num_programs() - 1) // nl.num_programs()) >= columns:
        return out
    dtype = nl.float32 if weight.dtype == nl.float32 else nl.bfloat16
    for start, count in tiles(rows, rows_per_pass(contraction, 4 if dtype == nl.float32 else 2)):
        x_t_sb = turned_rows(x[start : start + count], dtype, quantize)
        store(project(out[start : start + count], x_t_sb, weight, contraction, scale))
    return out
