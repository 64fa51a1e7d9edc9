# SPDX-License-Identifier: Apache-2.0
"""Stand-in for torch_neuronx, as far as NxD and NxDI name it."""

import types

import _absent
import torch

__version__ = "2.9.0.2.11.20000+cpu.standin"
__getattr__ = _absent.getattr_of(__name__)


class BucketModelConfig:
    """Stand-in."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        self.__dict__.update(kwargs)


class _Refused:
    """A TorchScript class of the Neuron runtime: NxD annotates with these when it is imported."""

    def __init__(self, *args):
        raise NotImplementedError(f"torch.classes.neuron.{type(self).__name__} is part of the Neuron runtime")


def _script_class(name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = type(name, (_Refused,), {})
    setattr(_classes, name, made)
    return made


_classes = types.ModuleType("torch.classes.neuron")
_classes.__getattr__ = _script_class
torch.classes.__dict__["neuron"] = _classes
