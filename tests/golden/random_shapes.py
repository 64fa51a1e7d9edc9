# SPDX-License-Identifier: Apache-2.0
"""Random consistent configurations: every number that may differ from the release's does."""

import random
from typing import Any

from own_set import SMALL


def random_config(seed: int) -> dict[str, Any]:
    """A configuration of at most 7 layers and 80 positions; the same seed gives the same one."""
    r = random.Random(seed)
    layers, stages = r.choice([1, 2, 3, 5, 7]), r.choice([0, 0, 1, 2])
    groups, index_head, head = r.choice([1, 2, 4]), r.choice([32, 64]), r.choice([32, 64, 96])
    experts, topk = r.choice([2, 5, 9]), r.choice([1, 2, 3, 8, 40])
    ratios, sources, indexers = _layers(r, layers)
    engrams = r.sample(range(layers), min(layers, r.choice([0, 1, 2])))
    scaling = {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1}
    config = SMALL | {
        "vocab_size": r.choice([300, 333]), "hidden_size": r.choice([32, 64, 96]), "moe_intermediate_size": r.choice([32, 64]),
        "num_hidden_layers": layers, "num_attention_heads": groups * r.choice([1, 2, 3]), "head_dim": head,
        "qk_rope_head_dim": min(r.choice([2, 8, 16, 32]), head, index_head), "q_lora_rank": r.choice([32, 64]),
        "o_groups": groups, "o_lora_rank": 32 // groups * r.choice([1, 2]), "swiglu_limit": r.choice([0.0, 1.0, 2.0, 7.0]),
        "max_position_embeddings": r.choice([64, 80]), "rope_theta": r.choice([100, 10000]),
        "compress_rope_theta": r.choice([500, 160000]),
        "rope_scaling": r.choice([None, scaling | {"original_max_position_embeddings": r.choice([16, 64])}]),
        "n_routed_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 4)), "norm_topk_prob": r.random() < 0.6,
        "routed_scaling_factor": r.choice([1.0, 1.5, 2.0]), "sliding_window": r.choice([1, 2, 5, 8, 16]),
        "compress_ratios": ratios + [0] * stages, "kv_source_layer_ids": sources, "index_source_layer_ids": indexers,
        "index_n_heads": r.choice([1, 3, 4]), "index_head_dim": index_head, "index_topk": topk,
        "hc_mult": r.choice([1, 2, 3, 4, 5]), "hc_sinkhorn_iters": r.choice([1, 2, 5, 20]),
        "engram_layer_ids": engrams, "engram_num_embeddings": [1] * len(engrams),
        "engram_max_ngram_size": r.choice([2, 3, 4, 5]), "engram_vocab_size": r.choice([2, 30, 97]),
        "engram_n_heads": r.choice([1, 2, 3]), "engram_head_dim": r.choice([32, 64]),
        "engram_pad_token_id": r.choice([0, 2, 9]), "engram_compressed_vocab_size": 1,
        "num_nextn_predict_layers": stages, "dspark_block_size": r.choice([1, 3, 5, 7]),
        "dspark_target_layer_ids": r.sample(range(layers), min(layers, r.choice([1, 2]))),
    }  # fmt: skip
    source = r.choice([*indexers, -1])
    if source >= 0 and all(ratios[layer] == ratios[source] for layer in indexers if layer >= source):
        size = r.choice([1, 2, 3, 4])
        blocks = -(-(topk - 1) // size) + 1 + r.choice([0, 1])
        config |= {"candidate_source_layer_id": source, "candidate_block_size": size, "candidate_topk_blocks": blocks}
    return config


def _layers(r: random.Random, layers: int) -> tuple[list[int], list[int], list[int]]:
    """Ratios, kv sources and index sources: layers without compression anywhere, ratios that change at sources only."""
    ratios: list[int] = []
    sources: list[int] = []
    indexers: list[int] = []
    ratio = 0
    for layer in range(layers):
        kind = r.random()
        if kind < 0.3:
            ratios.append(0)
            continue
        if kind < 0.6 or not sources:
            ratio = r.choice([1, 1, 2, 3, 4, 5])
            sources.append(layer)
            indexers.append(layer)
        elif r.random() < 0.5:
            indexers.append(layer)
        ratios.append(ratio)
    return ratios, sources, indexers
