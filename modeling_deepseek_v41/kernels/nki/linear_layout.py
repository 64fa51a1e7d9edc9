# SPDX-License-Identifier: Apache-2.0
"""On the host: a linear's weight in the order in which its kernel streams it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import CheckpointError
from ...fp8_exact import ExactRows

PARTITIONS, BANK = 128, 512


def pack(weight: Tensor, cores: int) -> Tensor:
    """weight [n, k], any dtype of at most 4 bytes, to [C, min(k, 128), ceil(k / 128) * ceil(n / C)], the same dtype.

    Core c has output columns c * ceil(n / C) on. Its stream has tiles of up to 512 of them one after the other, and of each
    the tiles of 128 values of k, value t * 128 + p on partition p. What fills up is 0 and is not read.
    """
    n, k = weight.shape
    share, parts = -(-n // cores), min(k, PARTITIONS)
    filled = F.pad(weight.float(), (0, -k % parts, 0, share * cores - n)).to(weight.dtype)
    by_partition = filled.view(cores, share, -1, parts).permute(0, 3, 2, 1)
    return torch.cat([tile.flatten(2) for tile in by_partition.split(BANK, -1)], -1).contiguous()


def pack_exact(rows: ExactRows, cores: int) -> tuple[Tensor, Tensor]:
    """fp8_exact rows to their codes, packed as uint8, and the scales [1, n] fp32: the kernel's ``weight`` and ``scale``.

    Raises CheckpointError where a row is not exact.
    """
    if not rows.exact.all():
        count = int((~rows.exact).sum())
        raise CheckpointError(f"linear: {count} of {len(rows.exact)} rows are not fp8_exact; keep it in bf16")
    return pack(rows.codes, cores), torch.ldexp(torch.ones(1, len(rows.base)), rows.base)
