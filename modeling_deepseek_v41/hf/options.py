# SPDX-License-Identifier: Apache-2.0
"""Options of Hugging Face's interfaces that cannot be served, each refused by name with what to do instead."""

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import RequestError

_WITHOUT_EFFECT = {
    "cache_dir", "code_revision", "force_download", "local_files_only", "low_cpu_mem_usage", "proxies", "resume_download",
    "token", "trust_remote_code", "use_auth_token", "_commit_hash", "_from_auto", "_from_pipeline",
}  # fmt: skip
"""Options of ``from_pretrained`` that change nothing about a folder that is read strictly and tensor by tensor."""

_LOADING: dict[str, tuple[tuple[Any, ...], str]] = {
    "adapter_kwargs": ((None, {}), "adapters cannot be loaded into this model"),
    "attn_implementation": ((None, "eager"), "attention has one implementation; leave the option out"),
    "device_map": (
        (None, "cpu", {"": "cpu"}),
        "the model runs in one CPU process; leave the option out, or use the Neuron application to spread it",
    ),
    "experts_implementation": (
        (None,),
        "choose the storage of experts with expert_weight_format='bf16', 'fp4_bytes' or 'fp8_exact'",
    ),
    "ignore_mismatched_sizes": ((None, False), "every tensor must have the shape that config.json asks for"),
    "load_in_4bit": (
        (None, False),
        "the release's own low-bit weights are read; expert_weight_format='fp4_bytes' needs less memory",
    ),
    "load_in_8bit": (
        (None, False),
        "the release's own low-bit weights are read; expert_weight_format='fp4_bytes' needs less memory",
    ),
    "output_loading_info": ((None, False), "loading is strict: a model that loads has every tensor"),
    "quantization_config": (
        (None,),
        "the weights are read in the release's own format; choose the arithmetic with numerics='release', 'fp32' or"
        " 'fp32_no_qdq'",
    ),
    "revision": ((None, "main"), "a folder has one revision; give the folder of the revision you want"),
    "subfolder": ((None, ""), "give the checkpoint's own folder as the path"),
    "use_safetensors": ((None, True), "the release's format is safetensors"),
}

_INPUTS = {
    "assistant_model": "there is no assisted decoding with another model; leave it out",
    "custom_generate": "the decoding loop is this package's own; use logits_processor and stopping_criteria",
    "head_mask": "heads cannot be switched off; leave it out",
    "inputs_embeds": "the engram layers look up token ids, so embeddings are not enough; pass input_ids",
    "images": "this is the text model, without the vision tower; pass text only",
    "image_grid_thw": "this is the text model, without the vision tower; pass text only",
    "image_sizes": "this is the text model, without the vision tower; pass text only",
    "output_attentions": "attention weights are not kept; leave it out",
    "output_hidden_states": "hidden states are not kept; leave it out",
    "pixel_values": "this is the text model, without the vision tower; pass text only",
    "position_ids": "positions follow from attention_mask: every row's tokens count from 0; leave it out",
    "synced_gpus": "the model runs in one process; leave it out",
}


def check_loading(options: Mapping[str, Any], numerics: str, dtype: torch.dtype) -> None:
    """Raises RequestError for the first option of ``from_pretrained`` that cannot be served; None means not given.

    ``dtype`` is what the arithmetic ``numerics`` computes in; the options dtype and torch_dtype may say the same.
    """
    for name, value in options.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in ("dtype", "torch_dtype"):
            if value not in ("auto", dtype, str(dtype).removeprefix("torch.")):
                raise RequestError(
                    f"{name}: found {value!r}, numerics={numerics!r} computes in {dtype}; leave {name} out and choose the"
                    " arithmetic with numerics='release' (bfloat16), 'fp32' or 'fp32_no_qdq' (float32)"
                )
        elif name in _LOADING:
            allowed, advice = _LOADING[name]
            if _plain(value) not in allowed:
                expected = " or ".join(repr(choice) for choice in allowed)
                raise RequestError(f"{name}: found {value!r}, expected {expected}; {advice}")
        else:
            raise RequestError(
                f"{name}: found {value!r}, but this model's from_pretrained has no such option; it takes numerics, max_seq_len,"
                " expert_weight_format, expert_exception_rows, kernels, drafter, config and generation_config"
            )


def check_inputs(inputs: Mapping[str, Any], where: str) -> None:
    """Raises RequestError for the first input beyond those that ``where`` (forward or generate) takes.

    None and False mean that the input is not used. token_type_ids, which tokenizers add by themselves, may be all zeros.
    """
    for name, value in inputs.items():
        if value is None or value is False:
            continue
        if name == "token_type_ids":
            if bool((value != 0).any()):
                raise RequestError("token_type_ids: found values other than 0; this model has one kind of token, leave it out")
            continue
        advice = _INPUTS.get(name, f"{where} has no such input; check the spelling or leave it out")
        raise RequestError(f"{name}: cannot be used with this model: {advice}")


def refused_input(name: str) -> bool:
    """Whether ``name`` is an input that other models take and this one refuses."""
    return name in _INPUTS


def _plain(value: Any) -> Any:
    """Devices as their names, so that torch.device("cpu") equals "cpu"."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, torch.device) else value
