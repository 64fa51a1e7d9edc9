# SPDX-License-Identifier: Apache-2.0
"""Runs rows of new tokens through the model so that no row's result depends on the others."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..buckets import next_chunk, prefill_buckets, read_length
from ..dspark.step import read_prompt
from ..model import DeepseekV41Model
from ..runner import check_finite
from .cache import DeepseekV41Cache


def advance(backbone: DeepseekV41Model, cache: DeepseekV41Cache, tokens: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    """Takes in new tokens and returns the logits that are asked for.

    ``tokens``: int64 [n_b] for each of the cache's sequences, n_b may be 0. ``wanted``: bool [n_b], which of them need
    logits. Returns fp32 [wanted_b, vocab] per sequence; ``cache`` holds the tokens afterwards. Raises RequestError, before
    anything is computed, where a sequence would become too long.

    Sequences with one new token, as in decode, run together, for which the model keeps rows apart to the bit (rows.py);
    longer ones run by themselves, so their bits do not depend on the batch either.
    """
    for row, ids in enumerate(tokens):
        cache.reserve(row, len(ids))
    logits = [torch.empty(0, backbone.config.vocab_size, device=ids.device) for ids in tokens]
    single = [row for row, ids in enumerate(tokens) if len(ids) == 1]
    if single:
        hidden = _call(backbone, cache, torch.stack([tokens[row] for row in single]), single, 1)
        keep = torch.cat([wanted[row] for row in single])
        apart = iter(_head(backbone, hidden[keep]))
        for row in single:
            if wanted[row]:
                logits[row] = next(apart)
    for row, ids in enumerate(tokens):
        if len(ids) > 1:
            logits[row] = _prompt(backbone, cache, row, ids, wanted[row])
    return logits


def last_logits(backbone: DeepseekV41Model, cache: DeepseekV41Cache, rows: list[Tensor], wanted: list[bool]) -> Tensor:
    """Takes in what ``cache`` lacks of the tokens ``rows`` [n_b] of the ``wanted`` sequences, at least one of each.

    Returns the logits [B, vocab] fp32 behind each one's last token, zeros where a row is not ``wanted``.
    """
    pending = [ids[done:] if row else ids[:0] for ids, done, row in zip(rows, cache.lengths, wanted, strict=True)]
    last = [torch.arange(len(ids), device=ids.device) == len(ids) - 1 for ids in pending]
    logits = torch.zeros(len(rows), backbone.config.vocab_size, device=rows[0].device)
    for row, found in enumerate(advance(backbone, cache, pending, last)):
        if len(found):
            logits[row] = found[0]
    return logits


def _prompt(backbone: DeepseekV41Model, cache: DeepseekV41Cache, row: int, ids: Tensor, wanted: Tensor) -> Tensor:
    """One sequence, chunk by chunk: ids [n] to the logits of the ``wanted`` ones."""
    buckets = prefill_buckets(cache.max_seq_len)
    parts, done = [], 0
    while done < len(ids):
        start = cache.lengths[row]
        count, padded = next_chunk(start, start + len(ids) - done, buckets)
        chunk, keep = ids[done : done + count], wanted[done : done + count]
        hidden = _call(backbone, cache, F.pad(chunk, (0, padded - count)).unsqueeze(0), [row], count)
        parts.append(_head(backbone, hidden[:, :count][:, keep])[0])
        done += count
    return torch.cat(parts)


def _call(backbone: DeepseekV41Model, cache: DeepseekV41Cache, ids: Tensor, rows: list[int], count: int) -> Tensor:
    """One forward of ids [m, T], ``count`` of them real, for the sequences ``rows``: hidden [m, T, d].

    The model's drafter, where it has one, sees the tokens too, so that speculation can begin behind any of them.
    """
    starts = [cache.lengths[row] for row in rows]
    device = ids.device
    hidden, *_ = read_prompt(
        backbone,
        backbone.drafter,
        ids,
        torch.tensor(starts, device=device),
        torch.tensor([count] * len(rows), device=device),
        torch.tensor(rows, device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        *cache.state,
        read_len=read_length(max(starts) + count, cache.max_seq_len),
    )
    for row in rows:
        cache.lengths[row] += count
    return hidden


def _head(backbone: DeepseekV41Model, hidden: Tensor) -> Tensor:
    """Logits [b, t, vocab] fp32 of hidden [b, t, d], of which there may be none."""
    if not hidden.numel():
        return hidden.new_empty(*hidden.shape[:2], backbone.config.vocab_size, dtype=torch.float32)
    logits = backbone.logits(hidden)
    check_finite(logits)
    return logits
