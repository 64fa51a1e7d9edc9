# SPDX-License-Identifier: Apache-2.0
"""Continuous batching on the CPU: requests come, share the model step by step, and go."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .buckets import PREFILL_BUCKETS
from .dspark.choice import Choice
from .dspark.options import Speculation
from .dspark.statistics import SpeculationStats
from .errors import RequestError
from .generation import Generation
from .model import DeepseekV41Model
from .progress import Progress
from .request import Completion, Event, Request, TokenLogprobs, check_request
from .runner import Runner
from .sampling import greedy, log_probabilities, sample
from .text import TextTokenizer
from .topk import top_positions


@dataclasses.dataclass
class Stats:
    """What an engine has done so far. Tokens of prefill are prompt tokens, tokens of decode the new ones after the first.

    speculation: None where the engine does not speculate.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    speculation: SpeculationStats | None = None


class NewTokens(NamedTuple):
    """What one step gives for one request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    confidence: list[float] | None = None
    """Raw, of the drafts that were verified; None where there were none."""


class Engine:
    """Runs up to ``max_batch`` requests at a time on ``model``; more of them wait for a slot, first come, first served.

    ``tokenizer`` gives results their text and makes stop strings possible. ``prefill_buckets``: the lengths that prompts
    are padded to; a prompt longer than the last runs in chunks of it, one per step, so that others go on in between.
    ``progress`` shows a bar on stderr while such a prompt is read. A request's result does not depend on which others
    run beside it. ``speculation``: a drafter proposes several tokens per step and the model verifies them; greedy texts
    are the same with and without it, sampled ones have the same distribution. Not thread-safe.

    A step that raises leaves the engine as it was, so it can be repeated, or the request be cancelled.
    """

    def __init__(
        self,
        model: DeepseekV41Model,
        tokenizer: TextTokenizer | None = None,
        *,
        max_batch: int = 4,
        prefill_buckets: Sequence[int] = PREFILL_BUCKETS,
        progress: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self.model, self.tokenizer, self.stats, self.speculation = model, tokenizer, Stats(), speculation
        self._block, drafter = 0, None
        if speculation is not None:
            self._block, drafter = speculation.block(model.config), speculation.proposer(model)
            self.stats.speculation = SpeculationStats(self._block)
        self.runner = Runner(model, max_batch, prefill_buckets, drafter)
        self._show_progress = progress
        self._bar: Progress | None = None
        self._waiting: deque[Generation] = deque()
        self._reading: deque[Generation] = deque()
        self._decoding: list[Generation] = []
        self._free = list(range(max_batch))
        self._events: list[Event] = []
        self._finished: dict[int, Completion] = {}
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether a step has something to do or to tell."""
        return bool(self._waiting or self._reading or self._decoding or self._events)

    def check(self, request: Request) -> int:
        """The most new tokens that ``request`` would get; raises RequestError where this model cannot serve it."""
        if not isinstance(request, Request):
            raise RequestError(f"request: expected a Request, found {type(request).__name__}")
        return check_request(request, self.model.config, self.model.max_seq_len, self.tokenizer is not None)

    def add(self, request: Request) -> int:
        """Takes ``request`` in and returns its id; raises RequestError where this model cannot serve it."""
        limit = self.check(request)
        eos = () if request.ignore_eos else self.model.config.eos_token_ids
        decode = self.tokenizer.decode if self.tokenizer else None
        stops = frozenset((*eos, *request.stop_token_ids))
        generation = Generation(self._next_id, request, limit, stops, decode, self._block)
        self._next_id += 1
        self._waiting.append(generation)
        return generation.request_id

    def step(self) -> list[Event]:
        """One new token (with speculation: one or more) for every request that decodes, then one chunk of the oldest prompt.

        Returns what is new, in the order of the requests' ids; [] where nothing is new or there is nothing to do.
        """
        while self._waiting and self._free:
            generation = self._waiting.popleft()
            generation.admit(self._free.pop(0))
            self._reading.append(generation)
        if self._decoding:
            self._decode()
        if self._reading:
            self._read_chunk(self._reading[0])
        events, self._events = self._events, []
        return sorted(events, key=lambda event: event.request_id)

    def cancel(self, request_id: int) -> bool:
        """Ends a request where it is; the next step tells so. False where it had ended already; its slot is free at once."""
        for generation in (*self._waiting, *self._reading, *self._decoding):
            if generation.request_id == request_id:
                self._finish(generation, generation.cancel())
                return True
        if request_id in range(self._next_id):
            return False
        raise RequestError(f"request id: {request_id!r} was never given out")

    def take(self, request_id: int) -> Completion:
        """Hands over a finished request and forgets it; raises RequestError where there is none of that id."""
        if request_id not in self._finished:
            raise RequestError(f"request id: {request_id!r} is not finished, or its result was taken before")
        return self._finished.pop(request_id)

    def run(self) -> dict[int, Completion]:
        """Steps until nothing is left to do and hands over all finished requests by id."""
        while self.busy:
            self.step()
        finished, self._finished = self._finished, {}
        return finished

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Adds ``requests``, steps until they are finished, and hands them over in their order.

        All are checked before the first is added. Other requests of the engine go on meanwhile; their results are kept,
        their events are not. What interrupts it cancels those of ``requests`` that are not finished.
        """
        requests = list(requests)
        for request in requests:
            self.check(request)
        ids = [self.add(request) for request in requests]
        try:
            while any(request_id not in self._finished for request_id in ids):
                self.step()
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
                self._finished.pop(request_id, None)
            raise
        return [self.take(request_id) for request_id in ids]

    def _decode(self) -> None:
        began = time.perf_counter()
        rows = list(self._decoding)
        new = self._speculate(rows) if self.speculation is not None else self._decode_one(rows)
        self.stats.decode_seconds += time.perf_counter() - began
        self.stats.decode_steps += 1
        for row, found in zip(rows, new, strict=True):
            self.stats.decode_tokens += self._advance(row, found)

    def _decode_one(self, rows: Sequence[Generation]) -> list[NewTokens]:
        """The next token of every row."""
        ids = torch.tensor([[row.tokens[-1]] for row in rows])
        hidden = self.runner.call(ids, [row.position for row in rows], [1] * len(rows), [row.slot for row in rows])
        return self._choose(rows, self.runner.logits(hidden)[:, 0])

    def _speculate(self, rows: Sequence[Generation]) -> list[NewTokens]:
        """What one speculative step gives for every row: accepted drafts and one token more."""
        assert self.speculation is not None
        verified = [min(self._block + 1, row.limit - len(row.tokens)) for row in rows]
        choice, uniforms = _choice(rows, 2 * self._block + 1)
        step = self.runner.speculate(
            [row.tokens[-1] for row in rows], [row.position for row in rows], verified, [row.slot for row in rows],
            self._block, choice, uniforms, self.speculation.sampled_drafts,
        )  # fmt: skip
        new = []
        for place, row in enumerate(rows):
            tokens = step.tokens[place, : step.counts[place]].tolist()
            confidence = step.drafts.confidence[place, : verified[place] - 1].tolist()
            new.append(NewTokens(tokens, _logprobs(row, step.logits[place, : len(tokens)], tokens), confidence))
        return new

    def _read_chunk(self, row: Generation) -> None:
        began = time.perf_counter()
        prompt = row.request.prompt
        hidden = self.runner.prefill(prompt, row.prefilled, row.slot)
        done = row.prefilled + hidden.shape[1]
        new = self._choose([row], self.runner.logits(hidden[:, -1:])[:, 0]) if done == len(prompt) else []
        self.stats.prefill_seconds += time.perf_counter() - began
        self.stats.prefill_tokens += hidden.shape[1]
        row.prefilled = done
        self._show(row, hidden.shape[1])
        for found in new:
            self._reading.remove(row)
            self._decoding.append(row)
            self._advance(row, found)

    @torch.inference_mode()
    def _choose(self, rows: Sequence[Generation], logits: Tensor) -> list[NewTokens]:
        """A token for every row of logits [B, vocab]."""
        choice, uniforms = _choice(rows, 1)
        ids = greedy(logits) if choice is None else sample(logits, *choice, uniforms[:, 0])
        return [
            NewTokens([token], _logprobs(row, row_logits.unsqueeze(0), [token]))
            for row, token, row_logits in zip(rows, ids.tolist(), logits, strict=True)
        ]

    def _advance(self, row: Generation, new: NewTokens) -> int:
        """Gives ``row`` its new tokens; how many of them it took."""
        event = row.advance(new.tokens, new.logprobs, new.confidence)
        if self.stats.speculation is not None and new.confidence is not None:
            self.stats.speculation.record(new.confidence, len(new.tokens), len(event.token_ids))
        if row.finish_reason:
            self._finish(row, event)
        else:
            self._events.append(event)
        return len(event.token_ids)

    def _finish(self, row: Generation, event: Event) -> None:
        for group in (self._waiting, self._reading, self._decoding):
            if row in group:
                group.remove(row)
        if row.slot >= 0:
            self._free.append(row.slot)
        if row.prefilled < len(row.request.prompt) and row.prefilled > 0:
            self._close_bar()
        self._finished[row.request_id] = row.completion()
        self._events.append(event)

    def _show(self, row: Generation, tokens: int) -> None:
        """Moves the bar of a prompt of several chunks; one prompt is read at a time."""
        total = len(row.request.prompt)
        if not self._show_progress or total <= self.runner.buckets[-1]:
            return
        if self._bar is None:
            self._bar = Progress(total, "tokens", f"reading prompt {row.request_id}")
        self._bar.update(tokens)
        if row.prefilled == total:
            self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _choice(rows: Sequence[Generation], count: int) -> tuple[Choice | None, Tensor]:
    """The sampling options of ``rows``, None where all are greedy, and ``count`` random numbers of every row [B, count].

    A greedy row's are zeros: it takes none from its source.
    """
    options = [row.request.sampling for row in rows]
    zeros = torch.zeros(count, dtype=torch.float64)
    uniforms = torch.stack([zeros if row.request.sampling.is_greedy else row.uniforms(count) for row in rows])
    if all(option.is_greedy for option in options):
        return None, uniforms
    restricted = any(option.top_k or option.top_p < 1 for option in options)
    return Choice(
        torch.tensor([option.temperature for option in options], dtype=torch.float64),
        torch.tensor([option.top_k for option in options]) if restricted else None,
        torch.tensor([option.top_p for option in options], dtype=torch.float64) if restricted else None,
    ), uniforms


def _logprobs(row: Generation, logits: Tensor, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """What ``row`` wants to know of its new ``tokens`` [n], chosen from logits [n, vocab] fp32; [] where nothing."""
    wanted = row.request.logprobs
    if wanted is None:
        return []
    found = []
    for token, own, logprobs in zip(tokens, logits, log_probabilities(logits), strict=True):
        best = top_positions(own, wanted) if wanted else torch.empty(0, dtype=torch.int64)
        pairs = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
        found.append(TokenLogprobs(token, logprobs[token].item(), pairs))
    return found
