# SPDX-License-Identifier: Apache-2.0
"""On the host: the weights of a hyper-connection as the kernel of a sublayer's input reads them."""

import torch
from torch import Tensor

PARTITIONS = 128


def part_width(dim: int, cores: int) -> int:
    """W: columns of one part of a stream, as many as divide a core's share of ``dim`` and fit the partitions."""
    return max(width for width in range(1, PARTITIONS + 1) if dim // cores % width == 0)


def fits(hc: int, dim: int, cores: int) -> bool:
    """Whether a row's parts, and its mixes, have a partition each."""
    return dim % cores == 0 and dim // cores // part_width(dim, cores) <= PARTITIONS and (2 + hc) * hc <= PARTITIONS


def pack_streams(fn: Tensor, hc: int, cores: int) -> Tensor:
    """fn [(2 + hc) hc, hc d] fp32 to [C, W, hc J, (2 + hc) hc], the mixes in the order of ``by_stream``.

    Core c has columns c d / C on of every stream, in J parts of W: value w of part j of stream s on partition w, at s J + j.
    """
    dim = fn.shape[1] // hc
    width = part_width(dim, cores)
    split = by_stream(fn.mT, hc).flatten(-2).view(hc, cores, -1, width, fn.shape[0])
    return split.permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous()


def by_stream(mixes: Tensor, hc: int) -> Tensor:
    """Mixes [..., (2 + hc) hc], pre, post and comb (from, to), to [..., hc, 2 + hc]: a stream's pre, post and comb from it."""
    gates, comb = mixes[..., : 2 * hc].unflatten(-1, (2, hc)).mT, mixes[..., 2 * hc :].unflatten(-1, (hc, hc))
    return torch.cat([gates, comb], -1)
