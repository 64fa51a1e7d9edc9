# SPDX-License-Identifier: Apache-2.0
"""A model together with the state of its slots: the calls that an engine is made of."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .buckets import PREFILL_BUCKETS, next_chunk, prefill_buckets, read_length
from .dspark.choice import Choice
from .dspark.step import Proposer, Step, read_prompt, speculative_step
from .errors import DeepseekV41Error, RequestError
from .model import DeepseekV41Model
from .state import allocate

HEAD_ROWS = 64
"""Positions whose logits are made at a time where a prompt's are all wanted: bounds the memory to 64 vocabularies."""


class Runner:
    """Runs ``model`` on ``slots`` sequences. State is allocated once and never cleared: reading goes by position.

    Positions belong to the caller: a slot is taken over by starting at position 0 again, rows that were written and are
    not wanted are overwritten by the next call at their positions. ``drafter``: sees every call, for ``speculate``.
    """

    def __init__(
        self,
        model: DeepseekV41Model,
        slots: int,
        buckets: Sequence[int] = PREFILL_BUCKETS,
        drafter: Proposer | None = None,
    ) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise RequestError(f"max_batch: expected an integer of 1 or more, found {slots!r}")
        self.model, self.slots, self.drafter = model, slots, drafter
        self.buckets = prefill_buckets(model.max_seq_len, buckets)
        try:
            self._state = allocate(model.state_spec(slots))
        except RuntimeError as error:
            raise RequestError(
                f"max_batch {slots} and max_seq_len {model.max_seq_len}: their state does not fit into"
                f" memory ({error}); lower one of them"
            ) from None
        self._rank = model.parallel.rank_tensor()

    @torch.inference_mode()
    def call(self, ids: Tensor, start: Sequence[int], length: Sequence[int], slot: Sequence[int]) -> Tensor:
        """One forward of ids [B, T] int64, row b at position ``start[b]`` of ``slot[b]`` with ``length[b]`` real tokens.

        Returns hidden [B, T, d]; rows of padding are meaningless.
        """
        where, read = self._where(start, length, slot)
        return read_prompt(self.model, self.drafter, ids, *where, self._rank, *self._state, read_len=read)[0]

    @torch.inference_mode()
    def speculate(
        self,
        tokens: Sequence[int],
        start: Sequence[int],
        length: Sequence[int],
        slot: Sequence[int],
        num_draft_tokens: int,
        choice: Choice | None = None,
        uniforms: Tensor | None = None,
        sampled_drafts: bool = False,
    ) -> Step:
        """One speculative step: row b's newest token stands at ``start[b]`` of ``slot[b]``, at most ``length[b]`` follow.

        As ``dspark.step.speculative_step``; raises DeepseekV41Error where logits are no distribution.
        """
        assert self.drafter is not None
        where, read = self._where(start, length, slot)
        step, _ = speculative_step(
            self.model, self.drafter, torch.tensor(tokens), *where, self._rank, self._state, read_len=read,
            num_draft_tokens=num_draft_tokens, choice=choice, uniforms=uniforms, sampled_drafts=sampled_drafts,
        )  # fmt: skip
        for row, count in enumerate(length):
            check_finite(step.logits[row, :count])
        return step

    def _where(
        self, start: Sequence[int], length: Sequence[int], slot: Sequence[int]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        """``start``, ``length`` and ``slot`` as tensors, and the read length of their call."""
        end = max(first + count for first, count in zip(start, length, strict=True))
        first, count, place = (torch.tensor(values, dtype=torch.int64) for values in (start, length, slot))
        return (first, count, place), read_length(end, self.model.max_seq_len)

    def prefill(self, prompt: Sequence[int], start: int, slot: int) -> Tensor:
        """The next chunk of ``prompt``, from position ``start`` on: hidden [1, n, d] of its n real tokens.

        A sequence runs by itself, padded to its bucket, so its numbers do not depend on what else the slots hold.
        """
        tokens, padded = next_chunk(start, len(prompt), self.buckets)
        ids = torch.zeros(1, padded, dtype=torch.int64)
        ids[0, :tokens] = torch.tensor(prompt[start : start + tokens])
        return self.call(ids, [start], [tokens], [slot])[:, :tokens]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, d] to logits [B, T, vocab] fp32; raises DeepseekV41Error where they are no distribution."""
        logits = self.model.logits(hidden)
        check_finite(logits)
        return logits

    def prompt_logits(self, prompt: Sequence[int], slot: int, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Runs ``prompt`` from position 0 and yields (position, logits [n, vocab] fp32) from position ``first`` on.

        At most HEAD_ROWS positions at a time, in order, so that a long prompt needs little memory.
        """
        start = 0
        while start < len(prompt):
            hidden = self.prefill(prompt, start, slot)
            end = start + hidden.shape[1]
            for position in range(max(start, first), end, HEAD_ROWS):
                yield position, self.logits(hidden[:, position - start : position - start + HEAD_ROWS])[0]
            start = end


def check_finite(logits: Tensor) -> None:
    """Raises DeepseekV41Error where a row of logits [..., vocab] is no distribution."""
    if not logits.amax(-1).isfinite().all():
        raise DeepseekV41Error(
            "the model's logits are not finite (NaN, or infinite in every column): its weights do not fit its"
            " configuration or arithmetic; 'deepseek-v41 inspect' shows the checkpoint, numerics fp32 has the widest range"
        )
