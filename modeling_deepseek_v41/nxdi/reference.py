# SPDX-License-Identifier: Apache-2.0
"""The model on plain CPU as NxDI's accuracy checks call it."""

import copy
from typing import Any, cast

from transformers import GenerationConfig

from ..hf.modeling import DeepseekV41ForCausalLM


class ReferenceModel(DeepseekV41ForCausalLM):
    """``DeepseekV41ForCausalLM`` that generates without speculation, whatever the options say.

    Accuracy checks hand one generation_config to both models, with prompt_lookup_num_tokens, NxDI's mark of fused speculation.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "ReferenceModel":
        """As the parent's."""
        return cast(ReferenceModel, super().from_pretrained(*args, **kwargs))

    def generate(self, inputs: Any = None, generation_config: GenerationConfig | None = None, **kwargs: Any) -> Any:
        """As the parent's."""
        if generation_config is not None:
            generation_config = copy.deepcopy(generation_config)
            generation_config.prompt_lookup_num_tokens = None
        return super().generate(inputs, generation_config, **kwargs)
