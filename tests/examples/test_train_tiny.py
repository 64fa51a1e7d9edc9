# SPDX-License-Identifier: Apache-2.0
"""The training example: its model is the package's, its rounding the checkpoint's, and it learns."""

from pathlib import Path

import pytest
import torch
from small_model import Small
from torch import Tensor

from examples.train_tiny.__main__ import train
from examples.train_tiny.agreement import check_agreement
from examples.train_tiny.quantise import as_stored
from examples.train_tiny.streams import mixes
from examples.train_tiny.text import encode, read_text
from examples.train_tiny.training import Corpus, train_backbone, train_drafter
from examples.train_tiny.weights import EXPERT, initial_weights, stored
from modeling_deepseek_v41.checkpoint import Checkpoint
from modeling_deepseek_v41.checkpoint.spec import expected_tensors
from modeling_deepseek_v41.checkpoint.tiny_tokenizer import built_in_corpus
from modeling_deepseek_v41.errors import DeepseekV41Error
from modeling_deepseek_v41.formats import decode_fp4, decode_fp8, decode_fp8_rows
from modeling_deepseek_v41.hyper_connections import sinkhorn


def some_ids(count: int, small: Small) -> Tensor:
    """Token ids [count]."""
    return torch.randint(3, small.config.vocab_size - 1, (count,), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("count", [6, 75, 140])
def test_backbone_and_drafter_are_the_package_s(count: int, small: Small, tmp_path: Path) -> None:
    """Sequences shorter than a window, with an incomplete group, and with selections that leave groups out."""
    weights = small.weights()
    small.write(weights, tmp_path)
    assert "fp32_no_qdq" in check_agreement(tmp_path, weights, some_ids(count, small), small.token_map)


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.attn.compressor.norm", "layers.1.attn.indexer.wq_b", "layers.4.attn.indexer.weights_proj",
        "layers.3.hc_ffn_base", "layers.1.engram.embed", "mtp.1.attn.attn_sink", "mtp.2.confidence_head.proj",
    ],
)  # fmt: skip
def test_a_weight_that_differs_is_noticed(name: str, small: Small, tmp_path: Path) -> None:
    weights = small.weights()
    small.write(weights, tmp_path)
    weights[name].data = weights[name].data.flip(-1)
    with pytest.raises(DeepseekV41Error, match="do not agree"):
        check_agreement(tmp_path, weights, some_ids(140, small), small.token_map)


def test_weights_in_training_are_those_that_are_read_back(small: Small, tmp_path: Path) -> None:
    """Bit for bit, for every kind of storage."""
    weights, kinds = small.weights(), stored(small.config)
    small.write(weights, tmp_path)
    seen = as_stored(weights, kinds)
    compared = set()
    with Checkpoint(tmp_path, small.config) as checkpoint:
        for name in expected_tensors(small.config):
            short = name.removesuffix(".weight")
            if name.endswith(".scale"):
                continue
            expert = EXPERT.search(short)
            key = EXPERT.sub(".experts.", short)
            decode = {"fp4": decode_fp4, "fp8": decode_fp8, "rows": decode_fp8_rows}.get(kinds[key].kind)
            found = checkpoint.tensor(name)
            found = decode(found, checkpoint.tensor(f"{short}.scale")) if decode else found.float()
            assert torch.equal(found, seen[key][int(expert[1])] if expert else seen[key]), name
            compared.add(kinds[key].kind)
    assert compared == {"fp4", "fp8", "rows", "BF16", "F32"}


def test_gradients_pass_through_the_rounding(small: Small) -> None:
    weights = small.weights()
    sum(weight.sum() for weight in as_stored(weights, stored(small.config)).values()).backward()  # type: ignore[union-attr]
    for name, weight in weights.items():
        assert name.endswith("gate.bias") or torch.equal(weight.grad, torch.ones_like(weight)), name  # type: ignore[arg-type]


def test_the_fast_sinkhorn_is_the_package_s(small: Small) -> None:
    """The same logits give the same comb; ``mix`` holds it transposed."""
    c, w = small.config, small.weights()
    x = torch.randn(2, 7, c.hc_mult, c.hidden_size)
    mix = mixes(x, w, "layers.0.hc_attn", c)[1]
    flat = x.flatten(-2).double()
    logits = (flat @ w["layers.0.hc_attn_fn"].double().T) * (flat.square().mean(-1, keepdim=True) + c.rms_norm_eps).rsqrt()
    logits = logits[..., 2 * c.hc_mult :] * w["layers.0.hc_attn_scale"][2] + w["layers.0.hc_attn_base"][2 * c.hc_mult :]
    comb = sinkhorn(logits.unflatten(-1, (c.hc_mult, c.hc_mult)), c.hc_sinkhorn_iters - 1, c.hc_eps)
    torch.testing.assert_close(mix[..., :-1].mT.double(), comb, rtol=1e-5, atol=1e-6)


def test_both_loops_learn_and_the_result_loads(small: Small, tmp_path: Path) -> None:
    text = built_in_corpus(1000)
    ids = encode(small.tokenizer, text)
    corpus = Corpus(ids, 0, len(text.encode()) / ids.numel(), small.token_map)
    weights = initial_weights(small.config, seed=0)
    bits = train_backbone(weights, small.config, corpus, steps=7, seed=0)
    assert bits[-1] < 0.8 * bits[0]
    shares = train_drafter(weights, small.config, corpus, steps=4, seed=0)
    assert shares[-1] > shares[0] + 0.05
    small.write(weights, tmp_path)
    check_agreement(tmp_path, weights, ids[:140], small.token_map)


def test_lines_encode_as_the_whole_text_does(small: Small) -> None:
    text = built_in_corpus(200) + "\n\n a line\n"
    assert encode(small.tokenizer, text).tolist() == small.tokenizer.encode(text, add_special_tokens=False).ids


def test_the_held_out_part_is_the_end_and_whole_lines(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(built_in_corpus())
    text = read_text(tmp_path / "text")
    assert text.train + text.held_out == built_in_corpus()
    assert text.train.endswith("\n") and 0.03 < len(text.held_out) / len(built_in_corpus()) < 0.05


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"too short", "found 9"),
        (b"\xff" * 300_000, "not UTF-8"),
        (b"a" * 300_000, "found one line"),
    ],
)
def test_a_text_that_cannot_serve_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DeepseekV41Error, match=message):
        train(file, tmp_path / "out", 1, 1, 0)


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(DeepseekV41Error, match="not an empty folder"):
        train(tmp_path / "text", tmp_path, 1, 1, 0)
    with pytest.raises(DeepseekV41Error, match="steps"):
        train(tmp_path / "text", tmp_path / "out", 0, 1, 0)
