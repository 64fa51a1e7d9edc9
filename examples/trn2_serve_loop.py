# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in its smallest form: prompts from stdin, a line each, share the slots of one model.

A free slot reads the next prompt while the others wait one call; all running ones then step together. Not verified on a device.

    python examples/trn2_serve_loop.py --model-path CKPT --compiled-path OUT < prompts.txt
"""

import sys

import torch
from transformers import AutoTokenizer
from trn2_compile import loaded, parser

from modeling_deepseek_v41.nxdi.loop import forward

options = parser(__doc__)
options.add_argument("--max-new-tokens", type=int, default=100)
args = options.parse_args()
model, tokenizer = loaded(args), AutoTokenizer.from_pretrained(args.model_path)
waiting = [(line.rstrip("\n"), tokenizer(line.rstrip("\n")).input_ids) for line in sys.stdin if line.strip()]
running: dict[int, tuple[str, int, list[int]]] = {}
"""By slot: the prompt, its tokens and the new ones."""


def ended(tokens: list[int]) -> bool:
    return len(tokens) >= args.max_new_tokens or tokenizer.eos_token_id in tokens


def finish(slot: int) -> None:
    prompt, _, tokens = running.pop(slot)
    end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else args.max_new_tokens
    print(f"{prompt}{tokenizer.decode(tokens[:end])}\n", flush=True)


while waiting or running:
    for slot in range(args.batch_size):
        if slot in running or not waiting:
            continue
        prompt, ids = waiting.pop(0)
        length = torch.arange(len(ids)).unsqueeze(0)
        [new] = forward(model, torch.tensor([ids]), torch.ones_like(length), length, torch.tensor([slot]))
        running[slot] = (prompt, len(ids), new)
    for slot in [slot for slot, (_, _, tokens) in running.items() if ended(tokens)]:
        finish(slot)
    if running:
        slots = sorted(running)
        newest = torch.tensor([[running[slot][2][-1]] for slot in slots])
        at = torch.tensor([[running[slot][1] + len(running[slot][2]) - 1] for slot in slots])
        mask = (torch.arange(int(at.max())) < at).long()
        for slot, new in zip(slots, forward(model, newest, mask, at, torch.tensor(slots)), strict=True):
            running[slot][2].extend(new)
