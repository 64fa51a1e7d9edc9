# SPDX-License-Identifier: Apache-2.0
"""``DeepseekV41ForCausalLM``: loading, forward and what else a Hugging Face model is asked for."""

from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from ..config import load_config
from ..errors import RequestError
from ..loading import load_model
from ..model import DeepseekV41Model
from ..numerics import numerics_by_name
from .advance import advance
from .batch import check_ids, check_images, check_mask, spans
from .cache import CACHE_FIELD, DeepseekV41Cache
from .configuration import DeepseekV41Config
from .generation import RowGenerationMixin, given_cache
from .options import check_inputs, check_loading

_FREE_KEYS = {"bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "use_cache"}
"""What a configuration may say differently from the checkpoint's: generation's defaults."""


class DeepseekV41ForCausalLM(PreTrainedModel, RowGenerationMixin):
    """The text model for inference, with transformers' interface. ``model`` is the backbone, which holds the head too.

    Made by ``from_pretrained``. Every call without ``past_key_values`` begins with empty state. What cannot be served is
    refused by name with RequestError (a ValueError).
    """

    config_class = DeepseekV41Config
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(self, config: DeepseekV41Config, backbone: DeepseekV41Model | None = None):
        if backbone is None:
            raise RequestError(
                "DeepseekV41ForCausalLM: a configuration alone gives no weights; use"
                " DeepseekV41ForCausalLM.from_pretrained(folder) on a release-format checkpoint"
            )
        super().__init__(config)
        self.model = backbone
        self.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        numerics: str = "release",
        max_seq_len: int | None = None,
        expert_weight_format: str = "bf16",
        expert_exception_rows: int | None = None,
        kernels: str = "auto",
        drafter: bool = False,
        config: DeepseekV41Config | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> "DeepseekV41ForCausalLM":
        """Reads a release-format folder, strictly, with this package's own loader.

        ``numerics``: release (bf16, fp8 and fp4 rounding as shipped), fp32 or fp32_no_qdq. ``max_seq_len``: positions per
        sequence, by default the smaller of 8,192 and max_position_embeddings. ``expert_weight_format``: bf16, or at less
        speed fp4_bytes, a quarter of the experts' memory, or fp8_exact, half of it, with room for ``expert_exception_rows``
        that do not fit (expert_bank.py). ``kernels``: auto, torch, numba or nki (kernels/dispatch.py). ``drafter``: also
        the DSpark drafter, for ``generate(..., speculative=True)``. ``config`` may change token ids, nothing else.
        Generation defaults come from ``generation_config``, else the folder's generation_config.json, else the
        configuration's token ids.

        Raises ConfigError, CheckpointError or RequestError naming the file, key, tensor or option.
        """
        arithmetic = numerics_by_name(numerics)
        check_loading(options, numerics, arithmetic.dtype)
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            raise RequestError(
                f"{folder}: is not a folder; download the checkpoint and give the folder that holds its config.json"
            )
        if not isinstance(drafter, bool):
            raise RequestError(f"drafter: found {drafter!r}, expected True or False")
        load_config(folder)
        stored: DeepseekV41Config = DeepseekV41Config.from_pretrained(folder, name_or_path=str(folder))
        config = stored if config is None else config
        _check_config(config, stored, folder)
        shown = logging.is_progress_bar_enabled()
        backbone = load_model(
            folder, numerics, max_seq_len, expert_weight_format, kernels, shown, drafter,
            expert_exception_rows=expert_exception_rows,
        )  # fmt: skip
        model = cls(config, backbone)
        if generation_config is not None:
            model.generation_config = generation_config
        elif (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: DeepseekV41Cache | None = None,
        cache: DeepseekV41Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of a batch: fp32 [B, S, vocab] for input_ids [B, S], zeros at padding.

        ``attention_mask`` [B, S]: 1 for tokens, 0 for padding on the left, the right or both; without it every column is
        a token. Every row's tokens count from position 0, or go on behind those in ``past_key_values`` (``cache`` in newer
        transformers; updated in place; the mask may then cover earlier columns too). ``logits_to_keep``: the last so many
        columns, or a tensor of column numbers; 0 means all. ``labels`` [B, S]: adds the mean cross entropy of predicting
        each next label, -100 is left out. ``use_cache`` (the configuration's by default): whether the output has the cache.
        Raises RequestError for inputs that cannot be served and rows longer than max_seq_len.
        """
        check_inputs(inputs | {"token_type_ids": token_type_ids}, "forward")
        ids = check_ids(input_ids, self.model.config).to(self.device)
        batch, columns = ids.shape
        state = given_cache({"past_key_values": past_key_values, "cache": cache}, batch)
        if state is None:
            state = DeepseekV41Cache(self.model, batch)
        places = spans(check_mask(attention_mask, ids, state.columns))
        tokens = [row[first:stop] for row, (first, stop) in zip(ids, places, strict=True)]
        check_images(tokens, self.model.config)
        kept = _kept_columns(logits_to_keep, columns).to(ids.device)
        if labels is not None and not torch.equal(kept, torch.arange(columns, device=ids.device)):
            raise RequestError(f"labels: need the logits of every column, found logits_to_keep={logits_to_keep}; leave one out")
        logits = self._logits(state, tokens, places, kept)
        state.columns += columns
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        shown = self.config.use_cache if use_cache is None else use_cache
        fields: dict[str, Any] = {"loss": loss, "logits": logits} | ({CACHE_FIELD: state} if shown else {})
        output = CausalLMOutputWithPast(**fields)
        as_object = self.config.return_dict if return_dict is None else return_dict
        return output if as_object else output.to_tuple()

    def _logits(self, state: DeepseekV41Cache, tokens: list[Tensor], places: list[tuple[int, int]], kept: Tensor) -> Tensor:
        """Logits [B, k, vocab] of the ``kept`` columns [k], rows' tokens [n_b] being the columns ``places``."""
        inside = [(kept >= first) & (kept < stop) for first, stop in places]
        indices = [kept[mine] - first for mine, (first, _) in zip(inside, places, strict=True)]
        wanted = [
            torch.zeros_like(ids, dtype=torch.bool).index_fill_(0, index, True)
            for ids, index in zip(tokens, indices, strict=True)
        ]
        found = advance(self.model, state, tokens, wanted)
        logits = torch.zeros(len(tokens), len(kept), self.model.config.vocab_size, device=kept.device)
        for row, (values, index) in enumerate(zip(found, indices, strict=True)):
            logits[row, inside[row]] = values[(wanted[row].cumsum(0) - 1)[index]]
        return logits

    @property
    def dtype(self) -> torch.dtype:
        """What the arithmetic computes in: bfloat16 for release, float32 otherwise. Logits are always float32."""
        return self.model.numerics.dtype

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.model.head

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is tied."""

    def train(self, mode: bool = True) -> "DeepseekV41ForCausalLM":
        """Inference only: RequestError for training mode."""
        if mode:
            raise RequestError("train: this model has no training mode and no gradients; use it as it is, after eval()")
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> "DeepseekV41ForCausalLM":
        """Inference only: RequestError where gradients are asked for."""
        if requires_grad:
            raise RequestError("requires_grad_: this model has no gradients; leave it out")
        return self

    def to(self, *args: Any, **kwargs: Any) -> "DeepseekV41ForCausalLM":  # type: ignore[override]
        """The CPU and the arithmetic's own dtype change nothing; RequestError for another device or dtype."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.to(value.device, value.dtype)
            elif isinstance(value, torch.dtype):
                self._check_dtype(value)
            elif value is not None and not isinstance(value, bool | torch.memory_format) and torch.device(value).type != "cpu":
                raise RequestError(
                    f"to: found device {str(value)!r}, this model runs on the CPU; leave it out, or use the Neuron application"
                    " for Trainium"
                )
        return self

    def cuda(self, *args: Any, **kwargs: Any) -> "DeepseekV41ForCausalLM":  # type: ignore[override]
        """Refused: the model runs on the CPU."""
        return self.to("cuda")

    def float(self, *args: Any) -> "DeepseekV41ForCausalLM":
        """As ``to(torch.float32)``."""
        return self.to(torch.float32)

    def half(self, *args: Any) -> "DeepseekV41ForCausalLM":
        """As ``to(torch.float16)``."""
        return self.to(torch.float16)

    def bfloat16(self) -> "DeepseekV41ForCausalLM":
        """As ``to(torch.bfloat16)``."""
        return self.to(torch.bfloat16)

    def double(self) -> "DeepseekV41ForCausalLM":
        """As ``to(torch.float64)``."""
        return self.to(torch.float64)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the loaded weights are decoded and no longer the release's bytes."""
        raise RequestError(
            "save_pretrained: the weights in memory are decoded, they cannot be written back in the release's format; copy the"
            " checkpoint folder instead (config.save_pretrained and generation_config.save_pretrained work)"
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused, as ``save_pretrained`` is."""
        raise RequestError("push_to_hub: the model cannot be saved (see save_pretrained); upload the checkpoint folder instead")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: vocabulary, engram tables and head belong together."""
        raise RequestError(
            "resize_token_embeddings: the vocabulary is fixed: the engram tables and the head are made for it; keep added"
            " tokens within vocab_size"
        )

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            raise RequestError(
                f"to: found {dtype}, this model computes in {self.dtype} with fp32 where the release has it; load it with"
                " numerics='release' (bfloat16), 'fp32' or 'fp32_no_qdq' (float32) instead"
            )


def _check_config(config: PretrainedConfig, stored: DeepseekV41Config, folder: Path) -> None:
    """Raises RequestError where ``config`` asks for something else than the folder's configuration ``stored``."""
    if not isinstance(config, DeepseekV41Config):
        raise RequestError(f"config: expected a DeepseekV41Config, found {type(config).__name__}; leave it out")
    check_loading({"attn_implementation": config._attn_implementation}, "", torch.float32)
    check_inputs({"output_attentions": config.output_attentions, "output_hidden_states": config.output_hidden_states}, "config")
    for key in stored.to_release_dict()["text_config"].keys() - _FREE_KEYS:
        mine, theirs = getattr(config, key, None), getattr(stored, key)
        if mine != theirs:
            raise RequestError(
                f"config: {key} is {mine!r}, {folder / 'config.json'} has {theirs!r}; the checkpoint's tensors belong to its"
                " own configuration, leave the change out"
            )


def _kept_columns(logits_to_keep: int | Tensor, columns: int) -> Tensor:
    """The column numbers that ``logits_to_keep`` asks for, of ``columns``."""
    if not isinstance(logits_to_keep, Tensor):
        if type(logits_to_keep) is not int or logits_to_keep < 0:
            raise RequestError(f"logits_to_keep: expected an integer, 0 (all) or more, found {logits_to_keep!r}")
        return torch.arange(columns)[-logits_to_keep if logits_to_keep else None :]
    if logits_to_keep.dtype == torch.bool:
        raise RequestError("logits_to_keep: expected column numbers, found a mask; give mask.nonzero().squeeze(-1)")
    kept = torch.where(logits_to_keep < 0, logits_to_keep + columns, logits_to_keep)
    if kept.dim() != 1 or kept.is_floating_point() or bool(((kept < 0) | (kept >= columns)).any()):
        raise RequestError(f"logits_to_keep: expected column numbers below {columns} in one dimension, found {logits_to_keep}")
    return kept
