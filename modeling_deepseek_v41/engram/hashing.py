# SPDX-License-Identifier: Apache-2.0
"""The engram's hash: which table rows belong to the n-grams that end at a position (docs/model.md, section 8).

The functions on tensors read nothing back to the host and have static shapes, so they can be traced and compiled.
"""

import dataclasses
from itertools import accumulate

import numpy as np
import torch
from sympy import nextprime

from ..config import ModelConfig
from ..errors import ConfigError

SEED = 10007
INT64_MAX = 2**63 - 1

LIMB_BITS = 14
LIMBS = 5
"""5 limbs of 14 bits hold every hash, which is below 2^63."""

MAX_ROWS = 2**31
MAX_PRIME = 2**30
"""What 32-bit row ids and remainders stay below."""


@dataclasses.dataclass(frozen=True)
class EngramLayout:
    """The constants of one engram layer.

    ``multipliers`` has one entry per n-gram slot (slot t is the token t positions back); ``primes`` and ``offsets`` one
    per column, ordered by n-gram size (2 first), then by head; ``rows`` is the table's size, the sum of the primes.
    """

    layer: int
    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def engram_primes(config: ModelConfig) -> list[list[int]]:
    """The primes of each layer of ``config.engram_layer_ids`` in that order: (n - 1) * engram_n_heads each.

    Every n-gram size of every layer draws the next unused primes from engram_vocab_size on. As all draw from the same
    start, they are consecutive primes. The tables' sizes are the sums. Source: docs/model.md, section 8.
    """
    primes = []
    last = config.engram_vocab_size - 1
    for _ in config.engram_layer_ids:
        primes.append([last := nextprime(last) for _ in range(config.engram_columns)])
    return primes


def engram_layouts(config: ModelConfig) -> tuple[EngramLayout, ...]:
    """The constants of each layer of ``config.engram_layer_ids``, in that order; empty without engram layers.

    Raises ConfigError where engram_num_embeddings is not the sum of a layer's primes. Source: docs/model.md, section 8.
    """
    layouts = []
    for layer, primes, found in zip(config.engram_layer_ids, engram_primes(config), config.engram_num_embeddings, strict=False):
        rows = sum(primes)
        if found != rows:
            raise ConfigError(
                f"{config.source}: engram_num_embeddings: layer {layer} has {found}, expected {rows}, the sum of its "
                f"{len(primes)} primes from engram_vocab_size {config.engram_vocab_size} on; correct engram_num_embeddings, "
                f"or the engram_vocab_size, engram_n_heads, engram_max_ngram_size or engram_layer_ids it follows from"
            )
        layouts.append(
            EngramLayout(
                layer=layer,
                multipliers=_multipliers(layer, config),
                primes=tuple(primes),
                offsets=tuple(accumulate(primes[:-1], initial=0)),
                rows=rows,
            )
        )
    return tuple(layouts)


def lookback(tokens: torch.Tensor, alive: torch.Tensor, n: int, pad: int | torch.Tensor) -> torch.Tensor:
    """The n newest compressed ids at every position of a call: ``windows`` [B, T, n] of the dtype of ``tokens``.

    ``tokens`` [B, n-1+T] int: the compressed ids of the n-1 positions before the call, then the call's T, contiguous.
    ``alive`` [B, n-1+T] bool: False where no position exists (before the sequence's start) and at dead tokens (any
    position of an image span); what ``tokens`` holds there does not matter. ``pad``: the compressed id of
    engram_pad_token_id. Slot t of position p is the token at p-t where p, p-1, ..., p-t are all alive, else ``pad``; a
    dead p is all ``pad``. Source: docs/model.md, section 8.

    Torch operations: slicing, and, where, stack.
    """
    length = tokens.shape[1] - (n - 1)
    slots = []
    reaches = torch.ones_like(alive[:, n - 1 :])
    for back in range(n):
        first = n - 1 - back
        reaches = reaches & alive[:, first : first + length]
        slots.append(torch.where(reaches, tokens[:, first : first + length], pad))
    return torch.stack(slots, dim=-1)


def row_ids(windows: torch.Tensor, layout: EngramLayout) -> torch.Tensor:
    """Table rows int64 [B, T, columns] of ``windows`` (any int dtype, [B, T, n]), computed in int64.

    Exact: a compressed id times a multiplier is below 2^63, so nothing wraps and every hash is 0 or more.
    Source: docs/model.md, section 8. Torch operations on int64: mul, xor, remainder, add.
    """
    device = windows.device
    multipliers = torch.tensor(layout.multipliers, dtype=torch.int64, device=device)
    products = (windows.to(torch.int64) * multipliers).unbind(dim=-1)
    sizes = len(products) - 1
    hashes = torch.stack(list(accumulate(products, torch.bitwise_xor))[1:], dim=-1)
    primes = torch.tensor(layout.primes, dtype=torch.int64, device=device).view(sizes, -1)
    offsets = torch.tensor(layout.offsets, dtype=torch.int64, device=device).view(sizes, -1)
    return (hashes.unsqueeze(-1) % primes + offsets).flatten(-2)


def row_ids_limbs(windows: torch.Tensor, layout: EngramLayout) -> torch.Tensor:
    """Table rows int32 [B, T, columns], equal to ``row_ids``, computed in int32 only, for devices without a sound int64.

    ``windows`` int [B, T, n], compressed ids below 2^30. Products and hashes are held as 5 limbs of 14 bits; every
    intermediate is 0 or more and below 2^31, so that nothing wraps. The remainder is taken from the top limb down, with
    as many new bits per step as fit beside a residue: 10 remainders for the release's 24-bit primes, against 1 in int64.

    Raises ConfigError where the layer's rows or primes do not fit into 32 bits. Source: docs/model.md, section 8.
    Torch operations on int32: mul, add, sub, and, xor, right shift, remainder. A device must do mul, add and remainder exactly
    up to 2^31; compare with ``row_ids`` on a new kind of device.
    """
    if layout.rows >= MAX_ROWS or max(layout.primes) >= MAX_PRIME:
        raise ConfigError(
            f"engram layer {layout.layer}: 32-bit row ids need fewer than {MAX_ROWS} rows and primes below {MAX_PRIME}, "
            f"found {layout.rows} rows and a prime of {max(layout.primes)}; run on a device with 64-bit integers (row_ids)"
        )
    products = _product_limbs(windows.to(torch.int32), layout.multipliers).unbind(dim=-2)
    sizes = len(products) - 1
    hashes = torch.stack(list(accumulate(products, torch.bitwise_xor))[1:], dim=-2)
    primes = torch.tensor(layout.primes, dtype=torch.int32, device=windows.device).view(sizes, -1)
    offsets = torch.tensor(layout.offsets, dtype=torch.int32, device=windows.device).view(sizes, -1)
    return (_remainder(hashes, primes, 31 - max(layout.primes).bit_length()) + offsets).flatten(-2)


def _multipliers(layer: int, config: ModelConfig) -> tuple[int, ...]:
    bound = max(1, INT64_MAX // config.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(SEED * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return tuple(int(value) * 2 + 1 for value in drawn)


def _product_limbs(windows: torch.Tensor, multipliers: tuple[int, ...]) -> torch.Tensor:
    """``windows`` int32 [..., n] times ``multipliers`` as limbs int32 [..., n, LIMBS], lowest first.

    A window value has a low limb and up to 16 bits above it: a sum is below 2^28 + 2^30 + its carry, below 2^31.
    XLA turns a right shift into a division, so the low bits are cleared first: what is divided has at most 17 significant
    bits and comes out exact in fp32 arithmetic too.
    """
    mask = 2**LIMB_BITS - 1
    by_limb = [[value >> (LIMB_BITS * i) & mask for value in multipliers] for i in range(LIMBS)]
    factors = torch.tensor(by_limb, dtype=torch.int32, device=windows.device)
    low = windows & mask
    high = (windows - low) >> LIMB_BITS
    total = low * factors[0]
    limbs = [total & mask]
    for i in range(1, LIMBS):
        carry = (total - limbs[-1]) >> LIMB_BITS
        total = low * factors[i] + high * factors[i - 1] + carry
        limbs.append(total & mask)
    return torch.stack(limbs, dim=-1)


def _remainder(limbs: torch.Tensor, primes: torch.Tensor, free_bits: int) -> torch.Tensor:
    """Numbers given as ``limbs`` [..., sizes, LIMBS], modulo ``primes`` [sizes, heads]: int32 [..., sizes, heads].

    A residue has at most 31 - ``free_bits`` bits, so ``free_bits`` new ones fit below it.
    """
    residue = torch.zeros_like(primes)
    for limb in reversed(limbs.unsqueeze(-2).unbind(dim=-1)):
        for top in range(LIMB_BITS, 0, -free_bits):
            width = min(free_bits, top)
            bits = (limb >> (top - width)) & (2**width - 1)
            residue = (residue * 2**width + bits) % primes
    return residue
