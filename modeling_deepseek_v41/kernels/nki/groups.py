# SPDX-License-Identifier: Apache-2.0
"""A tensor's groups of columns over two cores, partitions and passes: what the QDQ kernels share."""

import nki.language as nl

BLOCK = 64
"""Groups per partition that one pass works on: of 32 they are 2,048 values, 37 KiB of work tiles per partition."""


def spread(groups: int) -> tuple[int, int]:
    """``groups`` as (partitions, groups per partition): the most partitions, at most 128, that divide it."""
    partitions = min(128, groups)
    while groups % partitions != 0:
        partitions -= 1
    return partitions, groups // partitions


def passes(out: nl.NkiTensor, x: nl.NkiTensor, group: int) -> list[tuple[nl.NkiTensor, nl.NkiTensor]]:
    """This core's groups of x [M, K] @ HBM and the same ones of out, at most BLOCK per partition: views [P, groups, group]."""
    rows, columns = x.shape
    groups, cores = rows * columns // group, nl.num_programs()
    first = groups * nl.program_id() // cores
    count = groups * (nl.program_id() + 1) // cores - first
    found = []
    if count > 0:
        partitions, each = spread(count)
        part = slice(first * group, (first + count) * group)
        source = x.reshape((rows * columns,))[part].reshape((partitions, each, group))
        target = out.reshape((rows * columns,))[part].reshape((partitions, each, group))
        for start in range(0, each, BLOCK):
            end = min(start + BLOCK, each)
            found.append((target[:, start:end, :], source[:, start:end, :]))
    return found
