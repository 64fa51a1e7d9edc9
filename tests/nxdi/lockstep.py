# SPDX-License-Identifier: Apache-2.0
"""All ranks of a run as threads of one process that exchange tensors in memory: 64 of NxDI's modules in one interpreter."""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from modeling_deepseek_v41.layout import Layout, Mesh
from modeling_deepseek_v41.nxdi import traced
from modeling_deepseek_v41.parallel import Group, Parallel

SECONDS = 600.0


class Meeting:
    """Where the ranks of one group lay down their tensors and take everybody's."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.tensors: list[Any] = [None] * size


class ThreadGroup(Group):
    """A group whose ranks are threads."""

    def __init__(self, mesh: Mesh, meeting: Meeting, rank: int):
        super().__init__(mesh)
        self._meeting, self._place = meeting, self.places[rank]

    def all_gather(self, x: Tensor) -> Tensor:
        self._meeting.tensors[self._place] = x
        self._meeting.barrier.wait()
        out = torch.stack(self._meeting.tensors)
        self._meeting.barrier.wait()
        return out


class Lockstep:
    """The ranks of ``layout``: modules are made one after another, and run together."""

    def __init__(self, layout: Layout):
        self.layout, self.world = layout, (tuple(range(layout.world_size)),)
        self._everybody = Meeting(layout.world_size)
        self._rows = [Meeting(len(row)) for row in layout.mesh]

    def parallel(self, rank: int) -> Parallel:
        """What ``rank``'s modules know of the others."""
        row = self._rows[self.layout.group_numbers[rank]]
        groups = ThreadGroup(self.world, self._everybody, rank), ThreadGroup(self.layout.mesh, row, rank)
        return Parallel(self.layout, rank, *groups)

    def make(self, rank: int, build: Callable[[], Any]) -> Any:
        """What ``build`` makes, with ``rank``'s groups in the place of torch.distributed's or NxD's."""
        with mock.patch.object(traced, "run_parallel", lambda layout: self.parallel(rank)):
            return build()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each rank's function returns. The first error ends all."""
        found: list[Any] = [None] * len(functions)
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with torch.no_grad():
                    found[rank] = functions[rank]()
            except BaseException as error:
                errors.append(error)
                for meeting in (self._everybody, *self._rows):
                    meeting.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found
