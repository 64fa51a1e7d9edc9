# SPDX-License-Identifier: Apache-2.0
"""The compressor's pooling: a softmax over each group's rows, column by column, and the norm behind it."""

import nki
import nki.isa as nisa
import nki.language as nl

from .fold import folded, load, rows_at_a_time, sum_folds
from .rms_norm import normalise
from .split import core_share, tiles

MOST_VALUES = 4096
"""Of a part of a group: what SBUF has room for."""
COLUMNS = 16
"""A part has a multiple of these where they divide D: runs of 64 bytes for the DMAs."""


@nki.jit
def compress_pool(kv: nl.NkiTensor, score: nl.NkiTensor, weight: nl.NkiTensor, eps: float, rounds: bool = True) -> nl.NkiTensor:
    """RMSNorm of the sum over a group's rows of softmax(score) times kv, both rounded to bf16 where ``rounds``.

    Dimensions:
        G: groups, any number. r: rows of a group. D: columns; r D / J at most 4096. Each core has half of the groups.

    Args:
        kv, score [G, r, D] fp32 @ HBM. weight [1, D] fp32 @ HBM.

    Returns:
        [G, D] bf16, or fp32 without ``rounds`` @ shared HBM.

    Notes:
        Reference: compressor.Compressor.forward behind its linears. The norm in the same pass saves a store and a load, 4 us.
        The division is a multiplication by the reciprocal.

    Pseudocode:
        e = exp(score - max over r of score);  pooled = round(sum over r of e * kv / sum over r of e);  out = rms_norm(pooled)

    Cost:
        Per tile of groups: 4 dma_copy and the identity, 2 nc_matmul, 12 VectorE and 3 ScalarE instructions. Predicted for
        2 groups of 2 x 512, two cores: 6.3 us; of 128 x 512: 41.8 us.
    """
    groups, ratio, dim = kv.shape
    assert score.shape == kv.shape, f"score {score.shape}, expected {kv.shape}"
    assert weight.shape == (1, dim), f"weight {weight.shape}, expected {(1, dim)}"
    out = nl.ndarray((groups, dim), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    first, mine = core_share(groups)
    unit = COLUMNS if dim % COLUMNS == 0 else 1
    for start, count in tiles(mine, rows_at_a_time(dim, ratio, MOST_VALUES, unit)):
        start += first
        end, parts = start + count, sum_folds(count, dim, unit)
        pooled_sb = nl.ndarray((parts * count, dim // parts), out.dtype, buffer=nl.sbuf)
        pool(pooled_sb, load(kv[start:end], parts), load(score[start:end], parts))
        normalise(folded(out[start:end], parts), pooled_sb, weight, parts, eps)
    return out


def pool(pooled_sb: nl.NkiTensor, kv_sb: nl.NkiTensor, score_sb: nl.NkiTensor) -> None:
    """pooled_sb [P, W] of kv_sb and score_sb [P, r, W], which are overwritten."""
    ratio = kv_sb.shape[1]
    most_sb = nl.ndarray(pooled_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=most_sb, op=nl.maximum, data=score_sb.permute((0, 2, 1)), axis=2)
    most = most_sb.expand_dim(1).broadcast(1, ratio)
    nisa.tensor_tensor(dst=score_sb, data1=score_sb, data2=most, op=nl.subtract)
    nisa.activation(dst=score_sb, op=nl.exp, data=score_sb)
    total_sb = nl.ndarray(pooled_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total_sb, op=nl.add, data=score_sb.permute((0, 2, 1)), axis=2)
    nisa.reciprocal(dst=total_sb, data=total_sb)
    nisa.tensor_tensor(dst=kv_sb, data1=kv_sb, data2=score_sb, op=nl.multiply)
    sum_sb = nl.ndarray(pooled_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=sum_sb, op=nl.add, data=kv_sb.permute((0, 2, 1)), axis=2)
    nisa.tensor_tensor(dst=pooled_sb, data1=sum_sb, data2=total_sb, op=nl.multiply)
