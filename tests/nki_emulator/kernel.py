# SPDX-License-Identifier: Apache-2.0
"""Launching kernels: what nki.jit returns, and run(), which gives outputs and trace."""

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .access import read
from .language import in_hbm
from .machine import Machine, running
from .memory import MemoryRegion, Storage
from .rules import RuleError
from .tensor import NkiTensor
from .trace import Trace


@dataclasses.dataclass(frozen=True)
class Result:
    """What a launch returned, as NumPy arrays (elements never written are NaN or -1), and its trace; None from real nki."""

    outputs: Any
    trace: Trace | None


class Kernel:
    """A kernel as nki.jit makes it: kernel(*arrays) on one core, kernel[2](*arrays) on both; inlined inside another kernel."""

    def __init__(self, function: Callable, cores: int = 1, grid: bool = False) -> None:
        functools.update_wrapper(self, function)
        self.func, self.cores, self.grid = function, cores, grid

    def __getitem__(self, cores: int) -> "Kernel":
        if cores not in (1, 2):
            raise ValueError(f"kernel[{cores}]: trn2 runs a kernel on 1 or 2 cores")
        return Kernel(self.func, cores, grid=True)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if running():
            return self.func(*arguments, **keywords)
        return self.launch(arguments, keywords).outputs

    def launch(self, arguments: tuple, keywords: dict) -> Result:
        """Run on NumPy arrays. Arrays that the kernel writes are updated, as HBM would be."""
        machine = Machine(self.cores, self.grid)
        inputs: dict[int, NkiTensor] = {}
        arguments, keywords = _to_tensors(arguments, inputs), _to_tensors(keywords, inputs)
        returned = machine.run(self.func, arguments, keywords)
        machine.trace.peak()
        return Result(_to_arrays(returned, self.cores, machine), machine.trace)


def jit(fn: Callable | None = None, **_: Any) -> Any:
    """nki.jit: mark a top-level kernel."""
    return Kernel(fn) if fn is not None else Kernel


def simulate(kernel: Any) -> Callable:
    """nki.simulate: a callable on NumPy arrays."""
    return kernel if isinstance(kernel, Kernel) else Kernel(kernel)


def run(kernel: Callable, *arrays: Any, cores: int = 1, **keywords: Any) -> Result:
    """Run a kernel on NumPy arrays on one core or on both.

    ``kernel`` is a function or what nki.jit made of it. Where the real nki package is installed this calls ``nki.simulate`` for
    trn2, and there is no trace. Raises RuleError for a broken rule.
    """
    if not isinstance(kernel, Kernel) and real_nki():
        import nki

        os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
        kernel = kernel if hasattr(kernel, "__getitem__") else nki.jit(kernel)
        return Result(nki.simulate(kernel[cores])(*arrays, **keywords), None)
    function = kernel.func if isinstance(kernel, Kernel) else kernel
    return Kernel(function, cores, grid=cores > 1).launch(arrays, keywords)


def real_nki() -> bool:
    """Whether the real package is installed: nki with nki.isa, and not the emulator under its name."""
    if "nki" in sys.modules and getattr(sys.modules["nki"], "__emulated__", False):
        return False
    try:
        found = importlib.util.find_spec("nki.isa")
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None and "nki_emulator" not in found.origin


def _to_tensors(value: Any, known: dict[int, NkiTensor]) -> Any:
    if isinstance(value, np.ndarray):
        if id(value) not in known:
            known[id(value)] = in_hbm(value)
        return known[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_to_tensors(one, known) for one in value)
    if isinstance(value, dict):
        return {name: _to_tensors(one, known) for name, one in value.items()}
    return value


def _to_arrays(value: Any, cores: int, machine: Machine) -> Any:
    if isinstance(value, NkiTensor):
        if value.on_chip or (cores > 1 and value.buffer is not MemoryRegion.shared_hbm):
            raise RuleError("output", machine.trace.last_line(), "return", repr(value), value.buffer.value)
        return _contents(value)
    if isinstance(value, list | tuple):
        return type(value)(_to_arrays(one, cores, machine) for one in value)
    return value


def _contents(tensor: NkiTensor) -> np.ndarray:
    complete = Storage(MemoryRegion.private_hbm, 1, tensor.storage.raw.size, "", tensor.storage.raw)
    view = NkiTensor(tensor.shape, tensor.dtype, complete, MemoryRegion.private_hbm, tensor.name, tensor.strides, tensor.offset)
    return Machine(1, False).run(read, (view, "output"), {})
