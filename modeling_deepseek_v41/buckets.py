# SPDX-License-Identifier: Apache-2.0
"""The static shapes of calls: how many tokens a prompt's chunk is padded to, and how far a call reads.

Graphs are made per shape, so there are few: a chunk of a prompt has one of the bucket lengths, and the read length is a
power of two.
"""

from collections.abc import Sequence

from .errors import RequestError

PREFILL_BUCKETS = (16, 64, 256, 512)
"""Tokens of one prefill call; a prompt longer than the last runs in chunks of that length."""

LEAST_READ = 512
"""The shortest read length: shorter ones save nothing, groups are read in whole tiles."""


def prefill_buckets(max_seq_len: int, sizes: Sequence[int] = PREFILL_BUCKETS) -> tuple[int, ...]:
    """Ascending chunk lengths for a model of ``max_seq_len`` positions: ``sizes``, capped; raises RequestError."""
    good = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not sizes or not good:
        raise RequestError(f"prefill_buckets: expected a list of token counts above 0, found {list(sizes)!r}")
    return tuple(sorted({min(size, max_seq_len) for size in sizes}))


def next_chunk(start: int, end: int, buckets: Sequence[int]) -> tuple[int, int]:
    """(real tokens, padded tokens) of the chunk that starts at position ``start`` of a prompt of ``end`` tokens."""
    tokens = min(end - start, buckets[-1])
    return tokens, next(bucket for bucket in buckets if bucket >= tokens)


def read_length(end: int, max_seq_len: int) -> int:
    """The read length of a call whose last position is ``end`` - 1: a power of two from 512 on, at most ``max_seq_len``."""
    return min(max(LEAST_READ, 1 << (end - 1).bit_length()), max_seq_len)
