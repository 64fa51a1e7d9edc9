# SPDX-License-Identifier: Apache-2.0
"""The model behind Hugging Face's interfaces, on transformers 4.57 and 5: configuration, forward, generate."""

from .cache import DeepseekV41Cache
from .configuration import DeepseekV41Config
from .modeling import DeepseekV41ForCausalLM

__all__ = ["DeepseekV41Cache", "DeepseekV41Config", "DeepseekV41ForCausalLM"]
