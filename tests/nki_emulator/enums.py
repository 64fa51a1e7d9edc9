# SPDX-License-Identifier: Apache-2.0
"""The enumerations of nki.isa, names and values as in its stubs."""

import enum


class engine(enum.Enum):
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(enum.Enum):
    """What an instruction does with its engine's reduce registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(enum.Enum):
    """Who generates the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(enum.Enum):
    """What a DMA does with an index out of bounds."""

    error = 0
    skip = 1


class matmul_perf_mode(enum.Enum):
    """Performance mode of a matmul."""

    none = "none"
    double_row = "double_row"


class dma_engine(enum.Enum):
    """Which DMA a sendrecv uses."""

    dma = 1
    gpsimd_dma = 2


class nc_version(enum.Enum):
    """Generations of the NeuronCore, in order."""

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: "nc_version") -> bool:
        return self.value < other.value

    def __le__(self, other: "nc_version") -> bool:
        return self.value <= other.value

    def __gt__(self, other: "nc_version") -> bool:
        return self.value > other.value

    def __ge__(self, other: "nc_version") -> bool:
        return self.value >= other.value
