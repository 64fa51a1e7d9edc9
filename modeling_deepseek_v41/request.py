# SPDX-License-Identifier: Apache-2.0
"""What goes into the engine and what comes out of it."""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Literal

from .config import ModelConfig
from .dspark.statistics import SpeculationStats
from .errors import RequestError
from .sampling import SamplingOptions

FinishReason = Literal["stop", "stop_string", "length", "cancelled"]
"""stop: an end-of-sequence or stop token; length: max_new_tokens or max_seq_len reached."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to continue it. Raises RequestError for a value that no model could serve.

    prompt: token ids. max_new_tokens: None goes on until the model's max_seq_len. stop_strings: the text ends before the
    first of them that is completed. stop_token_ids: end the text as the configuration's eos_token_ids do, which count too
    unless ``ignore_eos``. logprobs: for every new token its log-probability and those of this many most probable tokens,
    under the model's own distribution: temperature 1, before top-k and top-p; None leaves them out.
    """

    prompt: Sequence[int]
    max_new_tokens: int | None = None
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids("prompt", self.prompt))
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        _check_count("max_new_tokens", self.max_new_tokens, 1)
        _check_count("logprobs", self.logprobs, 0)
        if not isinstance(self.sampling, SamplingOptions):
            raise RequestError(f"sampling: expected SamplingOptions, found {self.sampling!r}")
        object.__setattr__(self, "stop_strings", _texts("stop_strings", self.stop_strings))


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """One generated token under the model's own distribution (temperature 1, before top-k and top-p), in nats."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most probable tokens, best first; the generated one may be among them."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What one step added to one request.

    text: what is certain to be part of the result; text that may still turn out to be half a character or the beginning
    of a stop string comes with a later event. "" without a tokenizer. finish_reason: None while the request goes on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one request; other requests may have had their share of them."""

    queue: float
    """From ``add`` to the beginning of the prompt."""
    prefill: float
    """From there to the first new token."""
    decode: float
    """From there to the last."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request. ``token_ids`` has every generated token, the stop token included; ``text`` ends before it.

    text: None without a tokenizer. Special tokens other than the stop token appear in it under their names.
    """

    request_id: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    timings: Timings = dataclasses.field(compare=False)
    speculation: SpeculationStats | None = dataclasses.field(default=None, compare=False)
    """What speculation did for this request; None where the engine does not speculate."""


def check_request(request: Request, config: ModelConfig, max_seq_len: int, has_tokenizer: bool) -> int:
    """The most new tokens that ``request`` may have; raises RequestError where this model cannot serve it."""
    prompt, vocab = request.prompt, config.vocab_size
    check_prompt(prompt, config)
    if request.stop_strings and not has_tokenizer:
        raise RequestError("stop_strings: need a tokenizer; give one to the engine, or use stop_token_ids")
    for token in request.stop_token_ids:
        if not 0 <= token < vocab:
            raise RequestError(f"stop_token_ids: expected ids from 0 to {vocab - 1}, found {token}")
    if request.logprobs is not None and request.logprobs > vocab:
        raise RequestError(f"logprobs: expected at most the vocabulary's {vocab} tokens, found {request.logprobs}")
    room = max_seq_len - len(prompt)
    wanted = 1 if request.max_new_tokens is None else request.max_new_tokens
    if wanted > room:
        raise RequestError(
            f"prompt: {len(prompt)} tokens and max_new_tokens {wanted} make {len(prompt) + wanted} positions, max_seq_len is"
            f" {max_seq_len}; shorten the prompt, lower max_new_tokens, or load the model with a larger max_seq_len"
            f" (this checkpoint allows {config.max_position_embeddings})"
        )
    return room if request.max_new_tokens is None else wanted


def check_prompt(prompt: Sequence[int], config: ModelConfig) -> None:
    """Raises RequestError where ``prompt`` is empty or holds a token that a text run cannot read."""
    if not prompt:
        raise RequestError("prompt: is empty; give at least one token (a beginning-of-sequence token counts)")
    for place, token in enumerate(prompt):
        if not 0 <= token < config.vocab_size:
            raise RequestError(f"prompt: token {place}: expected an id from 0 to {config.vocab_size - 1}, found {token}")
        if config.has_vision and token == config.image_token_id:
            raise RequestError(
                f"prompt: token {place} is the image token {token}: image tokens are not supported in a text run"
            )


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """``values`` as a tuple of Python integers; raises RequestError that names ``name`` where one is no integer."""
    try:
        items = tuple(values)
        if isinstance(values, bytes) or any(isinstance(item, bool) for item in items):
            raise TypeError
        return tuple(operator.index(item) for item in items)
    except TypeError:
        raise RequestError(f"{name}: expected a list of token ids, found {_shortened(values)}") from None


def _texts(name: str, values: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) and value for value in values):
        raise RequestError(f"{name}: expected a list of texts that are not empty, found {_shortened(values)}")
    return tuple(values)


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise RequestError(f"{name}: expected an integer of {least} or more, or None, found {value!r}")


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
