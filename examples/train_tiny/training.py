# SPDX-License-Identifier: Apache-2.0
"""The two loops: the backbone on the text, then the drafter on what the frozen backbone says of it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.progress import Progress

from .backbone import run_backbone
from .drafter import run_drafter
from .optimiser import Optimiser, schedule
from .quantise import as_stored
from .text import crops
from .weights import Weights, is_drafter, stored

TOKENS = 2048
"""Tokens of a step."""

SHORT, LONG = 256, 1024
"""Tokens of a sequence, at first and at the end."""

QUANTISED_FROM, LONG_FROM = 0.6, 0.85
"""Shares of the backbone's steps after which it sees its weights as they are stored; long sequences and quantised caches."""

PLACE_STRIDE = 4
"""The drafter is trained at every so many positions of a sequence."""

LATER_DRAFTS = 0.8
"""What a draft counts for in the loss, compared with the one before it: a late one matters only if all before are kept."""

BALANCE = 0.01
"""How far a step moves the router's bias of an expert that had too few or too many tokens."""


class Corpus(NamedTuple):
    """What both loops learn from."""

    ids: Tensor
    """[n] int64, the text to train on."""
    bos: int
    bytes_per_token: float
    token_map: Tensor
    """[vocab] int32, the engram's compressed ids."""

    def bits_per_byte(self, nats: float) -> float:
        """Nats per token of this text as bits per byte."""
        return nats / math.log(2) / self.bytes_per_token


def train_backbone(weights: dict[str, Tensor], config: ModelConfig, corpus: Corpus, steps: int, seed: int) -> list[float]:
    """Trains the backbone's ``weights`` in place on random pieces of the corpus; bits per byte of each step's text."""
    trained = {name: weight for name, weight in weights.items() if not is_drafter(name)}
    kinds, optimiser = stored(config), Optimiser(trained)
    generator = torch.Generator().manual_seed(seed)
    bar, history = Progress(steps * TOKENS, "tokens", "training the backbone"), []
    for step in range(steps):
        is_long = step >= LONG_FROM * steps
        length = LONG if is_long else SHORT
        ids, targets = crops(corpus.ids, corpus.bos, TOKENS // length, length, generator)
        seen = as_stored(trained, kinds) if step >= QUANTISED_FROM * steps else trained
        result = run_backbone(ids, seen, config, corpus.token_map, quantises=is_long, learns=True)
        loss = F.cross_entropy(result.logits.flatten(0, 1), targets.flatten())
        (loss + result.index_loss).backward()
        rate = schedule(step, steps)
        optimiser.step(rate)
        balance(weights, result.loads, BALANCE * rate)
        history.append(corpus.bits_per_byte(loss.item()))
        bar.update(TOKENS)
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            index = result.index_loss.item()
            print(f"backbone, step {step} of {steps}: {history[-1]:.3f} bits per byte, index loss {index:.3f}", flush=True)
    bar.close()
    return history


def train_drafter(weights: dict[str, Tensor], config: ModelConfig, corpus: Corpus, steps: int, seed: int) -> list[float]:
    """Trains the drafter's ``weights`` in place; the backbone's are as they are stored and do not change.

    The drafts learn the backbone's distributions at the same positions, the confidence whether the draft is the
    backbone's own choice. Returns the share of drafts that are, step by step.
    """
    kinds = stored(config)
    with torch.no_grad():
        backbone = as_stored({name: weight for name, weight in weights.items() if not is_drafter(name)}, kinds)
    trained = {name: weight for name, weight in weights.items() if is_drafter(name)}
    optimiser = Optimiser(trained)
    generator = torch.Generator().manual_seed(seed)
    k, bar = config.dspark_block_size, Progress(steps * TOKENS, "tokens", "training the drafter")
    worth, history = LATER_DRAFTS ** torch.arange(k), []
    for step in range(steps):
        ids, _ = crops(corpus.ids, corpus.bos, TOKENS // SHORT, SHORT, generator)
        with torch.no_grad():
            seen = run_backbone(ids, backbone, config, corpus.token_map, quantises=True)
        first = int(torch.randint(PLACE_STRIDE, (), generator=generator))
        places = torch.arange(first, SHORT - k, PLACE_STRIDE).expand(ids.shape[0], -1)
        rows = torch.arange(ids.shape[0]).view(-1, 1, 1)
        at = places.unsqueeze(-1) + 1 + torch.arange(k)
        wanted = seen.logits[rows, at]
        result = run_drafter(seen.taps, places, ids[rows, at], backbone | as_stored(trained, kinds), config, quantises=True)
        loss = -(wanted.softmax(-1) * result.logits.log_softmax(-1)).sum(-1)
        agrees = result.logits.detach().argmax(-1) == wanted.argmax(-1)
        doubt = F.binary_cross_entropy_with_logits(result.confidence, agrees.float())
        ((loss * worth).mean() + doubt).backward()
        rate = schedule(step, steps)
        optimiser.step(rate)
        balance(weights, result.loads, BALANCE * rate)
        history.append(agrees.float().mean().item())
        bar.update(TOKENS)
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            shares = " ".join(f"{share:.2f}" for share in agrees.float().mean((0, 1)).tolist())
            print(f"drafter, step {step} of {steps}: drafts that are the backbone's choice {shares}", flush=True)
    bar.close()
    return history


def balance(weights: Weights, loads: dict[str, Tensor], rate: float) -> None:
    """Moves every router's bias towards experts that got fewer tokens than the mean."""
    for name, load in loads.items():
        weights[name].add_((load.float().mean() - load).sign(), alpha=rate)
