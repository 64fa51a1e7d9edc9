# SPDX-License-Identifier: Apache-2.0
"""How kernels divide their work: between the two cores of a logical core, and into tiles."""

import nki.language as nl

PARTITIONS = 128
"""Partitions of SBUF and PSUM, and the sides of the tensor engine."""
BANK = 512
"""fp32 elements of a PSUM bank in one partition: the widest result of a matmul."""


def core_share(total: int, unit: int = 1) -> tuple[int, int]:
    """First and number of the ``total`` items of this core: whole units of ``unit``, the first core's share the larger."""
    cores = nl.num_programs()
    share = -(-total // (unit * cores)) * unit
    first = min(nl.program_id() * share, total)
    return first, min(share, total - first)


def tiles(total: int, size: int) -> list[tuple[int, int]]:
    """(first, count) of consecutive tiles of at most ``size``."""
    found = []
    for first in range(0, total, size):
        found.append((first, min(size, total - first)))
    return found
