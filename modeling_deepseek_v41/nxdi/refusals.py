# SPDX-License-Identifier: Apache-2.0
"""Options of NxDI that this model cannot serve, as data, and the comparison that finds them. Needs no NxDI."""

from collections.abc import Callable

_OWN_STATE = "the state of this model is addressed by absolute position; there is no block layout"
_OWN_LAYERS = "a kernel or fusion of NxDI's own attention, MLP or MoE modules, which this model does not use"
_OWN_QUANT = "the release's own low-bit weights are read; NxDI's quantisation does not apply"
_DSPARK = "the drafter is DSpark, part of the checkpoint: --enable-fused-speculation --speculation-length 6"
_DIVIDES = "ranks divide this model as attn_tp_degree, moe_ep_degree and dspark_moe_ep_degree say"

REFUSED = {
    "padding_side": "only right padding is served",
    "allow_input_truncation": "long prompts are read in chunks; nothing needs to be cut off",
    "async_mode": "steps run one after another",
    "input_start_offsets": "positions count from 0",
    "windowed_context_encoding_size": "long prompts are read in chunks of the largest context bucket",
    "chunked_prefill_config": "long prompts are read in chunks of the largest context bucket; leave it out",
    "is_chunked_prefill": "long prompts are read in chunks of the largest context bucket; leave it out",
    "is_block_kv_layout": _OWN_STATE,
    "is_prefix_caching": _OWN_STATE,
    "prefix_buckets": _OWN_STATE,
    "kv_cache_quant": "the caches have the release's own quantisation",
    "kv_cache_padding_size": _OWN_STATE,
    "token_generation_batches": "batch buckets are not served; inactive rows cost what active ones do",
    "quantized": _OWN_QUANT,
    "quantized_checkpoints_path": _OWN_QUANT,
    "modules_to_not_convert_lists": _OWN_QUANT,
    "activation_quantization_type": _OWN_QUANT,
    "quantized_mlp_kernel_enabled": _OWN_QUANT,
    "is_mxfp4_compute": _OWN_QUANT,
    "rpl_reduce_dtype": "partial sums are added up in float32",
    "attention_dtype": "the arithmetic follows from torch_dtype",
    "enable_eagle_speculation": _DSPARK,
    "enable_eagle_draft_input_norm": _DSPARK,
    "is_eagle3": _DSPARK,
    "is_medusa": _DSPARK,
    "medusa_speculation_length": _DSPARK,
    "num_medusa_heads": _DSPARK,
    "medusa_tree": _DSPARK,
    "token_tree_config": _DSPARK,
    "draft_model_path": _DSPARK,
    "draft_model_tp_degree": _DSPARK,
    "compiled_draft_model_path": _DSPARK,
    "pp_degree": _DIVIDES,
    "ep_degree": _DIVIDES,
    "cp_degree": _DIVIDES,
    "mlp_cp_degree": _DIVIDES,
    "attention_dp_degree": _DIVIDES,
    "sequence_parallel_enabled": _DIVIDES,
    "flash_decoding_enabled": _DIVIDES,
    "hybrid_sharding_config": _DIVIDES,
    "lora_config": "adapters are not served",
    "enable_lora": "adapters are not served",
    "enable_dynamic_multi_lora": "adapters are not served",
    "adapter_ids": "adapters are not served",
    "tensor_capture_config": "tensors are not captured; 'deepseek-v41 verify' compares layer by layer on a CPU",
    "tensor_replacement_config": "tensors are not replaced; 'deepseek-v41 verify' compares layer by layer on a CPU",
    "capacity_factor": "no expert has a capacity: every chosen expert runs",
    "early_expert_affinity_modulation": "routing is the release's own",
    "disable_normalize_top_k_affinities": "norm_topk_prob of config.json decides",
    "fused_shared_experts": _OWN_LAYERS,
    "router_act_fn": "routing is the release's own",
    "router_dtype": "routing is float32",
    "fused_qkv": _OWN_LAYERS,
    "qkv_kernel_enabled": _OWN_LAYERS,
    "qkv_nki_kernel_enabled": _OWN_LAYERS,
    "qkv_cte_nki_kernel_fuse_rope": _OWN_LAYERS,
    "qkv_kernel_nbsd_layout": _OWN_LAYERS,
    "qkv_kernel_fuse_residual_add": _OWN_LAYERS,
    "attn_kernel_enabled": _OWN_LAYERS,
    "strided_context_parallel_kernel_enabled": _OWN_LAYERS,
    "mlp_kernel_enabled": _OWN_LAYERS,
    "mlp_kernel_fuse_residual_add": _OWN_LAYERS,
    "fused_rmsnorm_skip_gamma": _OWN_LAYERS,
    "rmsnorm_quantize_kernel_enabled": _OWN_LAYERS,
    "out_proj_kernel_enabled": _OWN_LAYERS,
    "attn_block_tkg_nki_kernel_enabled": _OWN_LAYERS,
    "attn_block_tkg_nki_kernel_cascaded_attention": _OWN_LAYERS,
    "attn_block_tkg_nki_kernel_cache_update": _OWN_LAYERS,
    "attn_block_cte_nki_kernel_enabled": _OWN_LAYERS,
    "k_cache_transposed": _OWN_LAYERS,
    "moe_fused_nki_kernel_enabled": _OWN_LAYERS,
    "router_topk_nki_kernel_enabled": _OWN_LAYERS,
    "expert_mlp_nki_kernel_enabled": _OWN_LAYERS,
    "shared_mlp_nki_kernel_enabled": _OWN_LAYERS,
}
"""Attributes of NeuronConfig and of inference_demo's arguments that must keep their defaults, each with the reason."""


def refused(options: object, default: Callable[[str], object]) -> list[str]:
    """One line for every option in REFUSED whose value in ``options`` (an object with attributes) is not ``default(name)``.

    An option that ``options`` does not have is not refused. Nothing is judged by its value alone: command lines hand over
    all of them, also those that nobody chose.
    """
    lines = []
    for name, reason in REFUSED.items():
        if hasattr(options, name) and getattr(options, name) != default(name):
            lines.append(f"{name}: found {getattr(options, name)!r}, expected {default(name)!r}; {reason}")
    return lines


def refusal(lines: list[str]) -> str:
    """The message for ``lines``: all of them at once."""
    listed = "\n  ".join(lines)
    return f"{len(lines)} option(s) that this model cannot serve:\n  {listed}"
