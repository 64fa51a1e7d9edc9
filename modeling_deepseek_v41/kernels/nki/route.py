# SPDX-License-Identifier: Apache-2.0
"""The router behind its linear: scores, the chosen experts, best first, and their weights."""

import nki
import nki.isa as nisa
import nki.language as nl

from .split import PARTITIONS, core_share, tiles

EIGHT = 8
"""Values that one search finds."""
MOST_EXPERTS = 2048
LOWEST = -3.4028234663852886e38
"""The least finite value: what fills up, and what was found."""
SERIES_BELOW = -3.5
"""Logits from where on log1p(e), e = exp(logit) < 0.031, is its series of four terms, to 2e-7; 1 + e would lose e's bits."""
LEAST = 2.0**-100
"""Of what a square root is taken: its range on the device."""


@nki.jit
def route(
    logits: nl.NkiTensor, bias: nl.NkiTensor, k: int, normalises: bool, factor: float
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """The k experts of the highest sqrt(softplus(logit)) + bias, and those scores without bias, normalised, times ``factor``.

    Dimensions:
        M: rows, any number. E: experts, to 2048. k: to E.

    Args:
        logits [M, E] fp32 @ HBM, finite; below -174 a score is 0. bias [1, E] fp32 @ HBM, finite.
        normalises: the weights of a row are divided by their sum + 1e-20.

    Returns:
        ids [M, k] int32, best first, of equal scores the lower id first, and weights [M, k] fp32; both @ shared HBM.

    Notes:
        Reference: moe.route. Scores come of ScalarE's exp, log and sqrt, so two that differ in their last bits may change
        places; equal logits with equal biases never do: of equal values nc_find_index8 finds the next position. Rows lie on
        partitions; each core has half of them.

    Pseudocode:
        h = exp(-|x| / 2);  e = h^2
        score = h sqrt(e (e (1/3 - e / 4) - 1/2) + 1) if x < -3.5 else sqrt(max(x, 0) + log(1 + e))
        ids = top(score + bias);  w = score[ids];  w = w / (sum(w) + 1e-20) * factor

    Cost:
        Per 128 rows of a core: 4 dma_copy, 6 ScalarE and 16 VectorE instructions, of the latter 3 more per 8 chosen behind the
        first 8, and a gather on GpSimd. Bound: the latency of a chain of them. Predicted for 6 rows of 384 experts, k = 6, two
        cores: 12.6 us, of which 4 us are load and store.
    """
    rows, experts = logits.shape
    assert bias.shape == (1, experts), f"bias {bias.shape}, expected {(1, experts)}"
    assert logits.dtype == nl.float32 and bias.dtype == nl.float32, f"logits {logits.dtype}, bias {bias.dtype}: float32 only"
    assert 1 <= k <= experts <= MOST_EXPERTS, f"k {k} of {experts} experts: 1 to all of at most {MOST_EXPERTS}"
    ids = nl.ndarray((rows, k), nl.int32, buffer=nl.shared_hbm)
    weights = nl.ndarray((rows, k), nl.float32, buffer=nl.shared_hbm)
    first, mine = core_share(rows)
    for start, count in tiles(mine, PARTITIONS):
        part = slice(first + start, first + start + count)
        logits_sb = nl.ndarray((count, experts), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=logits_sb, src=logits[part])
        bias_sb = nl.ndarray((count, experts), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=bias_sb, src=bias.broadcast(0, count))
        scores_sb, biased_sb = score_tiles(count, experts)
        score(scores_sb, logits_sb)
        nisa.tensor_tensor(dst=biased_sb[:, 0:experts], data1=scores_sb, data2=bias_sb, op=nl.add)
        choose(ids[part], weights[part], scores_sb, biased_sb, normalises, factor)
    return ids, weights


def score_tiles(rows: int, experts: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Tiles [M, E] fp32 for scores and [M, max(E, 8)] for those plus bias, LOWEST behind E."""
    scores_sb = nl.ndarray((rows, experts), nl.float32, buffer=nl.sbuf)
    biased_sb = nl.ndarray((rows, max(experts, EIGHT)), nl.float32, buffer=nl.sbuf)
    if experts < EIGHT:
        nisa.memset(dst=biased_sb, value=LOWEST)
    return scores_sb, biased_sb


def score(scores_sb: nl.NkiTensor, x: nl.NkiTensor) -> None:
    """scores_sb = sqrt(softplus(x)), both [P, n] fp32, x @ SBUF or PSUM: 6 ScalarE and 7 VectorE instructions."""
    shape = x.shape
    half_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=half_sb, op=nl.abs, data=x)
    nisa.activation(dst=half_sb, op=nl.exp, data=half_sb, scale=-0.5)
    e_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=e_sb, op=nl.square, data=half_sb)

    one_sb = nl.ones((shape[0], 1), nl.float32)
    nisa.activation(dst=scores_sb, op=nl.log, data=e_sb, bias=one_sb)
    below_sb = nl.ndarray(shape, nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=below_sb, data=x, op0=nl.less, operand0=SERIES_BELOW)
    series_sb = nl.ndarray(shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=series_sb, data=e_sb, op0=nl.multiply, operand0=-0.25)
    for term in (1.0 / 3.0, -0.5):
        nisa.scalar_tensor_tensor(dst=series_sb, data=series_sb, op0=nl.add, operand0=term, op1=nl.multiply, operand1=e_sb)
    nisa.activation(dst=series_sb, op=nl.sqrt, data=series_sb, bias=one_sb)
    nisa.scalar_tensor_tensor(dst=scores_sb, data=x, op0=nl.maximum, operand0=LEAST, op1=nl.add, operand1=scores_sb)
    nisa.activation(dst=scores_sb, op=nl.sqrt, data=scores_sb)
    nisa.tensor_tensor(dst=series_sb, data1=series_sb, data2=half_sb, op=nl.multiply)
    nisa.tensor_copy_predicated(dst=scores_sb, src=series_sb, predicate=below_sb)


def choose(
    ids: nl.NkiTensor, weights: nl.NkiTensor, scores_sb: nl.NkiTensor, biased_sb: nl.NkiTensor, normalises: bool, factor: float
) -> None:
    """Stores ids and weights [M, k] @ HBM of the k highest of biased_sb [M, n], weighted by scores_sb [M, E]."""
    rows, k = ids.shape
    ids_sb, chosen_sb = best(scores_sb, biased_sb, -(-k // EIGHT))
    nisa.dma_copy(dst=ids, src=ids_sb.view(nl.int32)[:, 0:k])
    weights_sb = nl.ndarray((rows, k), nl.float32, buffer=nl.sbuf)
    if normalises:
        total_sb = nl.ndarray((rows, 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total_sb, op=nl.add, data=chosen_sb[:, 0:k], axis=1)
        nisa.tensor_scalar(dst=total_sb, data=total_sb, op0=nl.add, operand0=1e-20)
        nisa.reciprocal(dst=total_sb, data=total_sb)
        nisa.tensor_scalar(
            dst=weights_sb, data=chosen_sb[:, 0:k], op0=nl.multiply, operand0=total_sb, op1=nl.multiply, operand1=factor
        )
    else:
        nisa.tensor_scalar(dst=weights_sb, data=chosen_sb[:, 0:k], op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=weights, src=weights_sb)


def best(scores_sb: nl.NkiTensor, biased_sb: nl.NkiTensor, rounds: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """Of each row the 8 ``rounds`` highest of biased_sb, best first: positions [M, 8 rounds] uint32, and scores_sb there.

    Positions are below the number of experts whatever the row holds: a NaN is found nowhere.
    """
    rows, experts = scores_sb.shape
    ids_sb = nl.ndarray((rows, rounds * EIGHT), nl.uint32, buffer=nl.sbuf)
    chosen_sb = nl.ndarray((rows, rounds * EIGHT), nl.float32, buffer=nl.sbuf)
    for r in range(rounds):
        part = slice(r * EIGHT, (r + 1) * EIGHT)
        most_sb = nl.ndarray((rows, EIGHT), nl.float32, buffer=nl.sbuf)
        nisa.max8(dst=most_sb, src=biased_sb)
        nisa.nc_find_index8(dst=ids_sb[:, part], data=biased_sb, vals=most_sb)
        if r + 1 < rounds:
            nisa.nc_match_replace8(dst=biased_sb, data=biased_sb, vals=most_sb, imm=LOWEST)
    known_sb = nl.ndarray(ids_sb.shape, nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=known_sb, data=ids_sb, op0=nl.minimum, operand0=float(experts - 1))
    nisa.nc_n_gather(dst=chosen_sb, data=scores_sb, indices=known_sb)
    return known_sb, chosen_sb
