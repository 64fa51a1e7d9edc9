# SPDX-License-Identifier: Apache-2.0
"""The tensors that a configuration asks for, against the release's totals and the golden checkpoint's own index."""

import json
from pathlib import Path

import pytest

from modeling_deepseek_v41.checkpoint.spec import GROUPS, TensorSpec, expected_tensors, group_of, is_vision, vision_tensors
from modeling_deepseek_v41.config import config_from_dict, load_config
from modeling_deepseek_v41.errors import CheckpointError

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "golden" / "tiny_a" / "ckpt"
RELEASE = DATA / "release_config.json"


def tiny_config(**changes: object) -> dict:
    """The golden checkpoint's config.json with changed text keys; ``vision_config=None`` makes it a text-only one."""
    content = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    if "vision_config" in changes:
        content["vision_config"] = changes.pop("vision_config")
    content["text_config"] |= changes
    return content


def test_release_totals() -> None:
    specs = expected_tensors(load_config(RELEASE))
    assert (len(specs), sum(spec.nbytes for spec in specs.values())) == (95_819, 509_315_486_040)
    text = [spec for name, spec in specs.items() if not is_vision(name)]
    assert (len(text), sum(spec.nbytes for spec in text)) == (95_776, 509_315_423_064)
    vision = json.loads(RELEASE.read_text(encoding="utf-8"))["vision_config"]
    whole = specs | vision_tensors(vision, 5120)
    # the published index: 96,085 tensors, metadata.total_size 510286023000
    assert (len(whole), sum(spec.nbytes for spec in whole.values())) == (96_085, 510_286_023_000)


def test_release_shapes() -> None:
    specs = expected_tensors(load_config(RELEASE))
    expected = {
        "layers.0.attn.wq_a.weight": ("F8_E4M3", (1280, 5120)),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", (40, 160)),
        "layers.0.attn.wq_b.weight": ("F8_E4M3", (64 * 512, 1280)),
        "layers.0.attn.wkv.weight": ("F8_E4M3", (512, 5120)),
        "layers.0.attn.wo_a.weight": ("F8_E4M3", (8 * 1024, 4096)),
        "layers.0.attn.wo_b.weight": ("F8_E4M3", (5120, 8192)),
        "layers.0.ffn.experts.383.w1.weight": ("I8", (2304, 2560)),
        "layers.0.ffn.experts.383.w1.scale": ("F8_E8M0", (2304, 160)),
        "layers.0.ffn.experts.383.w2.weight": ("I8", (5120, 1152)),
        "layers.0.hc_attn_fn": ("F32", (24, 4 * 5120)),
        "layers.1.engram.embed.weight": ("F8_E4M3", (384_006_168, 256)),
        "layers.14.engram.embed.scale": ("F8_E8M0", (384_016_682, 8)),
        "layers.14.engram.wkv.weight": ("F8_E4M3", (5 * 5120, 24 * 256)),
        "layers.2.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
        "layers.2.attn.indexer.wk.weight": ("BF16", (128, 512)),
        "layers.36.attn.indexer.wq_b.weight": ("F8_E4M3", (32 * 128, 1280)),
        "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 3 * 5120)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5120 + 256)),
        "mtp.2.ffn.gate.weight": ("BF16", (128, 5120)),
    }
    assert {name: (specs[name].dtype, specs[name].shape) for name in expected} == expected
    absent = ("layers.20.attn.compressor.wgate.weight", "layers.24.attn.indexer.wk.weight", "mtp.0.norm.weight")
    assert not specs.keys() & set(absent)


def test_tiny_is_exactly_its_index() -> None:
    config = load_config(TINY)
    index = json.loads((TINY / "model.safetensors.index.json").read_text(encoding="utf-8"))
    tower = vision_tensors(tiny_config()["vision_config"], config.hidden_size)
    specs = expected_tensors(config)
    assert specs.keys() == {name for name in index["weight_map"] if not is_vision(name) or "bias_vl" in name}
    whole = specs | tower
    assert whole.keys() == index["weight_map"].keys()
    assert sum(spec.nbytes for spec in whole.values()) == index["metadata"]["total_size"]


def test_text_only_has_no_vision_bias() -> None:
    names = expected_tensors(config_from_dict(tiny_config(vision_config=None)))
    assert not any(is_vision(name) for name in names)


def test_one_stage_owns_both_ends_of_the_drafter() -> None:
    config = config_from_dict(tiny_config(num_nextn_predict_layers=1, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 0]))
    names = expected_tensors(config)
    assert {"mtp.0.main_proj.weight", "mtp.0.norm.weight", "mtp.0.markov_head.embed.weight"} <= names.keys()
    none = config_from_dict(tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1]))
    assert not any(name.startswith("mtp.") for name in expected_tensors(none))


def test_sizes_that_are_no_multiple_of_a_block() -> None:
    names = expected_tensors(config_from_dict(tiny_config(hc_mult=2, index_n_heads=3, num_attention_heads=8)))
    assert names["layers.0.hc_attn_fn"].shape == (8, 256)
    assert names["layers.2.attn.indexer.wq_b.scale"].shape == (6, 2)
    assert names["layers.1.engram.wkv.weight"].shape == (3 * 128, 6 * 32)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("embed.weight", "embedding/head"),
        ("norm.weight", "norms"),
        ("layers.3.attn_norm.weight", "norms"),
        ("layers.3.attn.q_norm.weight", "attention"),
        ("layers.3.attn.attn_sink", "attention"),
        ("layers.3.attn.indexer.k_norm.weight", "compressor+indexer"),
        ("layers.3.hc_ffn_base", "hyper-connections"),
        ("layers.3.ffn.gate.bias", "router"),
        ("layers.3.ffn.gate.bias_vl", "vision"),
        ("layers.3.ffn.experts.7.w1.scale", "experts"),
        ("layers.3.ffn.shared_experts.w1.scale", "shared experts"),
        ("layers.3.engram.embed.scale", "engram tables"),
        ("layers.3.engram.q_weight", "engram other"),
        ("mtp.1.ffn.experts.7.w1.scale", "drafter"),
        ("mtp.1.ffn.gate.bias_vl", "vision"),
        ("vision.blocks.0.norm1.weight", "vision"),
        ("aligner.w1.bias", "vision"),
        ("image_newline", "vision"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS
    assert is_vision(name) == (group == "vision")


def test_nbytes() -> None:
    assert TensorSpec("BF16", (3, 5), "norms").nbytes == 30
    assert TensorSpec("F32", (7,), "norms").nbytes == 28
    assert TensorSpec("I8", (3, 5), "experts").nbytes == 15


def test_incomplete_vision_config() -> None:
    with pytest.raises(CheckpointError, match=r"vision_config\.patch_size: expected an integer, found None"):
        vision_tensors({"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "downsample_ratio": 3}, 128)
