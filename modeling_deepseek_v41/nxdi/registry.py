# SPDX-License-Identifier: Apache-2.0
"""Makes NxDI's tables of models know this one."""

from neuronx_distributed_inference import inference_demo
from neuronx_distributed_inference.utils import constants

from .application import NeuronDeepseekV41ForCausalLM


def register() -> None:
    """Adds deepseek_v41 to the models of inference_demo and of NxDI, there also as deepseekv41, the key vLLM's loader makes.

    Importing the package has registered the configuration with transformers already.
    """
    entry = {"causal-lm": NeuronDeepseekV41ForCausalLM}
    inference_demo.MODEL_TYPES["deepseek_v41"] = entry
    constants.MODEL_TYPES |= {"deepseek_v41": entry, "deepseekv41": entry}
