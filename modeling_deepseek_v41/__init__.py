# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash, with its DSpark drafter, for AWS Trainium2 and for reading and running on a CPU.

Importing the package makes transformers' AutoConfig and AutoModelForCausalLM know the model.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from .hf.configuration import DeepseekV41Config
from .hf.modeling import DeepseekV41ForCausalLM
from .loading import load_model

__all__ = ["DeepseekV41Config", "DeepseekV41ForCausalLM", "load_model"]

AutoConfig.register("deepseek_v41", DeepseekV41Config, exist_ok=True)
AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
