# SPDX-License-Identifier: Apache-2.0
"""A random checkpoint like the golden one, with a context of 4,096 positions."""

import json
from pathlib import Path

from modeling_deepseek_v41.checkpoint.synthetic import write_checkpoint
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"


def long_model(numerics: str, kernels: str, folder: Path) -> DeepseekV41Model:
    """Written to ``folder`` and loaded with its drafter."""
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 4096
    write_checkpoint(config, folder / "long", seed=7, tokenizer=TINY)
    return load_model(folder / "long", numerics, kernels=kernels, progress=False, drafter=True)
