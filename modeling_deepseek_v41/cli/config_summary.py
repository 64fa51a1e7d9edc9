# SPDX-License-Identifier: Apache-2.0
"""A configuration in words."""

from collections.abc import Sequence

from ..config import ModelConfig


def one_line(config: ModelConfig) -> str:
    """The sizes that matter most."""
    engram = f"engram at layers {_listed(config.engram_layer_ids)}" if config.engram_layer_ids else "no engram"
    return (
        f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.n_routed_experts} experts"
        f" ({config.num_experts_per_tok} per token), window {config.sliding_window}, {engram}, vocabulary {config.vocab_size}"
    )


def rows(config: ModelConfig) -> list[tuple[str, str]]:
    """(name, description) of every part of the model, for a table."""
    c = config
    ratios = c.compress_ratios[: c.num_hidden_layers]
    described = [
        ("layers", f"{c.num_hidden_layers} of width {c.hidden_size}, {c.hc_mult} residual streams"),
        ("attention", f"{c.num_attention_heads} heads of {c.head_dim}, window {c.sliding_window}, q rank {c.q_lora_rank}"),
        ("output projection", f"{c.o_groups} groups of rank {c.o_lora_rank}"),
        ("compression", ", ".join(f"ratio {ratio}: {ratios.count(ratio)} layers" for ratio in sorted(set(ratios)))),
        ("compressed KV from", f"layers {_listed(c.kv_source_layer_ids)}" if c.kv_source_layer_ids else "no layer"),
    ]
    if c.index_source_layer_ids:
        described.append(
            (
                "indexer",
                f"layers {_listed(c.index_source_layer_ids)}: {c.index_n_heads} heads of {c.index_head_dim},"
                f" top {c.index_topk}",
            )
        )
    if c.candidate_source_layer_id >= 0:
        blocks = f"{c.candidate_topk_blocks} blocks of {c.candidate_block_size}"
        described.append(("candidates", f"{blocks}, chosen by layer {c.candidate_source_layer_id}"))
    described.append(
        (
            "experts",
            f"{c.n_routed_experts} of width {c.moe_intermediate_size} and a shared one, {c.num_experts_per_tok} per token",
        )
    )
    if c.engram_layer_ids:
        described.append(
            (
                "engram",
                f"layers {_listed(c.engram_layer_ids)}: {_listed(c.engram_num_embeddings)} rows of {c.engram_head_dim},"
                f" n-grams up to {c.engram_max_ngram_size}, {c.engram_n_heads} heads",
            )
        )
    if c.num_nextn_predict_layers:
        experts, per_token = c.experts(is_drafter=True)
        described.append(
            (
                "drafter",
                f"{c.num_nextn_predict_layers} stages, {experts} experts ({per_token} per token),"
                f" blocks of {c.dspark_block_size}, reads layers {_listed(c.dspark_target_layer_ids)}",
            )
        )
    special = (("begin", c.bos_token_id), ("end", c.eos_token_id), ("pad", c.pad_token_id), ("image", c.image_token_id))
    named = ", ".join(f"{name} {token}" for name, token in special if token is not None)
    described.append(("vocabulary", f"{c.vocab_size} tokens" + (f"; {named}" if named else "")))
    described.append(("positions", f"up to {c.max_position_embeddings}"))
    return described


def unknown_keys_warning(config: ModelConfig) -> str | None:
    """One line that names the keys of the config.json which this package does not know; None where it knows all."""
    if not config.unknown_keys:
        return None
    keys = ", ".join(config.unknown_keys)
    return f"warning: {config.source}: these keys are not known and are ignored: {keys}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)
