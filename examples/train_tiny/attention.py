# SPDX-License-Identifier: Apache-2.0
"""Attention over a whole sequence: window, selected groups and sink (docs/model.md, section 4), differentiable."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41.config import ModelConfig
from modeling_deepseek_v41.formats import qdq_fp8
from modeling_deepseek_v41.rope import rotate

from .indexer import Groups, index_loss, select
from .quantise import straight_through
from .streams import FP32, norm
from .weights import Weights

CHUNK = 32
"""Queries that share one stretch of window keys."""


def attention(x: Tensor, w: Weights, name: str, layer: int, config: ModelConfig, table: Tensor, groups: Groups) -> Tensor:
    """x [B, T, d], a whole sequence from position 0, to the sublayer's output [B, T, d].

    ``table`` [1, T, 2, R] are the rotary rows of the layer's family. ``groups`` is what sources hand to the layers behind
    them; a source replaces it in place.
    """
    c, ratio = config, config.compress_ratios[layer]
    q, qr = queries(x, w, name, c, table)
    kv = window_kv(x, w, name, c, table, groups.quantises)
    if layer in c.kv_source_layer_ids:
        groups.compress(x, w, name, ratio, c, table)
    if layer in c.index_source_layer_ids:
        select(x, qr, w, name, layer, c, table, groups)
    near, keys = _window_scores(q, kv, c.sliding_window)
    valid = _in_window(x.shape[1], c.sliding_window).unsqueeze(0)
    scores = [near]
    if ratio:
        far = torch.matmul(q.flatten(1, 2), groups.kv.mT).unflatten(1, q.shape[1:3])
        if layer in c.index_source_layer_ids:
            index_loss(x, qr, far, w, name, c, table, groups)
        scores.append(far)
        valid = torch.cat([valid.expand(x.shape[0], -1, -1), groups.chosen], -1)
    p = softmax_with_sink(scores, valid.unsqueeze(2), w[f"{name}.attn_sink"])
    o = _window_values(p[..., : near.shape[-1]], keys)
    if ratio:
        o = o + torch.matmul(p[..., near.shape[-1] :].flatten(1, 2), groups.kv).view(o.shape)
    return output(rotate(o, table, FP32, back=True), w, name, c)


def queries(x: Tensor, w: Weights, name: str, config: ModelConfig, table: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, d] to rotated queries [B, T, H, D], times D^-0.5, and their latent [B, T, q rank]."""
    qr = norm(F.linear(x, w[f"{name}.wq_a"]), w, f"{name}.q_norm", config)
    q = F.linear(qr, w[f"{name}.wq_b"] * config.head_dim**-0.5).unflatten(-1, (-1, config.head_dim))
    return rotate(q, table, FP32), qr


def window_kv(x: Tensor, w: Weights, name: str, config: ModelConfig, table: Tensor, quantises: bool) -> Tensor:
    """x [B, T, d] to the latent that is key and value of all heads: [B, T, D]."""
    kv = rotate(norm(F.linear(x, w[f"{name}.wkv"]), w, f"{name}.kv_norm", config), table, FP32)
    return straight_through(kv, qdq_fp8) if quantises else kv


def softmax_with_sink(scores: list[Tensor], valid: Tensor, sink: Tensor) -> Tensor:
    """Probabilities of all ``scores`` [B, T, H, n] where ``valid``, beside one more key of score ``sink`` [H], no value."""
    last = sink.view(-1, 1).expand(*scores[0].shape[:-1], 1)
    hidden = F.pad(~valid, (0, 1), value=False)
    return torch.cat([*scores, last], -1).masked_fill_(hidden, -torch.inf).softmax(-1)[..., :-1]


def output(o: Tensor, w: Weights, name: str, config: ModelConfig) -> Tensor:
    """The heads' values [B, T, H, D], rotated back, through the grouped projection and wo_b: [B, T, d]."""
    rows = o.flatten(0, 1).view(-1, config.o_groups, o.shape[2] * o.shape[3] // config.o_groups).transpose(0, 1)
    low = torch.bmm(rows, w[f"{name}.wo_a"].view(config.o_groups, config.o_lora_rank, -1).mT)
    return F.linear(low.transpose(0, 1).flatten(1), w[f"{name}.wo_b"]).view(*o.shape[:2], -1)


def _window_scores(q: Tensor, kv: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Scores [B, T, H, window + CHUNK] of queries against the stretch of keys of their chunk, and the stretches."""
    batch, tokens, heads, _ = q.shape
    extra = -tokens % CHUNK
    keys = F.pad(kv, (0, 0, window, extra)).unfold(1, window + CHUNK, CHUNK)
    chunks = F.pad(q, (0, 0, 0, 0, 0, extra)).unflatten(1, (-1, CHUNK)).flatten(2, 3)
    return torch.matmul(chunks, keys).view(batch, tokens + extra, heads, -1)[:, :tokens], keys


def _window_values(p: Tensor, keys: Tensor) -> Tensor:
    """Probabilities [B, T, H, window + CHUNK] times the keys of ``_window_scores``: [B, T, H, D]."""
    batch, tokens, heads, _ = p.shape
    chunks = F.pad(p, (0, 0, 0, 0, 0, -tokens % CHUNK)).unflatten(1, (-1, CHUNK)).flatten(2, 3)
    return torch.matmul(chunks, keys.mT).view(batch, -1, heads, keys.shape[2])[:, :tokens]


@functools.cache
def _in_window(tokens: int, window: int) -> Tensor:
    """Which keys of its chunk's stretch each query sees: bool [T, window + CHUNK]."""
    query = torch.arange(tokens).unsqueeze(1)
    key = query // CHUNK * CHUNK - window + torch.arange(window + CHUNK)
    return (key >= 0) & (key <= query) & (key > query - window)
