# SPDX-License-Identifier: Apache-2.0
"""From a caller's batch to graph calls: rows in groups of the compiled batch, prompts in chunks, shapes of the buckets.

Plain tensors: needs no NxDI.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import RequestError


class Batch(NamedTuple):
    """Rows of one kind of call, in NxDI's first five inputs."""

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    seq_ids: Tensor
    sampling_params: Tensor


class PromptChunk(NamedTuple):
    """One graph call of a prompt."""

    inputs: Batch
    ends: Tensor
    """[B] bool: rows whose prompt ends here, so that their results count."""


def groups(batch: Batch, size: int) -> Iterator[tuple[Batch, int]]:
    """The rows of ``batch`` in groups of ``size``, the last one filled up with inactive rows, and how many are real."""
    rows = batch.input_ids.shape[0]
    for first in range(0, rows, size):
        part = Batch(*(tensor[first : first + size] for tensor in batch))
        real = part.input_ids.shape[0]
        yield _filled(part, size - real), real


def _filled(part: Batch, missing: int) -> Batch:
    """``part`` with ``missing`` inactive rows behind it: no token is real, and the sequence id is -1."""
    if missing == 0:
        return part
    ids, mask, positions, slots, sampling = part
    return Batch(
        F.pad(ids, (0, 0, 0, missing)), F.pad(mask, (0, 0, 0, missing)), F.pad(positions, (0, 0, 0, missing)),
        F.pad(slots, (0, missing), value=-1), torch.cat([sampling, sampling[:1].expand(missing, -1)]),
    )  # fmt: skip


def prompt_chunks(batch: Batch, buckets: Sequence[int], seq_len: int) -> Iterator[PromptChunk]:
    """A batch of prompts as graph calls: one padded to a bucket, or several of the largest one, which alone reads earlier ones.

    Raises RequestError for prompts that are empty, too long, padded on the left or that begin behind position 0.
    """
    lengths = batch.attention_mask.long().sum(1)
    longest = int(lengths.max())
    _check_prompts(batch, lengths, seq_len)
    largest = buckets[-1]
    width = largest if longest > largest else next(size for size in buckets if size >= longest)
    for first in range(0, longest, width):
        here = (lengths - first).clamp(0, width)
        active = here > 0
        columns = torch.arange(width, dtype=torch.int32)
        ids = batch.input_ids[:, first : first + width]
        inputs = Batch(
            F.pad(ids, (0, width - ids.shape[1])), (columns < here.unsqueeze(1)).to(torch.int32),
            (columns + first).expand(ids.shape[0], -1), torch.where(active, batch.seq_ids, -1), batch.sampling_params,
        )  # fmt: skip
        yield PromptChunk(inputs, active & (lengths <= first + width))


def _check_prompts(batch: Batch, lengths: Tensor, seq_len: int) -> None:
    active = batch.seq_ids >= 0
    for row in active.nonzero().flatten().tolist():
        length = int(lengths[row])
        if not 1 <= length <= seq_len:
            raise RequestError(f"prompt of row {row}: {length} tokens, expected 1 to seq_len {seq_len}")
        if not bool(batch.attention_mask[row, :length].all()):
            raise RequestError(f"attention_mask of row {row}: real tokens must come first; pad on the right")
        if int(batch.position_ids[row, 0]) != 0:
            raise RequestError(f"position_ids of row {row}: a prompt begins at position 0")


def step_inputs(batch: Batch, buckets: Sequence[int], tokens: int) -> Batch:
    """A decoding step of ``tokens`` positions per row, its mask in the shape of the smallest bucket that holds them all.

    Near the end of the largest bucket fewer positions are left than ``tokens``; the graph keeps to them. Raises RequestError
    where none is left.
    """
    position = torch.minimum(batch.position_ids[:, 0], batch.attention_mask.sum(1))
    at = int(position.masked_fill(batch.seq_ids < 0, 0).max())
    if at >= buckets[-1]:
        raise RequestError(f"position {at}: expected less than max_length {buckets[-1]}; the sequence is full")
    width = next((size for size in buckets if size >= at + tokens), buckets[-1])
    mask = (torch.arange(width) < position.unsqueeze(1)).to(torch.int32)
    return batch._replace(attention_mask=mask, position_ids=position.unsqueeze(1).to(torch.int32))


def check_slots(seq_ids: Tensor, slots: int) -> None:
    """Raises RequestError where a sequence id has no state or two active rows share one."""
    active = seq_ids[seq_ids >= 0]
    if active.numel() and int(active.max()) >= slots:
        raise RequestError(f"seq_ids: found {int(active.max())}, expected less than kv_cache_batch_size {slots}")
    if active.unique().numel() != active.numel():
        raise RequestError(f"seq_ids: expected different ids in the rows of a batch, found {seq_ids.tolist()}")


def merge(parts: Sequence[list[Tensor]], ends: Sequence[Tensor]) -> list[Tensor]:
    """The results of a prompt's graph calls, every row's from the call in which its prompt ends."""
    merged = parts[0]
    for part, ended in zip(parts[1:], ends[1:], strict=True):
        merged = [torch.where(ended.view(-1, *[1] * (new.dim() - 1)), new, old) for old, new in zip(merged, part, strict=True)]
    return merged
