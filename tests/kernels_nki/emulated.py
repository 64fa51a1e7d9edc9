# SPDX-License-Identifier: Apache-2.0
"""The operations ``emulator``: every kernel of a model on CPU tensors runs in the emulator."""

from typing import Any

from comparing import array, tensor
from nki_emulator import run
from torch import Tensor

from modeling_deepseek_v41.kernels.dispatch import register
from modeling_deepseek_v41.kernels.nki_ops import nki_operations

NAME = "emulator"
launched: dict[str, int] = {}
"""How often each kernel was launched."""


def launch(kernel: Any, *tensors: Tensor, cores: int = 2, **constants: Any) -> Any:
    """Runs a kernel on CPU tensors; its inputs stay as they are."""
    launched[kernel.__name__] = launched.get(kernel.__name__, 0) + 1
    outputs = run(kernel, *(array(one) for one in tensors), cores=cores, **constants).outputs
    return tuple(tensor(one) for one in outputs) if isinstance(outputs, tuple) else tensor(outputs)


operations = nki_operations(NAME, launch)
register(operations)
