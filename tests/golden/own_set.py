# SPDX-License-Identifier: Apache-2.0
"""Golden sets in the files' format made from this package's own model: for shapes that no golden set here has.

They say nothing about the numbers, only that a verification reads such a set and finds what is wrong in it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate
from modeling_deepseek_v41.verify import MODES
from modeling_deepseek_v41.verify.golden_set import Prompt
from modeling_deepseek_v41.verify.run import teacher_forced

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4,
    "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "swiglu_limit": 0.0,
    "rms_norm_eps": 1e-20, "max_position_embeddings": 128, "rope_theta": 10000, "compress_rope_theta": 40000,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.0,
    "sliding_window": 8, "compress_ratios": [0, 4, 4, 0, 4, 0, 0], "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 2], "index_n_heads": 2, "index_head_dim": 32, "index_topk": 3,
    "candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 0, "hc_mult": 2,
    "hc_sinkhorn_iters": 4, "hc_eps": 1e-6, "engram_layer_ids": [], "engram_num_embeddings": [], "engram_max_ngram_size": 0,
    "engram_vocab_size": 0, "engram_n_heads": 0, "engram_head_dim": 0, "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 0, "num_nextn_predict_layers": 2, "dspark_block_size": 3, "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [4, 1], "dspark_markov_rank": 16, "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
"""hc_mult 2, ratio 4, one kv source, no engram, no candidates, two drafter stages, no clamp, no YaRN."""

WITH_ALL: dict[str, Any] = SMALL | {
    "hc_mult": 3, "compress_ratios": [1, 3, 3, 3, 1, 0], "kv_source_layer_ids": [0, 1, 4],
    "index_source_layer_ids": [0, 1, 2, 3, 4], "candidate_source_layer_id": 4, "candidate_topk_blocks": 3,
    "candidate_block_size": 2, "engram_layer_ids": [0, 3],
    "engram_max_ngram_size": 3, "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 32, "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 1, "num_nextn_predict_layers": 1, "dspark_target_layer_ids": [2],
}  # fmt: skip
"""hc_mult 3, ratios 1 and 3, sources that follow each other, an engram before layer 0, candidates at the last source."""


def make_set(
    folder: Path, config: dict[str, Any], batch: int, lengths: tuple[int, ...], layers_of: int | None, steps: int = 5
) -> tuple[Path, Path]:
    """A random checkpoint and a set of all modes in ``folder``: (checkpoint, golden folder)."""
    checkpoint, golden = folder / "ckpt", folder / "golden"
    write_checkpoint(config, checkpoint, seed=3)
    golden.mkdir(parents=True)
    facts: dict[str, Any] = {"prompts": {}, "noq_ties": {}}
    for mode, numerics in MODES.items():
        model = load_model(checkpoint, numerics, progress=False)
        tensors = {}
        for length in lengths:
            prompt = greedy(model, batch, length, steps)
            tensors |= {
                f"p{length}.input_ids": prompt.input_ids, f"p{length}.generated": prompt.generated,
                f"p{length}.logits": prompt.logits,
            }  # fmt: skip
            if prompt.hashes is not None:
                tensors[f"p{length}.engram_hash"] = prompt.hashes
            if mode == "ref":
                best = prompt.logits.topk(2).values
                margin, noise = best[..., 0] - best[..., 1], torch.full((batch, steps), 1e-3)
                facts["prompts"][str(length)] = {"ref_margin": margin.tolist(), "ref_noise_rel": noise.tolist()}
            if length == layers_of and mode != "f32_noq":
                save_file(layer_tensors(model, prompt), golden / f"layers_p{length}_{mode}.safetensors")
        save_file(tensors, golden / f"golden_{mode}.safetensors")
    (golden / "golden.json").write_text(json.dumps(facts), encoding="utf-8")
    return checkpoint, golden


def greedy(model: DeepseekV41Model, batch: int, length: int, steps: int) -> Prompt:
    """A prompt with the model's own greedy continuation."""
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))
    generated = torch.zeros(batch, steps, dtype=torch.int64)
    for step in range(steps):
        prompt = Prompt(length, ids, generated, torch.zeros(0), None, None, None, None)
        run = teacher_forced(model, prompt, step + 1)
        generated[:, step] = run.logits[:, -1].argmax(-1)
    return Prompt(length, ids, generated, run.logits, run.hashes, None, None, None)


@torch.inference_mode()
def layer_tensors(model: DeepseekV41Model, prompt: Prompt) -> dict[str, Tensor]:
    """The tensors of a layer file for the prompt's row 0: prefill and two decode steps."""
    config, state = model.config, allocate(model.state_spec(1))
    found: dict[str, Tensor] = {}
    handles: list[Any] = []
    place = {"call": "prefill", "offset": prompt.length}
    narrow = model.numerics.dtype

    def on(module: nn.Module, layer: int, keep: Callable[[Any], dict[str, Tensor]]) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for kind, tensor in keep(out).items():
                tensor = tensor.to(narrow) if tensor.is_floating_point() and kind not in ("pre_out", "gate_weights") else tensor
                found[f"{place['call']}.layers.{layer}.{kind}"] = tensor.clone()

        handles.append(module.register_forward_hook(hook))

    def chosen(out: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"topk_idxs_with_offset": torch.where(out[0] < 0, out[0], out[0] + place["offset"]).int()}

    for layer, block in enumerate(model.layers):
        on(block, layer, lambda out: {"x_out": out[0], "pre_out": out[1]})
        on(block.attn, layer, lambda out: {"attn_out": out[0]})
        on(block.ffn, layer, lambda out: {"ffn_out": out})
        on(block.ffn.gate, layer, lambda out: {"gate_indices": out[0][0].flip(-1).int(), "gate_weights": out[1][0].flip(-1)})
        if layer in config.engram_layer_ids:
            on(block.engram, layer, lambda out: {"engram_out": out})
        if layer in config.index_source_layer_ids:
            on(block.attn.indexer, layer, chosen)
        if layer in config.kv_source_layer_ids:
            on(block.attn.compressor, layer, lambda out: {"compressor_latent_pre_rope": out[0][:, out[2][0]]})
    size = config.candidate_block_size
    if config.candidate_source_layer_id >= 0:

        def candidates(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> None:
            groups = prompt.length // module.ratio
            found.setdefault("prefill.candidates", out[1].repeat_interleave(size, -1)[..., :groups].clone())

        handles.append(model.layers[config.candidate_source_layer_id].attn.indexer.register_forward_hook(candidates))
    one = torch.zeros(1, dtype=torch.int64)
    for step in range(3):
        ids = prompt.generated[:1, step - 1 : step] if step else prompt.input_ids[:1]
        start = prompt.length + step - 1 if step else 0
        place["call"], place["offset"] = (f"decode{step - 1}", config.sliding_window) if step else ("prefill", prompt.length)
        _, taps, *_ = model(ids, one + start, one + ids.shape[1], one, one, *state, read_len=prompt.length + 2)
        if not step:
            found["prefill.main_hidden"] = taps.to(narrow)
            found |= _caches(model, state, prompt.length)
    for handle in handles:
        handle.remove()
    return {key: tensor for key, tensor in found.items() if tensor.numel()}


def _caches(model: DeepseekV41Model, state: list[Tensor], length: int) -> dict[str, Tensor]:
    window, found = model.config.sliding_window, {}
    by_name = dict(zip(model.state_names, state, strict=True))
    positions = torch.arange(max(0, length - window), length)
    for layer in range(model.config.num_hidden_layers):
        ring = by_name[f"swa.{layer}"]
        rows = torch.zeros(1, window, ring.shape[-1], dtype=ring.dtype)
        rows[0, positions % window] = ring[0, positions % (ring.shape[1] - 1)]
        found[f"prefill.layers.{layer}.window_ring"] = rows
    for layer in model.config.kv_source_layer_ids:
        groups = length // model.config.compress_ratios[layer]
        found[f"prefill.layers.{layer}.compress_kv"] = by_name[f"ckv.{layer}"][:1, :groups].clone()
        found[f"prefill.layers.{layer}.index_k"] = by_name[f"ikey.{layer}"].mT[:1, :groups].contiguous()
    return found
