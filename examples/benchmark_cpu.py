# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of the text model on a CPU, on a random checkpoint of examples/benchmark_config.json.

Prints prefill and decode tokens per second, the bytes that a decode step must read, and how much of the memory bandwidth,
measured in the same run, that reading amounts to. Absolute figures mean something on an idle machine only; the ratio is
what to compare. Example:

    python examples/benchmark_cpu.py --folder benchmark_checkpoint
"""

import argparse
import gc
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.errors import DeepseekV41Error
from modeling_deepseek_v41.expert_bank import EXPERT_WEIGHT_FORMATS, ExpertBank
from modeling_deepseek_v41.kernels.dispatch import KERNELS
from modeling_deepseek_v41.linear import Embedding
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.numerics import NUMERICS
from modeling_deepseek_v41.state import allocate

CONFIG = Path(__file__).parent / "benchmark_config.json"
PROMPT, WARM_UP, STEPS, ROUNDS = 512, 8, 64, 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=__doc__.split("\n\n", 1)[1])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here and use it again (default: a temporary folder)")
    parser.add_argument(
        "--config", type=Path, default=CONFIG, help="a release-format config.json (default: benchmark_config.json)"
    )
    parser.add_argument("--numerics", choices=list(NUMERICS), default="release")
    parser.add_argument(
        "--expert-weight-format", choices=EXPERT_WEIGHT_FORMATS, default="bf16", help="how experts are kept in memory"
    )
    parser.add_argument("--kernels", choices=KERNELS, default="auto")
    return parser.parse_args()


def bandwidth() -> float:
    """Bytes per second of reading a tensor far larger than the caches: the best of ten sums over 1 GiB."""
    data = torch.ones(1 << 28)
    best = 0.0
    for _ in range(10):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def bytes_per_token(model: DeepseekV41Model) -> int:
    """Weight bytes that one decode step must read: everything but the embedding, the engram tables and unchosen experts."""
    total = 0
    for module in model.modules():
        if isinstance(module, Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype != torch.float8_e4m3fn and not isinstance(module, ExpertBank):
                total += parameter.nbytes
    for block in model.blocks:
        bank, shared = block.ffn.experts, block.ffn.shared_experts
        total += sum(tensor[0].nbytes for tensor in bank.tensors) * block.ffn.gate.top_k
        total += sum(tensor.nbytes for tensor in shared.tensors)
    return total


def run(model: DeepseekV41Model) -> tuple[float, float]:
    """Prefill and decode tokens per second, the best of a few rounds, as the median machine state is not the model's."""
    state = allocate(model.state_spec(1))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, PROMPT), generator=generator)
    slot, rank = torch.tensor([0]), torch.tensor([0])
    read_len = model.max_seq_len

    def call(tokens: Tensor, start: int) -> Tensor:
        hidden, *_ = model(
            tokens, torch.tensor([start]), torch.tensor([tokens.shape[1]]), slot, rank, *state, read_len=read_len
        )
        return model.logits(hidden[:, -1:]).argmax(-1)

    prefill = decode = 0.0
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        token = call(ids, 0)
        prefill = max(prefill, PROMPT / (time.perf_counter() - begin))
        for step in range(WARM_UP):
            token = call(token, PROMPT + step)
        begin = time.perf_counter()
        for step in range(STEPS):
            token = call(token, PROMPT + WARM_UP + step)
        decode = max(decode, STEPS / (time.perf_counter() - begin))
    return prefill, decode


def main() -> int:
    """Makes or finds the checkpoint, loads it and prints the figures."""
    args = parse()
    base = resident()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "checkpoint"
        if not (folder / "config.json").exists():
            print(f"writing a random checkpoint to {folder}", file=sys.stderr)
            write_checkpoint(json.loads(args.config.read_text(encoding="utf-8")), folder, seed=0, progress=True)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        written = resident()
        begin = time.perf_counter()
        model = load_model(folder, args.numerics, 1024, args.expert_weight_format, args.kernels)
        loaded = time.perf_counter() - begin
        gc.collect()
        gc.freeze()
        print(f"measuring {ROUNDS} rounds of {PROMPT} prompt and {STEPS} new tokens", file=sys.stderr)
        with torch.inference_mode():
            prefill, decode = run(model)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        speed = bandwidth()
    read = bytes_per_token(model)
    print(f"checkpoint            {stored / 1e6:10.0f} MB, random, loaded in {loaded:.1f} s, numerics {args.numerics}")
    print(f"kernels               {model.numerics.ops.name:>10s}, {torch.get_num_threads()} threads")
    print(f"prefill               {prefill:10.1f} tokens/s at {PROMPT} tokens")
    print(f"decode                {decode:10.1f} tokens/s")
    print(f"bytes read per token  {read / 1e6:10.0f} MB of weights")
    print(f"memory bandwidth      {speed / 1e9:10.1f} GB/s, measured by reading 1 GiB")
    print(f"share of bandwidth    {read * decode / speed:10.2f}")
    memory = f"{(peak - base) / stored:.2f} x the checkpoint beyond the {base / 1e6:.0f} MB before it"
    print(f"peak memory           {peak / 1e6:10.0f} MB: {memory}" + (" (writing included)" if written > base * 1.5 else ""))
    return 0


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeepseekV41Error as error:
        sys.exit(f"error: {error}")
