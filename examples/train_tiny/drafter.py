# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter at many places of a text at once (docs/model.md, section 9), differentiable."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.rope import rotate

from .attention import output, queries, softmax_with_sink, window_kv
from .backbone import block, fresh_streams, tables
from .streams import FP32, collapse, norm
from .weights import Weights


class Drafted(NamedTuple):
    """What the drafter says at each place, k = dspark_block_size drafts long."""

    logits: Tensor
    """[B, A, k, vocab]: of the draft behind each of the known tokens."""
    confidence: Tensor
    """[B, A, k], raw."""
    loads: dict[str, Tensor]
    """Tokens per expert of every stage, by the name of its router's bias."""


def run_drafter(
    taps: Tensor, places: Tensor, known: Tensor, w: Weights, config: ModelConfig, quantises: bool = False
) -> Drafted:
    """Drafts behind committed positions ``places`` [B, A] of whole sequences with taps [B, T, targets * d].

    ``known`` [B, A, k]: the newest token, at position place + 1, then the tokens behind it, which the Markov and confidence
    heads are told one by one as if all earlier drafts had been accepted.
    """
    c, k = config, config.dspark_block_size
    main_x = norm(F.linear(taps, w["mtp.0.main_proj"]), w, "mtp.0.main_norm", c)
    table = tables(c, False, taps.shape[1] + k)
    behind = (places.unsqueeze(-1) + 1 + torch.arange(k)).flatten(0, 1)
    noise = torch.full_like(known[..., 1:], c.dspark_noise_token_id)
    start = torch.cat([known[..., :1], noise], -1).flatten(0, 1)
    x, pre = fresh_streams(F.embedding(start, w["embed"]), c.hc_mult)
    loads = {}
    for stage in range(c.num_nextn_predict_layers):
        name = f"mtp.{stage}"
        past = window_kv(main_x, w, f"{name}.attn", c, table[: taps.shape[1]].unsqueeze(0), quantises)
        attend = functools.partial(
            _attend, past=past, places=places, w=w, name=f"{name}.attn", c=c, table=table[behind], quantises=quantises
        )
        x, pre, loads[f"{name}.ffn.gate.bias"] = block(x, pre, w, name, c, attend, is_drafter=True)
    h = collapse(x, pre)
    before = F.embedding(known.flatten(0, 1), w[f"{name}.markov_head.embed"])
    logits = F.linear(norm(h, w, f"{name}.norm", c), w["head"]) + F.linear(before, w[f"{name}.markov_head.head"])
    confidence = F.linear(torch.cat([h.detach(), before.detach()], -1), w[f"{name}.confidence_head.proj"]).squeeze(-1)
    return Drafted(logits.unflatten(0, places.shape), confidence.unflatten(0, places.shape), loads)


def _attend(
    x: Tensor, past: Tensor, places: Tensor, w: Weights, name: str, c: ModelConfig, table: Tensor, quantises: bool
) -> Tensor:
    """Blocks x [B * A, k, d] over the window of ``past`` [B, T, D] that ends at their place, and over themselves."""
    q, _ = queries(x, w, name, c, table)
    own = window_kv(x, w, name, c, table, quantises)
    index = places.unsqueeze(-1) + torch.arange(1 - c.sliding_window, 1)
    rows = torch.arange(past.shape[0]).view(-1, 1, 1)
    keys = torch.cat([past[rows, index.clamp_min(0)].flatten(0, 1), own], 1)
    valid = F.pad(index.flatten(0, 1) >= 0, (0, x.shape[1]), value=True)
    scores = torch.matmul(q.flatten(1, 2), keys.mT).unflatten(1, q.shape[1:3])
    p = softmax_with_sink([scores], valid[:, None, None], w[f"{name}.attn_sink"])
    o = torch.matmul(p.flatten(1, 2), keys).view(q.shape)
    return output(rotate(o, table, FP32, back=True), w, name, c)
