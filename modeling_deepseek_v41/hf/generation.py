# SPDX-License-Identifier: Apache-2.0
"""``generate``: transformers prepares the call, processors and criteria; the decoding loop is this package's own.

The loop keeps rows apart. A row's real tokens are what the model sees, wherever the padding stands, and a row that has
ended costs nothing more. It uses only what transformers hands to any decoding loop, so its versions do not matter.
"""

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..dspark.options import Speculation
from ..dspark.statistics import SpeculationStats
from ..errors import RequestError
from ..model import DeepseekV41Model
from .advance import last_logits
from .batch import check_ids, check_images, check_mask, spans
from .cache import CACHE_FIELD, DeepseekV41Cache
from .options import check_inputs, refused_input
from .speculation import Lookahead

_LOOP_INPUTS = {"attention_mask", "cache", "input_ids", "logits_to_keep", "past_key_values", "use_cache"}
_DRAFT_TOKENS = "num_draft_tokens"


_OTHER_MODES = (
    "assistant_early_exit", "constraints", "dola_layers", "force_words_ids", "penalty_alpha", "prompt_lookup_num_tokens",
    "use_mtp",
)  # fmt: skip


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with what speculation did."""

    speculation: SpeculationStats | None = None


class RowGenerationMixin(GenerationMixin):
    """Greedy and sampled decoding for a model whose backbone is ``self.model``."""

    model: DeepseekV41Model

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        speculative: bool = False,
        num_draft_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """As GenerationMixin.generate, for greedy decoding and sampling.

        Prompts may be padded left or right; the prompt's columns come back as they were given and new tokens stand behind
        them. (transformers warns of right padding; here it is served: every row gives what it gives alone.) Refused by
        name with RequestError: beam search, assisted and contrastive decoding, other caches, inputs other than token ids,
        requests that need more than max_seq_len positions.

        ``speculative``: the model's DSpark drafter (``from_pretrained(..., drafter=True)``) proposes ``num_draft_tokens``
        at a time, 1 to dspark_block_size and by default all of it. The tokens, sampled ones too, are those that the same
        call gives without; with ``return_dict_in_generate`` the output has ``speculation``, a SpeculationStats.
        """
        if not isinstance(speculative, bool):
            raise RequestError(f"speculative: expected True or False, found {speculative!r}")
        if num_draft_tokens is not None and not speculative:
            raise RequestError(f"num_draft_tokens: found {num_draft_tokens!r} without speculative=True; give both or none")
        if speculative:
            kwargs[_DRAFT_TOKENS] = Speculation(num_draft_tokens).block(self.model.config)
            if self.model.drafter is None:
                raise RequestError("speculative: the model has no drafter; load it with from_pretrained(folder, drafter=True)")
            if kwargs.get("use_cache") is False:
                raise RequestError("use_cache: found False, but speculation lives on the cache; leave it out")
        check_inputs({name: value for name, value in kwargs.items() if refused_input(name)}, "generate")
        _check_cache_implementation(kwargs.get("cache_implementation"))
        return super().generate(inputs, generation_config, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: transformers' continuous batching needs its own paged cache."""
        raise RequestError("generate_batch: needs transformers' paged cache; use generate, or this package's engine")

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused, as ``generate_batch`` is."""
        self.generate_batch()

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict[str, Any]]:
        """transformers' merged options and the remaining inputs, all of which are checked here, before any work."""
        generation_config, inputs = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        setattr(generation_config, _DRAFT_TOKENS, inputs.pop(_DRAFT_TOKENS, 0))
        check_inputs({name: value for name, value in inputs.items() if name not in _LOOP_INPUTS}, "generate")
        _check_cache_implementation(generation_config.cache_implementation)
        beams = generation_config.num_beams or 1
        if beams > 1:
            raise RequestError(
                f"num_beams: found {beams}, expected 1; beam search is not available, use greedy decoding or do_sample=True"
                " with num_return_sequences"
            )
        mode = generation_config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            named = [name for name in _OTHER_MODES if getattr(generation_config, name, None)]
            raise RequestError(
                f"{', '.join(named) or 'generation_config'}: asks for {mode.value}, expected greedy decoding (do_sample=False)"
                " or sampling (do_sample=True); leave the option out"
            )
        return generation_config, inputs

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """The decoding loop makes its own cache."""

    def _sample(  # type: ignore[override]
        self,
        input_ids: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """The decoding loop: input_ids [B, S] to the sequences [B, S + new], or transformers' output object of them.

        Rows behind their end token get the padding token, and zeros as logits.
        """
        device = input_ids.device
        cache = given_cache(model_kwargs, len(input_ids))
        rows = self._prompt_rows(input_ids, model_kwargs.get("attention_mask"), cache)
        self._check_room(rows, generation_config.max_length - input_ids.shape[1])
        use_cache = model_kwargs.get("use_cache") is not False or cache is not None
        pads_ended_rows = any(hasattr(criteria, "eos_token_id") for criteria in stopping_criteria)
        padding = torch.as_tensor(generation_config._pad_token_tensor, device=device) if pads_ended_rows else None
        with_scores = generation_config.return_dict_in_generate and generation_config.output_scores
        with_logits = generation_config.return_dict_in_generate and generation_config.output_logits
        scores: tuple[Tensor, ...] | None = () if with_scores else None
        raw_logits: tuple[Tensor, ...] | None = () if with_logits else None
        unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=device)
        drafted = getattr(generation_config, _DRAFT_TOKENS)
        if drafted and cache is None:
            cache = DeepseekV41Cache(self.model, len(rows))
        ahead = Lookahead(self.model, cache, drafted) if drafted and cache is not None else None
        while bool(unfinished.any()):
            if cache is None or not use_cache:
                cache = DeepseekV41Cache(self.model, len(rows))
            running = unfinished.tolist() if pads_ended_rows else [True] * len(rows)
            if ahead is not None:
                logits = ahead.next_logits(rows, running, generation_config.max_length - input_ids.shape[1]).to(device)
            else:
                logits = last_logits(self.model, cache, rows, running).to(device)
            chances: Tensor = logits_processor(input_ids, logits.clone())
            if scores is not None:
                scores += (chances,)
            if raw_logits is not None:
                raw_logits += (logits,)
            if generation_config.do_sample:
                tokens = torch.multinomial(chances.softmax(-1), 1).squeeze(1)
            else:
                tokens = chances.argmax(-1)
            if padding is not None:
                tokens = torch.where(unfinished, tokens, padding)
            input_ids = torch.cat([input_ids, tokens[:, None]], 1)
            rows = [
                torch.cat([ids, token[None]]) if runs else ids for ids, token, runs in zip(rows, tokens, running, strict=True)
            ]
            if streamer is not None:
                streamer.put(tokens.cpu())
            unfinished = unfinished & ~stopping_criteria(input_ids, scores)
        if streamer is not None:
            streamer.end()
        if ahead is not None:
            ahead.close(rows)
        if not generation_config.return_dict_in_generate:
            return input_ids
        fields: dict[str, Any] = {"sequences": input_ids, "scores": scores, "logits": raw_logits}
        if use_cache and cache is not None:
            cache.columns = input_ids.shape[1] - 1
            fields[CACHE_FIELD] = cache
        return GenerateDecoderOnlyOutput(**fields) if ahead is None else SpeculativeOutput(**fields, speculation=ahead.stats)

    def _prompt_rows(self, input_ids: Tensor, attention_mask: Tensor | None, cache: DeepseekV41Cache | None) -> list[Tensor]:
        """Every row's real tokens [n]; a cache must hold fewer of them than there are."""
        ids = check_ids(input_ids, self.model.config)
        real = check_mask(attention_mask, ids)
        if cache is None:
            spans(real)
        rows = [row[columns] for row, columns in zip(ids, real, strict=True)]
        check_images(rows, self.model.config)
        for row, tokens in enumerate(rows):
            done = cache.lengths[row] if cache is not None else 0
            if len(tokens) <= done:
                raise RequestError(
                    f"input_ids: row {row} has {len(tokens)} tokens, of which the cache holds {done}; pass at least one token"
                    " to go on from, and with past_key_values the whole sequence so far"
                )
        return rows

    def _check_room(self, rows: list[Tensor], new: int) -> None:
        """Raises RequestError where a row and ``new`` tokens, of which the last is not taken in, need too many positions."""
        longest = max(range(len(rows)), key=lambda row: len(rows[row]))
        total, limit = len(rows[longest]) + new - 1, self.model.max_seq_len
        if total > limit:
            raise RequestError(
                f"max_new_tokens: row {longest} has {len(rows[longest])} tokens and {new} new ones need {total} positions,"
                f" max_seq_len is {limit}; ask for fewer or load the model with a larger max_seq_len"
            )


def given_cache(inputs: dict[str, Any], batch: int) -> DeepseekV41Cache | None:
    """The cache among ``inputs``, under its older or newer name; RequestError for another kind or number of rows."""
    cache = inputs.get("past_key_values") if inputs.get("past_key_values") is not None else inputs.get("cache")
    if cache is None:
        return None
    if not isinstance(cache, DeepseekV41Cache):
        raise RequestError(
            f"past_key_values: found {type(cache).__name__}, expected the DeepseekV41Cache of an earlier call; this model's"
            " state is not a list of keys and values"
        )
    if cache.batch_size != batch:
        raise RequestError(f"past_key_values: the cache holds {cache.batch_size} rows, the batch has {batch}")
    return cache


def _check_cache_implementation(name: str | None) -> None:
    if name is not None:
        raise RequestError(f"cache_implementation: found {name!r}, expected None; the model has its own cache, leave it out")
