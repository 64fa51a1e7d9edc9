# SPDX-License-Identifier: Apache-2.0
"""The NxD Inference (NxDI) application: everything that subclasses NxDI. Imported only where it is used.

    from modeling_deepseek_v41.nxdi import NeuronDeepseekV41ForCausalLM

The package imports without NxDI; the first use of a name from here raises ``MissingNxDI``, which says what to install.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

_WHERE = {
    "DeepseekV41NeuronConfig": "config",
    "DeepseekV41InferenceConfig": "config",
    "NeuronDeepseekV41ForCausalLM": "application",
    "NeuronDeepseekV41Model": "traced",
    "NeuronDSparkFusedSpecModel": "fused",
    "register": "registry",
    "generate_batch": "loop",
}

__all__ = ["MissingNxDI", "demo_main", *_WHERE]


class MissingNxDI(ImportError):
    """NxD Inference, or NxD, is not installed."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_module(name), name)


def demo_main() -> Callable[[Sequence[str] | None], int]:
    """The command line's ``main``; raises MissingNxDI."""
    return _module("inference_demo", "demo").main


def _module(name: str, where: str | None = None) -> Any:
    for package in ("neuronx_distributed", "neuronx_distributed_inference"):
        if importlib.util.find_spec(package) is None:
            raise MissingNxDI(
                f"{name} needs NxD Inference, but {package} is not installed. On a Neuron machine: pip install"
                " neuronx-distributed-inference --extra-index-url https://pip.repos.neuron.amazonaws.com . On a plain CPU the"
                " model runs without it (deepseek-v41 generate); docs/nxdi.md says how to run NxD Inference from its sources"
            )
    return importlib.import_module(f"{__name__}.{where or _WHERE[name]}")
