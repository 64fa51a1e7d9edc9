# SPDX-License-Identifier: Apache-2.0
"""Comparison of logits with the contract that NxDI's accuracy.py relies on. This project's own, not AWS's comparator."""

import dataclasses

import torch

TOLERANCES = {"5": (1e-5, 0.01), "50": (1e-5, 0.02), "1000": (1e-5, 0.03), "all": (1e-5, 0.05)}
"""(atol, rtol) of the so many highest expected logits."""


@dataclasses.dataclass
class AllCloseSummary:
    """allclose and the largest error, relative to the largest expected value."""

    allclose: bool
    max_rel_error: float
    rtol: float = 0.0
    atol: float = 0.0


def custom_allclose(expected, actual, atol=1e-5, rtol=0.01):
    """(whether every error is at most atol + rtol * max|expected|, the largest relative error)."""
    error, scale = (actual.float() - expected.float()).abs(), expected.float().abs().max()
    return bool((error <= atol + rtol * scale).all()), float((error / scale.clamp_min(1e-30)).max())


def neuron_allclose(actual, expected, rtol=0.01, atol=1e-5, **kwargs):
    """The same as a summary."""
    return AllCloseSummary(*custom_allclose(expected, actual, atol, rtol), rtol, atol)


def logit_validation(input_ids, generate_fn, expected_logits, tol_map=None, divergence_difference_tol=None, **kwargs):
    """(passed, results by row and token, message). Where greedy tokens part, generation goes on from the expected ones."""
    tolerances, parting = tol_map or TOLERANCES, 0.001 if divergence_difference_tol is None else divergence_difference_tol
    ids, expected = torch.as_tensor(input_ids), expected_logits.float()
    wanted, start, passed, results = expected.argmax(-1).T, 0, True, [[] for _ in torch.as_tensor(input_ids)]
    while start < wanted.shape[1]:
        given = generate_fn(torch.cat([ids, wanted[:, :start]], dim=1))
        logits, tokens = given if isinstance(given, tuple) else (given, given.argmax(-1).T)
        count = min(tokens.shape[1], wanted.shape[1] - start)
        if count == 0:
            return False, results, f"logit validation FAILED (stand-in): nothing generated at token {start}"
        parted = (tokens[:, :count] != wanted[:, start : start + count]).any(0).nonzero()
        count = int(parted[0]) + 1 if len(parted) else count
        for row in range(len(ids)):
            for token in range(count):
                good = _close(logits[token, row].float(), expected[start + token, row], tolerances)
                wish, found = int(wanted[row, start + token]), int(tokens[row, token])
                good &= wish == found or float(logits[token, row].max() - logits[token, row, wish]) <= parting
                results[row].append({"passed": good, "expected": wish, "actual": found})
                passed &= good
        start += count
    return passed, results, f"logit validation {'passed' if passed else 'FAILED'} (stand-in): {start} tokens"


def _close(found, expected, tolerances):
    kept = torch.isfinite(expected)
    found, expected = found[kept], expected[kept]
    good = bool(torch.isfinite(found).all())
    for most, (atol, rtol) in tolerances.items():
        count = len(expected) if most == "all" else min(int(most), len(expected))
        top = torch.topk(expected, count)
        good &= neuron_allclose(found[top.indices], top.values, rtol=rtol, atol=atol).allclose
    return good
