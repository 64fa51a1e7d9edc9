# SPDX-License-Identifier: Apache-2.0
"""One request on its way through the engine."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .dspark.statistics import SpeculationStats
from .request import Completion, Event, FinishReason, Request, Timings, TokenLogprobs
from .text_stream import TextStream


class Generation:
    """The tokens, the text and the random numbers of one request; knows when to stop.

    limit: the most new tokens. stop_ids: token ids that end the text. decode: ids to text, None without a tokenizer.
    num_draft_tokens: drafts per step, 0 without speculation.
    """

    def __init__(
        self,
        request_id: int,
        request: Request,
        limit: int,
        stop_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str] | None,
        num_draft_tokens: int = 0,
    ) -> None:
        self.request_id, self.request, self.limit = request_id, request, limit
        self.slot = -1
        self.prefilled = 0
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_ids = stop_ids
        self._stream = TextStream(decode, request.stop_strings) if decode else None
        self._speculation = SpeculationStats(num_draft_tokens) if num_draft_tokens else None
        self._generator = request.sampling.generator()
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._added = self._admitted = self._first = self._last = time.perf_counter()

    @property
    def position(self) -> int:
        """The position of the newest token, which is the next one to run."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def admit(self, slot: int) -> None:
        """Gives the request its slot."""
        self.slot = slot
        self._admitted = self._first = self._last = time.perf_counter()

    def uniforms(self, count: int) -> Tensor:
        """The next random numbers in [0, 1) of this request, with 53 bits: [count] fp64."""
        return torch.rand(count, dtype=torch.float64, generator=self._generator)

    def advance(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], confidence: Sequence[float] | None = None
    ) -> Event:
        """Takes new tokens, up to the one that ends the request; ``logprobs`` has one entry per token, or none.

        ``confidence``: of the drafts that the step verified, None where it was none of speculation. The event has the
        tokens that were taken. What comes after the end is not part of the result.
        """
        before, text = len(self.tokens), ""
        for token in tokens:
            self.tokens.append(token)
            self._last = time.perf_counter()
            if len(self.tokens) == 1:
                self._first = self._last
            if token in self._stop_ids:
                self.finish_reason = "stop"
            else:
                text += self._stream.push(token) if self._stream else ""
                if self._stream and self._stream.stopped:
                    self.finish_reason = "stop_string"
                elif len(self.tokens) == self.limit:
                    self.finish_reason = "length"
            if self.finish_reason:
                break
        taken = self.tokens[before:]
        self._logprobs += logprobs[: len(taken)]
        if self._speculation and confidence is not None:
            self._speculation.record(confidence, len(tokens), len(taken))
        return self._event(taken, text)

    def cancel(self) -> Event:
        """Ends the request where it is."""
        self.finish_reason = "cancelled"
        self._last = time.perf_counter()
        if not self.tokens:
            self._first = self._last
        if self.slot < 0:
            self._admitted = self._last
        return self._event([], "")

    def completion(self) -> Completion:
        """The finished request."""
        assert self.finish_reason
        return Completion(
            request_id=self.request_id,
            prompt=tuple(self.request.prompt),
            token_ids=tuple(self.tokens),
            text="".join(self._text) if self._stream else None,
            logprobs=None if self.request.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            timings=Timings(self._admitted - self._added, self._first - self._admitted, self._last - self._first),
            speculation=self._speculation,
        )

    def _event(self, taken: Sequence[int], text: str) -> Event:
        if self.finish_reason and self._stream:
            text += self._stream.close()
        self._text.append(text)
        logprobs = None if self.request.logprobs is None else tuple(self._logprobs[len(self._logprobs) - len(taken) :])
        return Event(self.request_id, tuple(taken), text, logprobs, self.finish_reason)
