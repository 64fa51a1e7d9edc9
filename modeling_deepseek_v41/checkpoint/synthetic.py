# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints in the release's format, for any configuration: for tests, examples and measurements."""

import copy
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ..config import ModelConfig, config_from_dict
from ..errors import CheckpointError
from ..progress import Progress
from .folder import fit_engram, write_files
from .spec import BLOCK, TensorSpec, expected_tensors, vision_tensors
from .tiny_tokenizer import make_tokenizer
from .writer import write_shards

_CHUNK = 1 << 24
"""Elements of an unquantised tensor that are drawn at a time."""

_FP8_DEVIATION = 128.0
"""Standard deviation of the e4m3 values before scaling: the largest of 256 normal quantiles stays below 448."""

_FP4_MEAN_SQUARE = sum(value * value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8
"""Of uniformly drawn e2m1 codes, whose values are close to normally distributed."""

_UNIT_ROWS = ("embed.weight", "markov_head.embed.weight", "engram.embed.weight")
"""Tables whose rows are looked up, not multiplied: values of standard deviation 1."""


def write_checkpoint(
    config: Mapping[str, Any],
    folder: str | Path,
    seed: int,
    shard_bytes: int = 1 << 30,
    tokenizer: str | Path | None = None,
    corpus: str | None = None,
    progress: bool = False,
) -> ModelConfig:
    """Writes a random checkpoint for ``config`` (the content of a config.json) to ``folder`` and returns its configuration.

    The folder gets config.json, tokenizer.json (the file ``tokenizer``, or a new one trained on ``corpus``),
    tokenizer_config.json, generation_config.json, the shards of at most ``shard_bytes`` and their index.
    engram_compressed_vocab_size and engram_num_embeddings follow from the tokenizer and the other engram keys: they are
    corrected in the config.json that is written. The same arguments give the same tensors. Memory: one shard.

    Raises ConfigError for a configuration without a consistent reading, CheckpointError for a folder that holds weights or
    a tokenizer that does not fit.
    """
    folder = Path(folder)
    if seed < 0:
        raise CheckpointError(f"seed: expected 0 or more, found {seed}")
    content = copy.deepcopy(dict(config))
    text = content["text_config"] if isinstance(content.get("text_config"), dict) else content
    if text.get("engram_layer_ids") and len(text.get("engram_num_embeddings") or ()) != len(text["engram_layer_ids"]):
        text["engram_num_embeddings"] = [1] * len(text["engram_layer_ids"])
    checked = config_from_dict(content, source="config")
    words = _load_tokenizer(Path(tokenizer), checked) if tokenizer is not None else make_tokenizer(checked, corpus)
    if checked.engram_layer_ids:
        fit_engram(text, words, checked)
    checked = config_from_dict(content, source=str(folder / "config.json"))
    specs = expected_tensors(checked)
    if checked.has_vision:
        specs |= vision_tensors(content["vision_config"], checked.hidden_size)
    bar = Progress(sum(spec.nbytes for spec in specs.values()), "B", "writing checkpoint") if progress else None
    write_shards(_tensors(specs, seed, bar), folder, shard_bytes)
    if bar is not None:
        bar.close()
    write_files(folder, content, checked, words)
    return checked


def _load_tokenizer(file: Path, config: ModelConfig) -> Tokenizer:
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise CheckpointError(f"{file}: is no tokenizer.json of the tokenizers library ({error})") from None
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > config.vocab_size:
        raise CheckpointError(f"{file}: has {size} ids, expected at most vocab_size {config.vocab_size}; raise vocab_size")
    return tokenizer


def _tensors(specs: Mapping[str, TensorSpec], seed: int, bar: Progress | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, spec in specs.items():
        if spec.dtype == "F8_E8M0":
            continue  # comes with its weight
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        made = _make(name, spec, np.random.default_rng([seed, digest]))
        for suffix, tensor in made.items():
            yield name.removesuffix(".weight") + suffix if suffix else name, tensor
            if bar is not None:
                bar.update(tensor.nbytes)


def _make(name: str, spec: TensorSpec, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """The tensor ``name`` as {"": tensor}, or as {".weight": codes, ".scale": scales} where it is quantised."""
    if spec.dtype in ("BF16", "F32"):
        return {"": _plain(name, spec, rng)}
    codes = np.frombuffer(rng.bytes(math.prod(spec.shape)), dtype=np.uint8).reshape(spec.shape)
    if spec.dtype == "I8":
        weight, mean_square, fan_in = torch.from_numpy(codes.copy()), _FP4_MEAN_SQUARE, 2 * spec.shape[1]
        scale_shape = (spec.shape[0], math.ceil(fan_in / BLOCK))
    else:
        table = _normal_e4m3()
        weight = torch.from_numpy(table.view(torch.uint8).numpy()[codes]).view(torch.float8_e4m3fn)
        mean_square, fan_in = float(table.float().square().mean()), spec.shape[1]
        is_table = name.endswith(_UNIT_ROWS)
        scale_shape = (spec.shape[0] if is_table else math.ceil(spec.shape[0] / BLOCK), math.ceil(fan_in / BLOCK))
        fan_in = 1 if is_table else fan_in
    return {".weight": weight, ".scale": _scales(rng, scale_shape, 1 / (fan_in * mean_square))}


def _scales(rng: np.random.Generator, shape: tuple[int, int], mean_square: float) -> torch.Tensor:
    """ue8m0 bytes that vary over the blocks by up to a factor of 4; the squares of their values average ``mean_square``.

    The exponents are floor(x + u), u uniform in [-1, 1); averaged over x, 4^floor(x + u) is 0.7317 * 4^x.
    """
    x = math.log(mean_square / 0.7317, 4)
    exponents = np.floor(x + rng.uniform(-1, 1, shape)).astype(np.int64)
    return torch.from_numpy(np.clip(exponents + 127, 0, 254).astype(np.uint8))


@functools.cache
def _normal_e4m3() -> torch.Tensor:
    """256 equally likely e4m3 values, close to a normal distribution of deviation _FP8_DEVIATION."""
    quantiles = [NormalDist(0, _FP8_DEVIATION).inv_cdf((i + 0.5) / 256) for i in range(256)]
    return torch.tensor(quantiles).to(torch.float8_e4m3fn)


def _plain(name: str, spec: TensorSpec, rng: np.random.Generator) -> torch.Tensor:
    """A BF16 or F32 tensor, drawn in pieces of _CHUNK elements, so that no fp32 copy of a large table exists."""
    tensor = torch.empty(spec.shape, dtype=torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        piece.copy_(_draw(name, spec, rng, piece.numel()))
    return tensor


def _draw(name: str, spec: TensorSpec, rng: np.random.Generator, count: int) -> torch.Tensor:
    """``count`` fp32 values under which every activation of the model stays of order 1."""
    is_norm = name.rsplit(".", 1)[0].endswith(("norm", "norm1", "norm2"))
    if is_norm or name.endswith((".q_weight", ".k_weight", "hc_attn_scale", "hc_ffn_scale")):
        return torch.from_numpy(rng.uniform(0.5, 1.5, count).astype(np.float32))
    if name.endswith((".bias", ".bias_vl")):
        deviation = 0.1
    elif name.endswith(_UNIT_ROWS) or len(spec.shape) == 1:
        deviation = 1.0
    else:
        deviation = spec.shape[1] ** -0.5
    return torch.from_numpy(rng.standard_normal(count, dtype=np.float32)).mul_(deviation)
