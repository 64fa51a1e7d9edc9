# SPDX-License-Identifier: Apache-2.0
"""Measures reading prompts and generating, with steps and acceptance. Not verified on a device.

python examples/trn2_benchmark.py --model-path CKPT --compiled-path OUT --prompt-length 1024
"""

import json
import time

import torch
from trn2_compile import loaded, parser

from modeling_deepseek_v41.nxdi.loop import generate_batch

options = parser(__doc__)
options.add_argument("--prompt-length", type=int, default=1024)
options.add_argument("--max-new-tokens", type=int, default=256)
options.add_argument("--runs", type=int, default=3)
args = options.parse_args()
model = loaded(args)
generator = torch.Generator().manual_seed(0)
shape = (args.batch_size, args.prompt_length)
prompts = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
generate_batch(model, prompts, 8)
for _ in range(args.runs):
    before = {wrapper.tag: wrapper.counts.as_dict() for wrapper in model.models}
    began = time.perf_counter()
    tokens = sum(map(len, generate_batch(model, prompts, args.max_new_tokens)))
    seconds = time.perf_counter() - began
    report = {"seconds": round(seconds, 3), "new_tokens_per_second": round(tokens / seconds, 2)}
    for wrapper in model.models:
        counts, old = wrapper.counts.as_dict(), before[wrapper.tag]
        calls, rows = counts["calls"] - old["calls"], counts["rows"] - old["rows"]
        report[wrapper.tag] = {
            "calls": calls,
            "ms_per_call": round(1000 * (counts["seconds"] - old["seconds"]) / calls, 2),
            "tokens_per_row": round((counts["tokens"] - old["tokens"]) / rows, 3),
        }
    print(json.dumps(report))
