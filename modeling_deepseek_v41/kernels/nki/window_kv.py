# SPDX-License-Identifier: Apache-2.0
"""On the device: window KV from its norm to the cache: the rotation, the QDQ and the store, in slots (slots.py).

A row's rotary columns are in the last slot of the last core.
"""

import nki.isa as nisa
import nki.language as nl

from .activation_qdq import GROUP, qdq
from .rotate import turn_pairs
from .slots import MOST_ROWS
from .split import BANK, PARTITIONS, tiles


def check_window_kv(rows: int, kv_norm: nl.NkiTensor, table: nl.NkiTensor) -> None:
    """Refuses window KV that does not fill whole slots, and angles of other rows or of more columns than a slot has."""
    dim, rotary, cores = kv_norm.shape[1], table.shape[2], nl.num_programs()
    assert kv_norm.shape == (1, dim), f"kv_norm {kv_norm.shape}, expected {(1, dim)}"
    assert dim % (PARTITIONS * cores) == 0, f"kv_norm {kv_norm.shape} on {cores} cores: expected {PARTITIONS}s per core"
    assert table.shape == (rows, 2, rotary), f"table {table.shape}, expected {(rows, 2, rotary)}"
    assert rotary % 2 == 0 and rotary <= PARTITIONS, f"table {table.shape}: an even number of columns, at most {PARTITIONS}"


def window_kv(out: nl.NkiTensor, kv: list, table: nl.NkiTensor) -> list:
    """This core's columns of out [M, D] @ HBM of ``kv``, slot_norm of wkv's sums: rotated by table [M, 2, R] @ HBM, QDQ.

    Returns its stores, to be issued when no weight is asked for behind them (linear_stream.project).
    """
    rows, dim = out.shape
    core, share = nl.program_id(), dim // nl.num_programs()
    if core == nl.num_programs() - 1:
        rotate_last_slot(kv[len(kv) - 1], table)
    stores: list = []
    for first, width in tiles(share, BANK):
        kv_sb = kv[first // BANK]
        groups = kv_sb.reshape_dim(1, (PARTITIONS // GROUP, GROUP))
        qdq(groups, groups)
        for slot in range(width // PARTITIONS):
            at = core * share + first + slot * PARTITIONS
            own_sb = kv_sb[slot * MOST_ROWS : slot * MOST_ROWS + rows]
            stores.append((out[:, at : at + PARTITIONS], own_sb))
    return stores


def rotate_last_slot(kv_sb: nl.NkiTensor, table: nl.NkiTensor) -> None:
    """The last R columns of the last slot of kv_sb [slots * 32, 128], turned in place by table [M, 2, R] @ HBM."""
    rows, _, rotary = table.shape
    last = kv_sb.shape[0] - MOST_ROWS
    angles_sb = nl.ndarray((kv_sb.shape[0], 2, rotary), nl.float32, buffer=nl.sbuf)
    own = slice(last, last + rows)
    nisa.dma_copy(dst=angles_sb[own], src=table)
    turn_pairs(kv_sb[own, PARTITIONS - rotary : PARTITIONS], angles_sb[own], False)
