# SPDX-License-Identifier: Apache-2.0
"""How probable a model finds a text: log-likelihoods of texts and of continuations, in nats."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from .config import ModelConfig
from .errors import RequestError
from .model import DeepseekV41Model
from .request import check_prompt, token_ids
from .runner import Runner
from .sampling import greedy, log_probabilities
from .text import TextTokenizer


@dataclasses.dataclass(frozen=True)
class ContinuationScore:
    """Log-probabilities of a continuation's tokens, each given all before it."""

    logprobs: tuple[float, ...]
    is_greedy: bool
    """Whether greedy decoding would have given exactly this continuation."""

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


@dataclasses.dataclass(frozen=True)
class TextScore:
    """One text's tokens and their log-probabilities, each given the start token and all before it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """The log-probability of the whole text."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability per token; infinite beyond what a float holds."""
        mean = -self.total / len(self.logprobs)
        return math.exp(mean) if mean < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits to encode the text with this model, per byte of its UTF-8 form: comparable between tokenizers."""
        return -self.total / math.log(2) / len(self.text.encode("utf-8"))


class Scorer:
    """Scores texts one after another on ``model``; a text may have as many tokens as the model's max_seq_len."""

    def __init__(self, model: DeepseekV41Model, tokenizer: TextTokenizer | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._runner = Runner(model, slots=1)

    def text(self, text: str) -> TextScore:
        """The log-likelihood of ``text`` after a start token (``text_tokens``); raises RequestError where it has none."""
        if self.tokenizer is None:
            raise RequestError("text: needs a tokenizer; give one to the scorer, or score token ids with 'continuation'")
        start, ids = text_tokens(text, self.tokenizer, self.model.config, self.model.max_seq_len)
        return TextScore(text, ids, self.continuation([start], ids).logprobs)

    @torch.inference_mode()
    def continuation(self, context: Sequence[int], continuation: Sequence[int]) -> ContinuationScore:
        """The log-likelihood of the token ids ``continuation`` after ``context``, both not empty.

        What lm-eval's ``loglikelihood`` asks for is (``total``, ``is_greedy``). Raises RequestError with the numbers where
        the tokens do not fit into max_seq_len.
        """
        before, after = token_ids("context", context), token_ids("continuation", continuation)
        _check(before, after, self.model.config, self.model.max_seq_len)
        whole = before + after
        logprobs: list[float] = []
        is_greedy = True
        for position, logits in self._runner.prompt_logits(whole[:-1], slot=0, first=len(before) - 1):
            targets = torch.tensor(whole[position + 1 : position + 1 + logits.shape[0]])
            chosen = log_probabilities(logits).gather(-1, targets.unsqueeze(-1))
            logprobs += chosen.squeeze(-1).tolist()
            is_greedy = is_greedy and bool((greedy(logits) == targets).all())
        return ContinuationScore(tuple(logprobs), is_greedy)


def text_tokens(text: str, tokenizer: TextTokenizer, config: ModelConfig, max_seq_len: int) -> tuple[int, tuple[int, ...]]:
    """The start token and the ids of ``text``: bos_token_id, or the first of eos_token_id in a model without.

    Raises RequestError for an empty text, one that max_seq_len has no room for, or a model that has neither token.
    """
    starts = [token for token in (config.bos_token_id, *config.eos_token_ids) if token is not None]
    if not starts:
        raise RequestError(
            f"text: {config.source} has neither bos_token_id nor eos_token_id, so a text's first token has nothing before"
            " it; score token ids with 'continuation'"
        )
    ids = tuple(tokenizer.encode(text, bos=False))
    if not ids:
        raise RequestError("text: is empty; give at least one character")
    _check(tuple(starts[:1]), ids, config, max_seq_len)
    return starts[0], ids


def _check(context: tuple[int, ...], continuation: tuple[int, ...], config: ModelConfig, max_seq_len: int) -> None:
    if not continuation:
        raise RequestError("continuation: is empty; give at least one token")
    if not context:
        raise RequestError("context: is empty; a model's first prediction needs a token before it, such as bos_token_id")
    check_prompt(context + continuation, config)
    positions = len(context) + len(continuation) - 1
    if positions > max_seq_len:
        raise RequestError(
            f"text: {positions + 1} tokens (context {len(context)}, scored {len(continuation)}) need {positions} positions,"
            f" max_seq_len is {max_seq_len}; load the model with a larger max_seq_len (this checkpoint allows"
            f" {config.max_position_embeddings}) or score the text in parts"
        )
