# SPDX-License-Identifier: Apache-2.0
"""The text model of docs/model.md once more, as plainly as it can be written: float64, whole sequences, no state, no QDQ.

Shares no code with the package but the configuration object. Weights are read from the files and decoded by ml_dtypes.
"""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open
from sympy import nextprime
from tokenizers import Regex, Tokenizer, normalizers

from modeling_deepseek_v41.config import ModelConfig, load_config

Array = np.ndarray


class NaiveModel:
    """The backbone in ``folder``; ``logits(ids)`` is all there is."""

    def __init__(self, folder: Path):
        self.folder, self.c = folder, load_config(folder)
        self.files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
        self.at = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118

    def logits(self, ids: list[int]) -> Array:
        """[T] to [T, vocab]."""
        c = self.c
        x = np.repeat(self.w("embed.weight")[ids][:, None], c.hc_mult, 1)
        pre = np.zeros((len(ids), c.hc_mult))
        pre[:, 0] = 1
        self.shared: dict[str, Array] = {}
        for layer in range(c.num_hidden_layers):
            name = f"layers.{layer}."
            if layer in c.engram_layer_ids:
                x = self.engram(name + "engram.", layer, x, ids)
            attn_pre, post, comb = self.mixes(name + "hc_attn", x)
            y = self.attention(name + "attn.", layer, self.norm(name + "attn_norm.weight", collapse(x, pre)))
            x = expand(y, x, post, comb)
            pre, post, comb = self.mixes(name + "hc_ffn", x)
            y = self.experts(name + "ffn.", self.norm(name + "ffn_norm.weight", collapse(x, attn_pre)))
            x = expand(y, x, post, comb)
        return self.norm("norm.weight", collapse(x, pre)) @ self.w("head.weight").T

    def w(self, name: str) -> Array:
        """A stored tensor, float64; ``name`` without .weight means a quantised one with its scales."""
        if name in self.at:
            return self.at[name].get_tensor(name).double().numpy()
        weight, scale = (self.at[f"{name}.{part}"].get_tensor(f"{name}.{part}") for part in ("weight", "scale"))
        factors = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        raw = weight.view(torch.uint8).numpy()
        if weight.dtype == torch.int8:
            nibbles = np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
            return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.repeat(factors, 32, 1)
        values = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        rows = 1 if len(factors) == len(values) and name.endswith("embed") else 32
        return values * np.repeat(np.repeat(factors, rows, 0)[: len(values)], 32, 1)[:, : values.shape[1]]

    def norm(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c.rms_norm_eps) * self.w(name)

    def mixes(self, name: str, x: Array) -> tuple[Array, Array, Array]:
        hc, eps = self.c.hc_mult, self.c.hc_eps
        f = x.reshape(len(x), -1)
        m = f @ self.w(name + "_fn").T / np.sqrt((f**2).mean(-1, keepdims=True) + self.c.rms_norm_eps)
        scale, base = self.w(name + "_scale"), self.w(name + "_base")
        pre = sigmoid(m[:, :hc] * scale[0] + base[:hc]) + eps
        post = 2 * sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = softmax((m[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(-1, hc, hc)) + eps
        comb = comb / (comb.sum(1, keepdims=True) + eps)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return pre, post, comb

    def rotate(self, x: Array, positions: Array, compressed: bool, sign: int = 1) -> Array:
        """The last R columns of x [n, ..., D] turned to ``positions`` [n]."""
        c, r = self.c, self.c.qk_rope_head_dim
        theta = c.compress_rope_theta if compressed else c.rope_theta
        f = theta ** (-np.arange(0, r, 2) / r)
        if compressed and c.rope_scaling is not None:
            s = c.rope_scaling

            def dim(n: float) -> float:
                return r * math.log(s.original_max_position_embeddings / (2 * math.pi * n)) / (2 * math.log(theta))

            low, high = max(math.floor(dim(s.beta_fast)), 0), min(math.ceil(dim(s.beta_slow)), r - 1)
            ramp = np.clip((np.arange(r // 2) - low) / max(high - low, 0.001), 0, 1)
            f = f * (1 - ramp + ramp / s.factor)
        turn = np.exp(sign * 1j * positions[:, None] * f).reshape(len(x), *[1] * (x.ndim - 2), r // 2)
        z = (x[..., -r::2] + 1j * x[..., x.shape[-1] - r + 1 :: 2]) * turn
        return np.concatenate([x[..., :-r], np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], r)], -1)

    def attention(self, name: str, layer: int, x: Array) -> Array:
        c, t = self.c, len(x)
        ratio, positions = c.compress_ratios[layer], np.arange(t)
        qr = self.norm(name + "q_norm.weight", x @ self.w(name + "wq_a").T)
        q = self.rotate((qr @ self.w(name + "wq_b").T).reshape(t, -1, c.head_dim), positions, ratio > 0)
        kv = self.rotate(self.norm(name + "kv_norm.weight", x @ self.w(name + "wkv").T), positions, ratio > 0)
        if layer in c.kv_source_layer_ids:
            self.compress(name, x, ratio)
        if layer in c.index_source_layer_ids:
            self.select(name, layer, x, qr, ratio)
        sink = self.w(name + "attn_sink")
        o = np.zeros_like(q)
        for p in range(t):
            keys = kv[max(0, p - c.sliding_window + 1) : p + 1]
            if ratio:
                keys = np.concatenate([keys, self.shared["ckv"][self.shared["chosen"][p]]])
            e = np.exp(q[p] @ keys.T * c.head_dim**-0.5)
            o[p] = e @ keys / (e.sum(-1) + np.exp(sink))[:, None]
        o = self.rotate(o, positions, ratio > 0, -1).reshape(t, c.o_groups, -1)
        low = np.einsum("tgk,gnk->tgn", o, self.w(name + "wo_a").reshape(c.o_groups, c.o_lora_rank, -1))
        return low.reshape(t, -1) @ self.w(name + "wo_b").T

    def compress(self, name: str, x: Array, ratio: int) -> None:
        groups = len(x) // ratio
        latent = x @ self.w(name + "compressor.wkv.weight").T
        if ratio > 1:
            cut = groups * ratio
            score = (x @ self.w(name + "compressor.wgate.weight").T)[:cut].reshape(groups, ratio, -1)
            weights = np.exp(score - score.max(1, keepdims=True)) if groups else score
            latent = (latent[:cut].reshape(groups, ratio, -1) * weights / weights.sum(1, keepdims=True)).sum(1)
        latent = self.norm(name + "compressor.norm.weight", latent)
        first = np.arange(groups) * ratio
        key = self.norm(name + "indexer.k_norm.weight", latent @ self.w(name + "indexer.wk.weight").T)
        self.shared["ckv"], self.shared["key"] = (self.rotate(part, first, True) for part in (latent, key))

    def select(self, name: str, layer: int, x: Array, qr: Array, ratio: int) -> None:
        c, t, key = self.c, len(x), self.shared["key"]
        q = self.rotate((qr @ self.w(name + "indexer.wq_b").T).reshape(t, c.index_n_heads, -1), np.arange(t), True)
        weights = x @ self.w(name + "indexer.weights_proj.weight").T * (c.index_head_dim * c.index_n_heads) ** -0.5
        score = (np.maximum(np.einsum("thd,gd->thg", q, key), 0) * weights[..., None]).sum(1)
        size, chosen, blocks = c.candidate_block_size, [], []
        for p in range(t):
            seen = (p + 1) // ratio
            groups = list(range(seen))
            if layer == c.candidate_source_layer_id:
                best = {b: max(score[p, b * size : min(seen, (b + 1) * size)]) for b in range(-(-seen // size))}
                best |= {(seen - 1) // size: math.inf} if seen else {}
                blocks.append(set(sorted(best, key=lambda b: (-best[b], b))[: c.candidate_topk_blocks]))
            elif 0 <= c.candidate_source_layer_id < layer:
                groups = [g for g in groups if g // size in self.shared["blocks"][p]]
            chosen.append(sorted(sorted(groups, key=lambda g: (-score[p, g], g))[: c.index_topk]))
        self.shared["chosen"] = chosen
        if blocks:
            self.shared["blocks"] = blocks

    def experts(self, name: str, x: Array) -> Array:
        c = self.c
        score = np.sqrt(np.logaddexp(0, x @ self.w(name + "gate.weight").T))
        order = np.argsort(-(score + self.w(name + "gate.bias")), axis=-1, kind="stable")[:, : c.num_experts_per_tok]
        out = self.expert(name + "shared_experts.", x, np.ones(len(x)))
        weights = np.take_along_axis(score, order, 1)
        if c.norm_topk_prob and c.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        for e in range(c.n_routed_experts):
            rows, place = np.nonzero(order == e)
            out[rows] += self.expert(f"{name}experts.{e}.", x[rows], weights[rows, place] * c.routed_scaling_factor)
        return out

    def expert(self, name: str, x: Array, weight: Array) -> Array:
        gate, up, limit = x @ self.w(name + "w1").T, x @ self.w(name + "w3").T, self.c.swiglu_limit
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (gate * sigmoid(gate) * up * weight[:, None]) @ self.w(name + "w2").T

    def engram(self, name: str, layer: int, x: Array, ids: list[int]) -> Array:
        c = self.c
        rows = self.w(name + "embed")[self.rows(layer, ids)].reshape(len(ids), -1)
        kv = (rows @ self.w(name + "wkv").T).reshape(len(ids), c.hc_mult + 1, -1)
        key, value = kv[:, :-1], kv[:, -1:]
        dot = (x * self.w(name + "q_weight") * self.w(name + "k_weight") * key).sum(-1) * c.hidden_size**-0.5
        for part in (x, key):
            dot = dot / np.sqrt((part**2).mean(-1) + c.rms_norm_eps)
        gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6)))
        return x + gate[..., None] * value

    def rows(self, layer: int, ids: list[int]) -> Array:
        """Table rows [T, columns], in Python's integers."""
        c, n, compressed = self.c, self.c.engram_max_ngram_size, token_classes(self.folder, self.c)
        bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
        multipliers = np.random.default_rng(10007 * layer).integers(0, bound, size=n, dtype=np.int64) * 2 + 1
        last, primes = c.engram_vocab_size - 1, {}
        for each in c.engram_layer_ids:
            primes[each] = [last := nextprime(last) for _ in range((n - 1) * c.engram_n_heads)]
        offsets = np.cumsum([0, *primes[layer]])[:-1]
        table = np.zeros((len(ids), len(offsets)), np.int64)
        for p in range(len(ids)):
            mixed = 0
            for back in range(n):
                token = compressed[ids[p - back]] if p >= back else compressed[c.engram_pad_token_id]
                mixed ^= token * int(multipliers[back])
                for head in range(c.engram_n_heads if back else 0):
                    column = (back - 1) * c.engram_n_heads + head
                    table[p, column] = mixed % primes[layer][column] + offsets[column]
        return table


def token_classes(folder: Path, c: ModelConfig) -> list[int]:
    """Compressed id of every token."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = (normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase())
    fold = normalizers.Sequence([*parts, normalizers.Replace(Regex(r"[ \t\r\n]+"), " ")])
    classes: dict[str, int] = {}
    found = []
    for token in range(c.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) or text
        if "\ufffd" not in text:
            folded = fold.normalize_str(text)
            key = folded if folded == " " else folded.strip() or text
        found.append(classes.setdefault(key, len(classes)))
    return found


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def collapse(x: Array, pre: Array) -> Array:
    return (pre[..., None] * x).sum(1)


def expand(y: Array, residual: Array, post: Array, comb: Array) -> Array:
    return post[..., None] * y[:, None] + np.einsum("tij,tid->tjd", comb, residual)
