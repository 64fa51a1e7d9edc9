# SPDX-License-Identifier: Apache-2.0
"""On the host: a linear's weight in the order in which its kernel streams it."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import CheckpointError
from ...formats import decode_ue8m0
from ...fp8_exact import ExactRows

PARTITIONS, BANK, GROUP = 128, 512, 32
LARGEST = 240.0
"""Of trn2's e4m3."""


class BlockWeight(NamedTuple):
    """The operands of kernels/nki/block_linear.py, and how many weights lost their last bit."""

    codes: Tensor
    """[C, min(k, 128), ceil(k / 128) S] uint8, codes of trn2's e4m3."""
    scale: Tensor
    """[C, 4, ceil(k / 128), S / 32] bf16: of the q-th 32 values of each tile of k, per 32 output columns."""
    inexact: int


def pack(weight: Tensor, cores: int, tile: int = BANK) -> Tensor:
    """weight [n, k], any dtype of at most 4 bytes, to [C, min(k, 128), ceil(k / 128) * ceil(n / C)], the same dtype.

    Core c has output columns c * ceil(n / C) on. Its stream has tiles of up to ``tile`` of them one after the other, and of
    each the tiles of 128 values of k, value t * 128 + p on partition p. What fills up is 0 and is not read.
    """
    n, k = weight.shape
    share, parts = -(-n // cores), min(k, PARTITIONS)
    filled = F.pad(weight.float(), (0, -k % parts, 0, share * cores - n)).to(weight.dtype)
    by_partition = filled.view(cores, share, -1, parts).permute(0, 3, 2, 1)
    return torch.cat([one.flatten(2) for one in by_partition.split(tile, -1)], -1).contiguous()


def pack_blocks(weight: Tensor, scale: Tensor, cores: int) -> BlockWeight:
    """An fp8 weight [n, k] (e4m3fn) with its ue8m0 scales [n / 32, k / 32]; n and k are multiples of 32.

    trn2's e4m3 ends at 240. Blocks with a larger value are halved and their scale doubled; a subnormal with an odd last bit,
    or one of the least normal binade, then rounds to even.
    """
    n, k = weight.shape
    if n % GROUP or k % GROUP:
        raise CheckpointError(f"block linear: weight {(n, k)} is no whole number of {GROUP} x {GROUP} blocks; keep it in bf16")
    values = weight.float().view(n // GROUP, GROUP, k // GROUP, GROUP)
    halved = values.abs().amax((1, 3), keepdim=True) > LARGEST
    target = torch.where(halved, values / 2, values)
    codes = target.to(torch.float8_e4m3fn)
    inexact = int((codes.float() != target).sum())
    doubled = decode_ue8m0(scale) * torch.where(halved[:, 0, :, 0], 2.0, 1.0)
    filled = F.pad(doubled, (0, -(k // GROUP) % 4, 0, -(n // GROUP) % cores))
    by_core = filled.view(cores, -1, filled.shape[1] // 4, 4).permute(0, 3, 2, 1)
    stored = F.pad(codes.view(torch.uint8).view(n, k), (0, 0, 0, -n % (GROUP * cores)))
    return BlockWeight(pack(stored, cores, PARTITIONS), by_core.bfloat16().contiguous(), inexact)


def pack_exact(rows: ExactRows, cores: int) -> tuple[Tensor, Tensor]:
    """fp8_exact rows to their codes, packed as uint8, and the scales [1, n] fp32: the kernel's ``weight`` and ``scale``.

    Raises CheckpointError where a row is not exact.
    """
    if not rows.exact.all():
        count = int((~rows.exact).sum())
        raise CheckpointError(f"linear: {count} of {len(rows.exact)} rows are not fp8_exact; keep it in bf16")
    return pack(rows.codes, cores), rows.scale.unsqueeze(0)
