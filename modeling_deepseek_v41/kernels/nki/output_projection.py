# SPDX-License-Identifier: Apache-2.0
"""The attention's output projection in one launch: wo_a, the QDQ of what it gives, wo_b."""

import nki
import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .exchange import exchange
from .linear_stream import check, project, store, turned_rows
from .low_rank import check_low, share_sums, slot_tiles
from .slots import MOST_ROWS, SLOTS, turn_slots
from .split import BANK, PARTITIONS, tiles


@nki.jit
def output_projection(
    o: nl.NkiTensor, wo_a: nl.NkiTensor, wo_b: nl.NkiTensor, low: int, columns: int, quantize: bool = True, rounds: bool = True
) -> nl.NkiTensor:
    """wo_b(qdq(round(wo_a(o)))), sums in fp32: the output of a rank with one group of heads.

    For decode. The weights of wo_b stream while wo_a's result is rounded and the cores exchange their halves of it.

    Dimensions:
        M: rows, 1 to 32. K: heads times head_dim, a multiple of 128. C: cores. L: columns of wo_a, a multiple of 128 C.
        N: columns of wo_b; S = ceil(N / C).

    Args:
        o [M, K] bf16 @ HBM. wo_a [C, 128, K / 128 L / C] and wo_b [C, 128, L / 128 S] bf16 @ HBM: linear_layout.pack.
        low: L. columns: N. quantize: the QDQ between them. rounds: the result is rounded to bf16, as it is where no other rank
        adds to it.

    Returns:
        [M, N] bf16 or, without ``rounds``, fp32 @ shared HBM.

    Notes:
        Reference: rows.linear twice with formats.qdq_fp8 between. A core has half of wo_a's columns, in slots (slots.py).

    Pseudocode:
        l = qdq(round(o wo_a[own columns]));  l_t = [transpose(l), the other core's];  out[:, own columns] = round(l_t^T wo_b)

    Cost:
        Per core: K L / (C 128^2) matmuls of 128 columns, L / 128 ceil(S / 512) of 512. Bound: the weights' bytes at 362.5 GB/s.
        Predicted for 6 rows, 4096 x 1024 and 1024 x 5120, two cores: 33.1 us, 1.28 times the bound of 26.0; 38.8 us in two
        launches, which also store and load what is between. VectorE: 1.4 us.
    """
    rows, contraction = o.shape
    check_low(rows, contraction, low)
    assert o.dtype == nl.bfloat16 and wo_a.dtype == nl.bfloat16 and wo_b.dtype == nl.bfloat16, "bfloat16 only"
    check(o, wo_a, low, False)
    out = nl.ndarray((rows, columns), nl.bfloat16 if rounds else nl.float32, buffer=nl.shared_hbm)
    cores, core = nl.num_programs(), nl.program_id()
    share = low // cores
    each = share // PARTITIONS
    slots = min(SLOTS, each)
    l_t_sb = nl.ndarray((PARTITIONS, low // PARTITIONS, rows), nl.bfloat16, buffer=nl.sbuf)
    own = l_t_sb[:, core * each : (core + 1) * each]
    sums = share_sums(slot_tiles(turned_rows(o, nl.bfloat16, False), slots), slots, wo_a, share)
    for first, width in tiles(share, BANK):
        l_sb = nl.ndarray((slots * MOST_ROWS, PARTITIONS), nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=l_sb, src=sums[first // BANK], engine=nisa.engine.scalar)
        if quantize:
            groups = l_sb.reshape_dim(1, (PARTITIONS // GROUP, GROUP))
            qdq(groups, groups)
        turn_slots(own[:, first // PARTITIONS : (first + width) // PARTITIONS], l_sb)
    if cores > 1:
        exchange(own, l_t_sb[:, (1 - core) * each : (2 - core) * each], 0)
    store(project(out, l_t_sb, wo_b, low))
    return out
