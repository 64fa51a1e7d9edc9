# SPDX-License-Identifier: Apache-2.0
"""Golden sets in the files' format made from this package's own model: for shapes that no golden set here has.

They say nothing about the numbers, only that a verification reads such a set and finds what is wrong in it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.cli import main
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate
from modeling_deepseek_v41.verify import MODES
from modeling_deepseek_v41.verify.golden_set import Prompt
from modeling_deepseek_v41.verify.parts import blocks
from modeling_deepseek_v41.verify.run import learn, propose, teacher_forced

STEPS = 5
"""Of every prompt."""

LOGIT_STEPS = [0, 2, 4]
"""Those whose draft logits a set holds."""

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
    folder: Path, config: dict[str, Any], batch: int, lengths: tuple[int, ...], layers_of: int | None, drafts: bool = False
) -> tuple[Path, Path]:
    """A random checkpoint and a set of all modes in ``folder``, with its ``drafts`` or without: (checkpoint, golden folder)."""
    checkpoint, golden = folder / "ckpt", folder / "golden"
    write_checkpoint(config, checkpoint, seed=3)
    golden.mkdir(parents=True)
    facts: dict[str, Any] = {"prompts": {}, "noq_ties": {}} | ({"draft_logit_steps": LOGIT_STEPS} if drafts else {})
    for mode, numerics in MODES.items():
        model = load_model(checkpoint, numerics, progress=False, drafter=drafts)
        tensors = {}
        for length in lengths:
            prompt = greedy(model, batch, length)
            tensors |= {
                f"p{length}.input_ids": prompt.input_ids, f"p{length}.generated": prompt.generated,
                f"p{length}.logits": prompt.logits,
            }  # fmt: skip
            if prompt.hashes is not None:
                tensors[f"p{length}.engram_hash"] = prompt.hashes
            if model.drafter is not None:
                tensors |= draft_tensors(model, prompt, mode)
            if mode == "ref":
                best = prompt.logits.topk(2).values
                margin, noise = best[..., 0] - best[..., 1], torch.full((batch, STEPS), 1e-3)
                facts["prompts"][str(length)] = {"ref_margin": margin.tolist(), "ref_noise_rel": noise.tolist()}
                if drafts:
                    facts["prompts"][str(length)]["draft_noise_ids_agree"] = torch.ones(batch, STEPS).tolist()
            if length == layers_of and mode != "f32_noq":
                save_file(layer_tensors(model, prompt), golden / f"layers_p{length}_{mode}.safetensors")
        save_file(tensors, golden / f"golden_{mode}.safetensors")
    (golden / "golden.json").write_text(json.dumps(facts), encoding="utf-8")
    return checkpoint, golden


def greedy(model: DeepseekV41Model, batch: int, length: int) -> Prompt:
    """A prompt with the model's own greedy continuation of STEPS ids."""
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))
    generated = torch.zeros(batch, STEPS, dtype=torch.int64)
    for step in range(STEPS):
        prompt = Prompt(length, ids, generated, torch.zeros(0), None, None, None, None)
        run = teacher_forced(model, prompt, step + 1)
        generated[:, step] = run.logits[:, -1].argmax(-1)
    return Prompt(length, ids, generated, run.logits, run.hashes, None, None, None)


@torch.inference_mode()
def draft_tensors(model: DeepseekV41Model, prompt: Prompt, mode: str) -> dict[str, Tensor]:
    """The drafts of every step, in ref with the taps that they were made from; nothing at position 0, as in the reference."""
    taps: list[Tensor] = []
    handle = model.register_forward_hook(lambda module, args, out: taps.append(out[1]))
    drafts = teacher_forced(model, prompt, drafter=model.drafter).drafts
    handle.remove()
    assert drafts is not None
    if prompt.length == 1:
        drafts.ids[:, 0], drafts.logits[:, 0], drafts.confidence[:, 0] = -1, torch.nan, torch.nan
    found = {
        "draft_ids": drafts.ids, "draft_logits": drafts.logits[:, LOGIT_STEPS], "draft_confidence": drafts.confidence,
    }  # fmt: skip
    if mode == "ref":
        found["main_hidden"] = torch.cat(taps, 1).to(model.numerics.dtype)
    return {f"p{prompt.length}.{kind}": tensor.clone() for kind, tensor in found.items()}


@torch.inference_mode()
def layer_tensors(model: DeepseekV41Model, prompt: Prompt) -> dict[str, Tensor]:
    """The tensors of a layer file for the prompt's row 0: prefill, two decode steps and the draft behind the second."""
    config, state = model.config, allocate(model.state_spec(1))
    found: dict[str, Tensor] = {}
    handles: list[Any] = []
    place = {"call": "prefill", "offset": prompt.length}
    narrow = model.numerics.dtype

    def on(module: nn.Module, name: str, keep: Callable[[Any], dict[str, Tensor]]) -> None:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for kind, tensor in keep(out).items():
                tensor = tensor.to(narrow) if tensor.is_floating_point() and kind not in ("pre_out", "gate_weights") else tensor
                found[f"{place['call']}.{name}.{kind}"] = tensor.clone()

        handles.append(module.register_forward_hook(hook))

    def chosen(out: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"topk_idxs_with_offset": torch.where(out[0] < 0, out[0], out[0] + place["offset"]).int()}

    for name, block in blocks(model).items():
        on(block, name, lambda out: {"x_out": out[0], "pre_out": out[1]})
        on(block.attn, name, lambda out: {"attn_out": out[0]})
        on(block.ffn, name, lambda out: {"ffn_out": out})
        on(block.ffn.gate, name, lambda out: {"gate_indices": out[0][0].flip(-1).int(), "gate_weights": out[1][0].flip(-1)})
        if block.engram is not None:
            on(block.engram, name, lambda out: {"engram_out": out})
        if block.attn.indexer is not None:
            on(block.attn.indexer, name, chosen)
        if block.attn.compressor is not None:
            on(block.attn.compressor, name, lambda out: {"compressor_latent_pre_rope": out[0][:, out[2][0]]})
    size = config.candidate_block_size
    if config.candidate_source_layer_id >= 0:

        def candidates(module: nn.Module, args: Any, out: tuple[Tensor, Tensor]) -> None:
            groups = prompt.length // module.ratio
            found.setdefault("prefill.candidates", out[1].repeat_interleave(size, -1)[..., :groups].clone())

        handles.append(model.layers[config.candidate_source_layer_id].attn.indexer.register_forward_hook(candidates))
    one = torch.zeros(1, dtype=torch.int64)
    drafter = model.drafter
    for step in range(3):
        ids = prompt.generated[:1, step - 1 : step] if step else prompt.input_ids[:1]
        start = prompt.length + step - 1 if step else 0
        place["call"], place["offset"] = (f"decode{step - 1}", config.sliding_window) if step else ("prefill", prompt.length)
        _, taps, *_ = model(ids, one + start, one + ids.shape[1], one, one, *state, read_len=prompt.length + 2)
        if drafter is not None:
            learn(model, drafter, taps, one + start, one, state)
        if drafter is not None and step == 2:
            place["call"] = "draft1"
            drafts = propose(model, drafter, prompt.generated[:1, 2], one + start + 1, one, state)
            found |= {"draft1.ids": drafts.ids, "draft1.confidence": drafts.confidence}
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
    for name, block in blocks(model).items():
        ring = by_name[block.attn.ring]
        rows = torch.zeros(1, window, ring.shape[-1], dtype=ring.dtype)
        rows[0, positions % window] = ring[0, positions % (ring.shape[1] - 1)]
        found[f"prefill.{name}.window_ring"] = rows
    for layer in model.config.kv_source_layer_ids:
        groups = length // model.config.compress_ratios[layer]
        found[f"prefill.layers.{layer}.compress_kv"] = by_name[f"ckv.{layer}"][:1, :groups].clone()
        found[f"prefill.layers.{layer}.index_k"] = by_name[f"ikey.{layer}"].mT[:1, :groups].contiguous()
    return found


def change(file: Path, key: str, edit: Callable[[Tensor], Tensor | None]) -> None:
    """Replaces ``key`` of a tensor file by what ``edit`` gives, or removes it."""
    tensors = load_file(file)
    edited = edit(tensors.pop(key))
    save_file(tensors | ({} if edited is None else {key: edited.contiguous()}), file)


def run(checkpoint: Path, golden: Path, *options: str) -> int:
    """The exit status of ``deepseek-v41 verify``."""
    return main(["verify", "--model-path", str(checkpoint), "--golden", str(golden), *options])
