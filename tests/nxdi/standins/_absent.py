# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the closed packages of the Neuron SDK, so that the open sources of NxD and NxDI import on a plain CPU.

Any submodule without a file here becomes a module whose attributes are ``Absent`` names: fine to import, subscript and chain,
but a call raises. So no kernel is ever faked in silence.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

ROOTS = ("torch_neuronx", "libneuronxla", "neuronxcc", "nki", "nkilib")


class Absent:
    """A name of a closed package."""

    def __init__(self, path):
        self.__name__ = self.__qualname__ = path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        child = Absent(f"{self.__name__}.{name}")
        self.__dict__[name] = child
        return child

    def __getitem__(self, _):
        return self

    __iter__ = __contains__ = None

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is part of the Neuron SDK; there is no stand-in for it on a CPU")


def getattr_of(module_name):
    """The module-level ``__getattr__`` of a stand-in."""

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        module, full = sys.modules[module_name], f"{module_name}.{name}"
        known = importlib.machinery.PathFinder.find_spec(full, getattr(module, "__path__", []))
        value = importlib.import_module(full) if known else Absent(full)
        setattr(module, name, value)
        return value

    return __getattr__


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every other submodule of ROOTS importable. It comes last, behind whatever is really installed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] not in ROOTS or fullname == "libneuronxla.libneuronpjrt_path":
            return None  # torch_xla asks for the latter: without it the device is the CPU
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = getattr_of(spec.name)
        return module

    def exec_module(self, module):
        pass


def decorator(*args, **kwargs):
    """@jit and @jit(...): the kernel can be imported and not be called."""
    if args and (callable(args[0]) or isinstance(args[0], Absent)):
        return Absent(f"kernel {getattr(args[0], '__name__', '?')}")
    return decorator


if not any(isinstance(finder, Finder) for finder in sys.meta_path):
    sys.meta_path.append(Finder())
