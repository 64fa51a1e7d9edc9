# SPDX-License-Identifier: Apache-2.0
"""What tests run on NxDI in a process of its own: ``child.py COMMAND OPTIONS`` prints RESULT and what it found, as JSON."""

import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lockstep import Lockstep
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trace.mock_torchdist import mock_distributed
from safetensors.torch import load_file
from sources import TINY

from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.nxdi import (
    DeepseekV41InferenceConfig,
    DeepseekV41NeuronConfig,
    NeuronDeepseekV41ForCausalLM,
    generate_batch,
)
from modeling_deepseek_v41.nxdi.weights import load_strictly

FOLDER, NEW = str(TINY / "ckpt"), 25


class WithoutQdq(DeepseekV41NeuronConfig):
    """Arithmetic without any rounding of values that are cached."""

    numerics_name = "fp32_no_qdq"


def application(
    options: dict[str, Any], folder: str = FOLDER, kind: type[DeepseekV41NeuronConfig] = DeepseekV41NeuronConfig
) -> NeuronDeepseekV41ForCausalLM:
    """The application on ``folder`` with NeuronConfig's ``options``."""
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    run = {"torch_dtype": "float32", "seq_len": 256, "max_context_length": 128} | options
    config = DeepseekV41InferenceConfig(kind(**run), load_config=load_pretrained_config(folder))
    return NeuronDeepseekV41ForCausalLM(folder, config)


def generate(
    options: dict[str, Any], texts: list[list[int]], adapter: bool = False, alone: bool = False, folder: str = FOLDER,
    **sampling: float,
) -> dict[str, Any]:  # fmt: skip
    """25 tokens behind each of ``texts`` on the CPU, all in one batch or ``alone`` one after another, and what the graphs did.

    Greedy, or with the adapter's ``sampling``.
    """
    model = application(options, folder)
    model.to_cpu()
    torch.manual_seed(torch.distributed.get_rank())
    run = functools.partial(_adapter, **sampling) if adapter else functools.partial(generate_batch, max_new_tokens=NEW)
    batches = [[text] for text in texts] if alone else [texts]
    tokens = [found for batch in batches for found in run(model, batch)]
    return {"tokens": tokens, "counts": {wrapper.tag: wrapper.counts.as_dict() for wrapper in model.models}}


def generate_all(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``generate`` with each of ``runs``, by name."""
    return {name: generate(**arguments) for name, arguments in runs.items()}


def _adapter(model: NeuronDeepseekV41ForCausalLM, texts: list[list[int]], **sampling: float) -> list[list[int]]:
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    longest, length = max(map(len, texts)), model.neuron_config.speculation_length
    ids = torch.tensor([text + [2] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    more = sampling | ({"prompt_lookup_num_tokens": length} if length else {})
    found = HuggingFaceGenerationAdapter(model).generate(
        ids, attention_mask=mask, do_sample=bool(sampling), max_new_tokens=NEW + 2 * length, eos_token_id=-1, pad_token_id=2,
        **more,
    )  # fmt: skip
    return found[:, longest:][:, :NEW].tolist()


def refusals(runs: list[dict[str, Any]]) -> list[str]:
    """What is said of each of some options that to_cpu() cannot serve."""
    return [_refusal(options) for options in runs]


def _refusal(options: dict[str, Any]) -> str:
    try:
        application(options).to_cpu()
    except RequestError as error:
        return str(error)
    return ""


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


def execute(options: dict[str, Any], texts: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens from the traced module run as XLA graphs, aliases applied by hand."""
    import torch_xla
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
        return {"tokens": generate_batch(model, texts, NEW)}


def shards(
    options: dict[str, Any], work: str, text: list[int], new: list[int], folder: str = FOLDER, qdq: bool = True
) -> dict[str, Any]:
    """Writes the rank files, loads them strictly into every rank's module, and runs these together.

    Returns how the files differ from what the ranks read from the checkpoint, whether the written configuration is read
    back as it was, and the logits in front of every one of the tokens ``new`` behind ``text``, the same on all ranks.
    ``qdq``: whether the caches' QDQ takes place.
    """
    kind = DeepseekV41NeuronConfig if qdq else WithoutQdq
    model = application(options | {"save_sharded_checkpoint": True, "output_logits": True}, folder, kind)
    model.shard_weights(work)
    model.config.save(work)
    again = DeepseekV41InferenceConfig.load(work)
    ranks, bad, modules = range(model.neuron_config.tp_degree), [], []
    lockstep = Lockstep(model.weights.layout)
    with mock_distributed(world_size=len(ranks)):
        torch.distributed.init_process_group("xla", rank=0, world_size=len(ranks))
        parallel_state.initialize_model_parallel(len(ranks), 1, 1, skip_collective_init=True)
        for rank in ranks:
            stored = load_file(Path(work, "weights", f"tp{rank}_sharded_checkpoint.safetensors"))
            expected = model.weights.state_dict(rank)
            bad += sorted(set(stored) ^ set(expected))
            bad += [name for name, tensor in expected.items() if not _same(stored[name], tensor)]
            instance = model.models[0].get_model_instance()
            lockstep.make(rank, instance.load_module)
            load_strictly(instance.module, stored)
            modules.append(instance.module.eval())
    width = model.neuron_config.largest_context_bucket
    found = lockstep.run([functools.partial(_logits, module, width, text, new) for module in modules])
    assert all(torch.equal(found[0], other) for other in found)
    torch.save(found[0], Path(work, "logits.pt"))
    return {"bad": bad, "same_config": again.to_json_string() == model.config.to_json_string()}


def _logits(module: torch.nn.Module, width: int, text: list[int], new: list[int]) -> torch.Tensor:
    """The logits [tokens, vocab] in front of ``new`` of a module that gives them last of its results, called as a graph is."""
    fused, rows = module.results > 2, torch.arange(width)
    ids = torch.tensor(text + [0] * (width - len(text)), dtype=torch.int32).unsqueeze(0)
    mask = (rows < len(text)).int().unsqueeze(0)
    places, logits = rows.int().unsqueeze(0), []
    while len(logits) < len(new):
        zero = torch.zeros(1, dtype=torch.int32)
        out = module(ids, mask, places, zero, torch.ones(1, 3), zero, zero)
        module.store(out[module.results :])
        count = int((out[0] >= 0).sum()) if fused else 1
        logits += out[module.results - 1][0, :count]
        at = len(text) + len(logits) - 1
        ids, places = torch.tensor([[new[min(len(logits), len(new)) - 1]]]).int(), torch.tensor([[at]]).int()
        mask = (torch.arange(module.neuron_config.seq_len) < at).int().unsqueeze(0)
    return torch.stack(logits[: len(new)])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    rank = int(os.environ.get("RANK", "0"))
    os.write(1, f"RESULT {json.dumps({'rank': rank, 'found': result})}\n".encode())
