# SPDX-License-Identifier: Apache-2.0
"""On the device: the RMSNorm of what a narrow linear gives in slots (slots.py), columns of a row on two cores.

The row sums of the squares come from a matmul with 0 and 1, as in rms_norm.py; the cores exchange theirs.
"""

import nki.isa as nisa
import nki.language as nl

from .exchange import exchange
from .fold import row_sums
from .rms_norm import rms_scale
from .slots import MOST_ROWS
from .split import BANK, PARTITIONS, tiles


def slot_norm(sums: list, weight: nl.NkiTensor, same_sb: nl.NkiTensor, eps: float, pipe: int) -> list:
    """RMSNorm of ``sums``, low_rank.share_sums of this core's columns, rounded before and behind: [used slots * 32, 128] bf16.

    weight [1, D] @ HBM, of both cores' columns. same_sb: fold.same_row of the slots. pipe: of the exchange.
    """
    part_sb = nl.ndarray((same_sb.shape[0], len(sums)), nl.float32, buffer=nl.sbuf)
    rounded: list = []
    for b in range(len(sums)):
        l_sb = nl.ndarray(sums[b].shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=l_sb, src=sums[b], engine=nisa.engine.scalar)
        square_sb = nl.ndarray(l_sb.shape, nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=square_sb, op=nl.square, data=l_sb, reduce_op=nl.add, reduce_res=part_sb[:, b : b + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )  # fmt: skip
        rounded.append(l_sb)
    scale_sb = norm_scale(part_sb, same_sb, weight.shape[1], eps, pipe)
    share = weight.shape[1] // nl.num_programs()
    found: list = []
    for first, width in tiles(share, BANK):
        used, at = width // PARTITIONS * MOST_ROWS, nl.program_id() * share + first
        l_sb = rounded[first // BANK][0:used]
        normalise(l_sb, scale_sb[0:used], weight[0, at : at + width])
        found.append(l_sb)
    return found


def norm_scale(part_sb: nl.NkiTensor, same_sb: nl.NkiTensor, columns: int, eps: float, pipe: int) -> nl.NkiTensor:
    """rsqrt(mean + eps) [slots * 32, 1] of sums of squares [slots * 32, n] of this core's columns and of the other's.

    ScalarE adds up, for VectorE has more to do.
    """
    sums_psum = row_sums(part_sb, same_sb)
    both_sb = nl.ndarray((part_sb.shape[0], 2), nl.float32, buffer=nl.sbuf)
    copied_sb = nl.ndarray(part_sb.shape, nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=copied_sb, op=nl.copy, data=sums_psum, reduce_op=nl.add, reduce_res=both_sb[:, 0:1],
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )  # fmt: skip
    if nl.num_programs() == 1:
        return rms_scale(both_sb[:, 0:1], columns, eps)
    exchange(both_sb[:, 0:1], both_sb[:, 1:2], pipe)
    total_sb = nl.ndarray((part_sb.shape[0], 1), nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=total_sb, op=nl.copy, data=both_sb[:, 0:1], bias=both_sb[:, 1:2])
    return rms_scale(total_sb, columns, eps)


def normalise(l_sb: nl.NkiTensor, scale_sb: nl.NkiTensor, weight: nl.NkiTensor) -> None:
    """l_sb [slots * 32, 128] times scale_sb [slots * 32, 1] and weight [slots * 128] @ HBM, rounded, in place."""
    weight_sb = nl.ndarray(l_sb.shape, nl.float32, buffer=nl.sbuf)
    by_slot = weight.reshape((l_sb.shape[0] // MOST_ROWS, PARTITIONS))
    nisa.dma_copy(dst=weight_sb, src=by_slot.expand_dim(1).broadcast(1, MOST_ROWS))
    nisa.scalar_tensor_tensor(dst=l_sb, data=l_sb, op0=nl.multiply, operand0=scale_sb, op1=nl.multiply, operand1=weight_sb)
