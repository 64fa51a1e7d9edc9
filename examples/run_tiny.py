# SPDX-License-Identifier: Apache-2.0
"""Generates with the trained checkpoint in this repository and tells what it did. ``make run`` runs it.

Greedy and sampled, with the DSpark drafter: it proposes blocks of tokens, the model verifies them.
"""

import time
from pathlib import Path

from modeling_deepseek_v41.checkpoint import Checkpoint
from modeling_deepseek_v41.cli.output import speculation_lines
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.progress import format_bytes
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.sampling import SamplingOptions
from modeling_deepseek_v41.text import load_tokenizer

CHECKPOINT = Path(__file__).resolve().parents[1] / "examples/tiny_bible/ckpt"
PROMPTS = ("And it came to pass in those days, that", "The LORD is my", "Blessed are they")
NEW_TOKENS = 48


def main() -> None:
    """Loads, generates every prompt greedy and sampled, all six at a time, and prints."""
    config = load_config(CHECKPOINT)
    with Checkpoint(CHECKPOINT, config) as checkpoint:
        files, total = len(checkpoint.files), checkpoint.total_bytes
    began = time.perf_counter()
    model = load_model(CHECKPOINT, numerics="release", drafter=True)
    tokenizer = load_tokenizer(CHECKPOINT, config)
    loaded = time.perf_counter() - began
    print(
        f"model    {config.num_hidden_layers} layers of width {config.hidden_size}, {config.n_routed_experts} experts"
        f" ({config.num_experts_per_tok} per token), window {config.sliding_window}, engram at layers"
        f" {list(config.engram_layer_ids)}, vocabulary {config.vocab_size}; release numerics, on the CPU"
    )
    print(f"weights  {CHECKPOINT}: {files} files, {format_bytes(total)}, loaded in {loaded:.1f} s")

    engine = Engine(model, tokenizer, max_batch=2 * len(PROMPTS), speculation=Speculation())
    ways = {"greedy": SamplingOptions(), "sampled": SamplingOptions(temperature=0.8, top_k=40, top_p=0.95, seed=1)}
    requests = [
        (prompt, way, Request(tokenizer.encode(prompt), NEW_TOKENS, options))
        for prompt in PROMPTS
        for way, options in ways.items()
    ]
    completions = engine.generate([request for _, _, request in requests])
    for (prompt, way, _), completion in zip(requests, completions, strict=True):
        print(f"\n{way}, {len(completion.token_ids)} tokens, ended by {completion.finish_reason}")
        print(f"  {prompt!r} -> {completion.text!r}")

    stats = engine.stats
    print(f"\nprefill  {stats.prefill_tokens} tokens, {stats.prefill_tokens / stats.prefill_seconds:.1f} tokens/s")
    print(
        f"decode   {stats.decode_tokens} tokens in {stats.decode_steps} steps of up to {len(requests)} prompts,"
        f" {stats.decode_tokens / stats.decode_seconds:.1f} tokens/s"
    )
    assert stats.speculation is not None
    for name, words in speculation_lines(stats.speculation):
        print(f"{name:10} {words}")


if __name__ == "__main__":
    main()
