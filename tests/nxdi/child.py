# SPDX-License-Identifier: Apache-2.0
"""What tests run on NxDI in a process of its own: ``child.py COMMAND OPTIONS`` prints RESULT and what it found, as JSON."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sources import TINY

from modeling_deepseek_v41.nxdi import (
    DeepseekV41InferenceConfig,
    DeepseekV41NeuronConfig,
    NeuronDeepseekV41ForCausalLM,
    generate_batch,
)
from modeling_deepseek_v41.nxdi.weights import load_strictly

GOLDEN = load_file(TINY / "golden_f32.safetensors")
FOLDER = str(TINY / "ckpt")


def application(options: dict[str, Any], folder: str = FOLDER) -> NeuronDeepseekV41ForCausalLM:
    """The application on ``folder`` with NeuronConfig's ``options``."""
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    run = {"torch_dtype": "float32", "seq_len": 256, "max_context_length": 128} | options
    config = DeepseekV41InferenceConfig(DeepseekV41NeuronConfig(**run), load_config=load_pretrained_config(folder))
    return NeuronDeepseekV41ForCausalLM(folder, config)


def prompts(lengths: list[int]) -> list[list[int]]:
    """The golden prompts of ``lengths``."""
    return [GOLDEN[f"p{length}.input_ids"][0].tolist() for length in lengths]


def generate(options: dict[str, Any], lengths: list[int], adapter: bool = False) -> dict[str, Any]:
    """25 greedy tokens behind the golden prompts on the CPU, all in one batch, and what the graphs did."""
    model = application(options)
    model.to_cpu()
    texts = _adapter(model, prompts(lengths)) if adapter else generate_batch(model, prompts(lengths), 25)
    return {"tokens": texts, "counts": {wrapper.tag: wrapper.counts.as_dict() for wrapper in model.models}}


def _adapter(model: NeuronDeepseekV41ForCausalLM, texts: list[list[int]]) -> list[list[int]]:
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    longest, length = max(map(len, texts)), model.neuron_config.speculation_length
    ids = torch.tensor([text + [2] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    more = {"prompt_lookup_num_tokens": length} if length else {}
    found = HuggingFaceGenerationAdapter(model).generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=25 + 2 * length, eos_token_id=-1, pad_token_id=2, **more
    )
    return found[:, longest:][:, :25].tolist()


def graphs(options: dict[str, Any], work: str, folder: str = FOLDER) -> dict[str, Any]:
    """The reports of every graph that compile() traces; it ends where the Neuron compiler would begin."""
    from torch_neuronx.xla_impl import trace

    model = application(options, folder)
    end = ""
    try:
        model.compile(work, dry_run=True)
    except NotImplementedError as error:
        end = str(error)
    return {"end": end, "graphs": trace.LOG, "models": len(model.models)}


def execute(options: dict[str, Any], length: int) -> dict[str, Any]:
    """Greedy tokens from the traced module run as XLA graphs, aliases applied by hand."""
    import torch_xla
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace.mock_torchdist import mock_distributed
    from neuronx_distributed_inference.models.application_base import init_custom_process_group_fn

    model, device = application(options), torch_xla.device()

    class OnXla(torch.nn.Module):
        def __init__(self, module: Any):
            super().__init__()
            self.module, self.results = module, module.results

        def forward(self, *args: torch.Tensor) -> list[torch.Tensor]:
            out = self.module(*(tensor.to(device) for tensor in args))
            torch_xla.sync()
            return [*(tensor.cpu() for tensor in out[: self.results]), *out[self.results :]]

        def store(self, state: list[torch.Tensor]) -> None:
            self.module.store(state)

    with mock_distributed(world_size=1), torch.no_grad():
        torch.distributed.init_process_group("xla", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1, 1, skip_collective_init=True)
        parallel_state.set_aot_mode(True)
        init_custom_process_group_fn(model.config)
        instance = model.models[0].get_model_instance()
        instance.load_module()
        load_strictly(instance.module, model.checkpoint_loader_fn())
        traced = OnXla(instance.module.to(device).eval())
        for wrapper in model.models:
            wrapper.model = traced
        return {"tokens": generate_batch(model, prompts([length]), 25)}


def shards(options: dict[str, Any], work: str) -> dict[str, Any]:
    """Writes the shards of every rank, and says how each differs from what that rank reads from the checkpoint."""
    model = application(options | {"save_sharded_checkpoint": True})
    model.shard_weights(work)
    model.config.save(work)
    again = DeepseekV41InferenceConfig.load(work)
    bad, sizes = [], []
    for rank in range(model.neuron_config.tp_degree):
        stored = load_file(Path(work, "weights", f"tp{rank}_sharded_checkpoint.safetensors"))
        expected = model.weights.state_dict(rank)
        bad += sorted(set(stored) ^ set(expected))
        bad += [name for name, tensor in expected.items() if not _same(stored[name], tensor)]
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in stored.values()))
    return {"bad": bad, "sizes": sizes, "same_config": again.to_json_string() == model.config.to_json_string()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    rank = int(os.environ.get("RANK", "0"))
    os.write(1, f"RESULT {json.dumps({'rank': rank, 'found': result})}\n".encode())
