# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints: they open strictly, their numbers are sensible, and a seed means the same checkpoint."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from modeling_deepseek_v41.checkpoint import Checkpoint, is_vision
from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.checkpoint.tiny_tokenizer import built_in_corpus, make_tokenizer
from modeling_deepseek_v41.config import config_from_dict, load_config
from modeling_deepseek_v41.engram.hashing import engram_layouts
from modeling_deepseek_v41.engram.token_map import token_map
from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.formats import decode_fp4, decode_fp8, decode_fp8_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "golden" / "tiny_a" / "ckpt"


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The golden checkpoint's config.json with changed text keys (or a changed vision_config)."""
    content = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    if "vision_config" in changes:
        content["vision_config"] = changes.pop("vision_config")
    content["text_config"] |= changes
    return content


NO_ENGRAM = {"engram_layer_ids": [], "engram_num_embeddings": []}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hc_mult": 2, "vision_config": None},
        NO_ENGRAM,
        {"engram_vocab_size": 331, "engram_max_ngram_size": 3, "engram_num_embeddings": []},
        {"num_nextn_predict_layers": 2, "compress_ratios": [0, 0, 4, 4, 1, 1, 1, 1, 0, 0]},
        {"num_nextn_predict_layers": 0, "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1], "candidate_source_layer_id": -1},
        {"vocab_size": 600, "index_n_heads": 3, "hidden_size": 96, "num_attention_heads": 16},
    ],
)
def test_any_configuration_opens_strictly(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = write_checkpoint(tiny_config(**changes), tmp_path, seed=3, shard_bytes=2_000_000)
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) > 1
        assert checkpoint.config == config
        for name in checkpoint.tensors:
            checkpoint.tensor(name)
        checkpoint.finish()
        assert ("vision.norm.weight" in checkpoint.tensors) == config.has_vision
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(config.vocab_size))
    if config.engram_layer_ids:
        assert token_map(tmp_path, config).shape == (config.vocab_size,)
        assert [layout.rows for layout in engram_layouts(config)] == list(config.engram_num_embeddings)


def test_flat_configuration(tmp_path: Path) -> None:
    nested = tiny_config(vision_config=None)
    flat = {key: value for key, value in nested.items() if key not in ("text_config", "vision_config")} | nested["text_config"]
    config = write_checkpoint(flat, tmp_path, seed=0)
    assert (
        json.loads((tmp_path / "config.json").read_text())["engram_compressed_vocab_size"]
        == config.engram_compressed_vocab_size
    )
    Checkpoint(tmp_path)


def test_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(tiny_config(**NO_ENGRAM), tmp_path / name, seed=seed, shard_bytes=3_000_000)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    first, other = Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "c")
    for name in first.tensors:
        assert not torch.equal(first.tensor(name).view(torch.uint8), other.tensor(name).view(torch.uint8)), name


def decoded(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The quantised linear or table ``name`` in fp32."""
    weight, scale = checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.scale")
    if weight.dtype == torch.uint8:
        return decode_fp4(weight, scale)
    return decode_fp8_rows(weight.view(torch.uint8), scale) if name.endswith("engram.embed") else decode_fp8(weight, scale)


def test_numbers_are_sensible(tmp_path: Path) -> None:
    write_checkpoint(tiny_config(), tmp_path, seed=5)
    checkpoint = Checkpoint(tmp_path)
    for name, spec in checkpoint.tensors.items():
        if name.endswith(".scale"):
            if spec.nbytes >= 32:
                assert checkpoint.tensor(name).unique().numel() >= 2, name
            weight = decoded(checkpoint, name.removesuffix(".scale"))
            fan_in = 1 if "engram.embed" in name else weight.shape[1]
            low, high = (0.8, 1.25) if spec.nbytes >= 256 else (0.4, 2.2)
            assert low < weight.std() * fan_in**0.5 < high, name
        elif spec.dtype in ("BF16", "F32") and not is_vision(name):
            values = checkpoint.tensor(name).float()
            assert values.std() > 0, name
            if "norm" in name:
                assert values.min() >= 0.5 and values.max() <= 1.5, name
            elif len(spec.shape) == 2 and min(spec.shape) >= 32:
                fan_in = 1 if name.endswith("embed.weight") else spec.shape[1]
                assert 0.9 < values.std() * fan_in**0.5 < 1.1, name


def test_combs_are_asymmetric(tmp_path: Path) -> None:
    write_checkpoint(tiny_config(**NO_ENGRAM), tmp_path, seed=0)
    checkpoint = Checkpoint(tmp_path)
    for layer in range(8):
        for sublayer in ("attn", "ffn"):
            comb = checkpoint.tensor(f"layers.{layer}.hc_{sublayer}_base")[8:].view(4, 4).softmax(-1)
            for _ in range(20):
                comb = comb / comb.sum(-2, keepdim=True)
                comb = comb / comb.sum(-1, keepdim=True)
            assert (comb - comb.T).abs().max() > 0.05


def test_special_tokens(tmp_path: Path) -> None:
    config = write_checkpoint(tiny_config(), tmp_path, seed=0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    assert [tokenizer.id_to_token(token) for token in (0, 1, 2)] == names
    assert tokenizer.id_to_token(510) == "<｜deepseek_image｜>" and tokenizer.id_to_token(511) == "<｜dspark▁noise｜>"
    assert tokenizer.encode("<｜User｜>hi<｜end▁of▁sentence｜>").ids[-1] == 1
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert [settings[f"{key}_token"] for key in ("bos", "eos", "pad")] == names
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    assert config.engram_compressed_vocab_size < config.vocab_size


@pytest.mark.parametrize("text", ["The river finds the morning", "naïve Über 你好 🙂\n\t x", "\x00\x7f\ufffd"])
@pytest.mark.parametrize("vocab_size", [261, 300, 512, 5000])
def test_every_text_can_be_encoded(text: str, vocab_size: int) -> None:
    changes = {"vocab_size": vocab_size, "dspark_noise_token_id": 4, "engram_pad_token_id": 2}
    config = config_from_dict(tiny_config(**changes) | {"image_token_id": 3})
    tokenizer = make_tokenizer(config)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    if vocab_size == 5000:
        assert tokenizer.id_to_token(4900) == "<｜unused_4900｜>"
        assert tokenizer.encode("a<｜unused_4900｜>").ids[-1] == 4900


def test_vocabulary_too_small(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vocab_size: expected 260 or more .*found 259"):
        write_checkpoint(tiny_config(vocab_size=259, dspark_noise_token_id=5, vision_config=None), tmp_path, seed=0)
    assert not list(tmp_path.iterdir())


def test_corpus_shapes_the_tokenizer() -> None:
    config = config_from_dict(tiny_config())
    tokens = make_tokenizer(config, "xyzzyx plugh " * 50).get_vocab()
    assert "xyzzyx" in tokens or "Ġxyzzyx" in tokens
    assert len(set(built_in_corpus().splitlines())) > 1000


def test_given_tokenizer(tmp_path: Path) -> None:
    config = write_checkpoint(
        tiny_config(engram_compressed_vocab_size=7), tmp_path / "a", seed=0, tokenizer=TINY / "tokenizer.json"
    )
    assert config.engram_compressed_vocab_size == load_config(TINY).engram_compressed_vocab_size
    assert config.engram_num_embeddings == load_config(TINY).engram_num_embeddings
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has 512 ids, expected at most vocab_size 500"):
        small = tiny_config(vocab_size=500, dspark_noise_token_id=3)
        write_checkpoint(small, tmp_path / "b", seed=0, tokenizer=TINY)
    with pytest.raises(CheckpointError, match=r"config\.json: is no tokenizer\.json"):
        write_checkpoint(tiny_config(), tmp_path / "b", seed=0, tokenizer=TINY / "config.json")


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="seed: expected 0 or more, found -1"):
        write_checkpoint(tiny_config(), tmp_path, seed=-1)
    write_checkpoint(tiny_config(), tmp_path, seed=0)
    with pytest.raises(CheckpointError, match="already holds weights"):
        write_checkpoint(tiny_config(), tmp_path, seed=1)


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["make_tiny_checkpoint.py", *arguments])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / "examples" / "make_tiny_checkpoint.py"), run_name="__main__")
        return int(caught.value.code or 0)

    out = tmp_path / "ckpt"
    arguments = ["--config", str(TINY / "config.json"), "--out", str(out), "--seed", "7", "--shard-bytes", "3000000"]
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert "experts" in printed and "3 files" in printed and "seed 7" in printed
    assert run(*arguments) == 1
    assert "already holds weights" in capsys.readouterr().err
    assert run("--config", str(tmp_path / "no.json"), "--out", str(tmp_path / "x")) == 1
    assert "no.json: No such file" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{")
    assert run("--config", str(tmp_path / "bad.json"), "--out", str(tmp_path / "x")) == 1
    assert "bad.json: is not valid JSON" in capsys.readouterr().err
