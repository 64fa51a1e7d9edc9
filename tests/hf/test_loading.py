# SPDX-License-Identifier: Apache-2.0
"""from_pretrained, the Auto classes and the methods of a Hugging Face model that this one refuses or need not do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from modeling_deepseek_v41 import DeepseekV41Config, DeepseekV41ForCausalLM
from modeling_deepseek_v41.errors import CheckpointError, ConfigError, RequestError

IDS = torch.tensor([[0, 340, 458, 487, 333, 485, 483, 488]])


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the golden checkpoint that a test may change."""
    copy = tmp_path / "ckpt"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


def edit_config(folder: Path, **text: Any) -> None:
    """Changes keys of ``text_config`` in a folder's config.json."""
    file = folder / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["text_config"] |= text
    file.write_text(json.dumps(raw), encoding="utf-8")


def test_auto_class(folder: Path, model: DeepseekV41ForCausalLM) -> None:
    for options in (
        {"numerics": "fp32"},
        {"numerics": "fp32", "trust_remote_code": True, "dtype": "auto", "device_map": {"": "cpu"}, "variant": None},
    ):
        found = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert type(found) is DeepseekV41ForCausalLM
        assert isinstance(found, PreTrainedModel)
        assert isinstance(found, GenerationMixin)
        assert found.can_generate()
        assert (found.dtype, found.training, found.name_or_path) == (torch.float32, False, str(folder))
        assert torch.equal(found(IDS).logits, model(IDS).logits)
    release = AutoModelForCausalLM.from_pretrained(str(folder), max_seq_len=64)
    assert release.dtype == torch.bfloat16
    assert release.model.max_seq_len == 64


def test_numerics_differ(model: DeepseekV41ForCausalLM, smooth: DeepseekV41ForCausalLM) -> None:
    assert not torch.equal(model(IDS).logits, smooth(IDS).logits)


def test_the_quantiser_stays_out(model: DeepseekV41ForCausalLM) -> None:
    assert model.config.quantization_config["quant_method"] == "fp8"
    assert getattr(model, "hf_quantizer", None) is None
    assert not getattr(model, "is_quantized", False)


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto"}, "device_map: found 'auto', expected None or 'cpu'"),
        ({"dtype": torch.float16}, "dtype: found torch.float16, numerics='release' computes in torch.bfloat16"),
        ({"dtype": "float32"}, "dtype: found .*float32.* choose the arithmetic with numerics"),
        ({"dtype": torch.bfloat16, "numerics": "fp32"}, "numerics='fp32' computes in torch.float32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: found .* the release's own format"),
        ({"load_in_8bit": True}, "load_in_8bit: found True"),
        ({"load_in_4bit": True}, "load_in_4bit: found True"),
        ({"attn_implementation": "sdpa"}, "attn_implementation: found 'sdpa', expected None or 'eager'"),
        ({"output_loading_info": True}, "output_loading_info: found True"),
        ({"output_attentions": True, "attn_implementation": "eager"}, "output_attentions: "),
        ({"numeric": "fp32"}, "numeric: found 'fp32', but this model's from_pretrained has no such option; it takes numerics"),
        ({"numerics": "bf16"}, "numerics: expected one of release, fp32, fp32_no_qdq, found 'bf16'"),
        ({"expert_storage": "fp8"}, "expert_storage: expected one of decoded, bytes, fp8_exact, found 'fp8'"),
        ({"max_seq_len": 257}, "max_seq_len: expected 1 to max_position_embeddings 256"),
        ({"num_hidden_layers": 7}, "num_hidden_layers(: found| is) 7"),
    ],
)
def test_refused_options(folder: Path, options: dict[str, Any], message: str, auto: bool) -> None:
    loader = AutoModelForCausalLM if auto else DeepseekV41ForCausalLM
    with pytest.raises((RequestError, ConfigError), match=message):
        loader.from_pretrained(folder, **options)


def test_another_configuration_is_refused(folder: Path) -> None:
    config = DeepseekV41Config.from_pretrained(folder)
    config.sliding_window = 32
    with pytest.raises(RequestError, match=r"config: sliding_window is 32, .*config.json has 16"):
        DeepseekV41ForCausalLM.from_pretrained(folder, config=config)
    with pytest.raises(RequestError, match="config: expected a DeepseekV41Config, found"):
        DeepseekV41ForCausalLM.from_pretrained(folder, config=PretrainedConfig())  # type: ignore[arg-type]


def test_token_ids_may_come_from_a_configuration(folder: Path) -> None:
    config = DeepseekV41Config.from_pretrained(folder, eos_token_id=149)
    model = DeepseekV41ForCausalLM.from_pretrained(folder, config=config, numerics="fp32")
    assert model.generation_config.eos_token_id == 149


def test_what_is_no_checkpoint(tmp_path: Path, copied: Path) -> None:
    with pytest.raises(RequestError, match="deepseek-ai/x: is not a folder; download the checkpoint"):
        DeepseekV41ForCausalLM.from_pretrained("deepseek-ai/x")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        DeepseekV41ForCausalLM.from_pretrained(tmp_path)
    edit_config(copied, moe_intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"shape .* expected"):
        DeepseekV41ForCausalLM.from_pretrained(copied)


def test_a_models_own_configuration_loads_it_again(folder: Path, model: DeepseekV41ForCausalLM) -> None:
    again = DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32", config=model.config)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_configuration_alone_is_no_model(folder: Path) -> None:
    config = DeepseekV41Config.from_pretrained(folder)
    with pytest.raises(RequestError, match="a configuration alone gives no weights"):
        DeepseekV41ForCausalLM(config)
    with pytest.raises(RequestError, match="a configuration alone gives no weights"):
        AutoModelForCausalLM.from_config(config)


def test_generation_defaults(copied: Path, model: DeepseekV41ForCausalLM) -> None:
    own = model.generation_config
    assert (own.bos_token_id, own.eos_token_id, own.pad_token_id) == (0, 1, 2)
    GenerationConfig(max_new_tokens=3, eos_token_id=[1, 9], pad_token_id=4).save_pretrained(copied)
    found = DeepseekV41ForCausalLM.from_pretrained(copied, numerics="fp32")
    assert (found.generation_config.eos_token_id, found.generation_config.pad_token_id) == ([1, 9], 4)
    assert found.generate(IDS).shape == (1, IDS.shape[1] + 3)
    given = GenerationConfig(max_new_tokens=2)
    assert DeepseekV41ForCausalLM.from_pretrained(copied, generation_config=given).generation_config is given


def test_prompts_beyond_a_chunk_and_up_to_the_last_position(copied: Path) -> None:
    """Chunks of 512 tokens; the last bucket ends where the positions do."""
    edit_config(copied, max_position_embeddings=2048)
    model = DeepseekV41ForCausalLM.from_pretrained(copied, numerics="fp32_no_qdq", max_seq_len=1030)
    ids = torch.randint(3, 500, (1, 1030), generator=torch.Generator().manual_seed(1))
    whole = model(ids).logits
    _, cache = model(ids[:, :700], return_dict=False, logits_to_keep=1)
    rest = model(ids[:, 700:], past_key_values=cache).logits
    error = (rest - whole[:, 700:]).abs().amax(-1) / whole[:, 700:].abs().amax(-1)
    assert error.max() <= 1e-5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.save_pretrained("x"), "save_pretrained: .* copy the checkpoint folder"),
        (lambda model: model.push_to_hub("x"), "push_to_hub: "),
        (lambda model: model.resize_token_embeddings(600), "resize_token_embeddings: the vocabulary is fixed"),
        (lambda model: model.train(), "train: this model has no training mode"),
        (lambda model: model.requires_grad_(), "requires_grad_: this model has no gradients"),
        (lambda model: model.to(torch.bfloat16), "to: found torch.bfloat16, this model computes in torch.float32"),
        (lambda model: model.half(), "to: found torch.float16"),
        (lambda model: model.bfloat16(), "to: found torch.bfloat16"),
        (lambda model: model.double(), "to: found torch.float64"),
        (lambda model: model.to("cuda:0"), "to: found device 'cuda:0', this model runs on the CPU"),
        (lambda model: model.to(torch.device("meta"), torch.float32), "to: found device 'meta'"),
        (lambda model: model.cuda(), "to: found device 'cuda'"),
    ],
)
def test_refused_methods(model: DeepseekV41ForCausalLM, call: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(model)


def test_harmless_methods(model: DeepseekV41ForCausalLM) -> None:
    assert model.to("cpu", torch.float32, non_blocking=True) is model
    assert model.to(torch.zeros(1)) is model
    assert model.float() is model
    assert model.cpu() is model
    assert model.eval() is model
    assert model.requires_grad_(False) is model
    assert model.get_input_embeddings() is model.model.embed
    assert model.get_output_embeddings() is model.model.head
    assert model.num_parameters() > 0
