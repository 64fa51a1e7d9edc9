# SPDX-License-Identifier: Apache-2.0
"""Linears kept in bf16 give the bits of those kept in fp32, for bf16 holds every stored weight exactly."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling_deepseek_v41.errors import CheckpointError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.state import allocate

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("numerics", ["release", "fp32"])
def test_the_same_bits(numerics: str, kernels: str) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(TINY, numerics, 128, kernels=kernels, progress=False, weight_dtype=dtype)
        block = model.blocks[0]
        assert {module.weight.dtype for module in (model.head, block.attn.wo_a, block.ffn.gate)} == {dtype}
        state, zero, rank = allocate(model.state_spec(1)), torch.zeros(1, dtype=torch.int64), model.parallel.rank_tensor()
        ids, logits, start = torch.arange(40).unsqueeze(0), [], 0
        with torch.inference_mode():
            for tokens in (33, 1, 6):
                part = ids[:, start : start + tokens]
                hidden = model(part, zero + start, zero + tokens, zero, rank, *state, read_len=128)[0]
                logits.append(model.logits(hidden))
                start += tokens
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found)


def test_scales_that_bf16_cannot_follow_are_refused(tmp_path: Path) -> None:
    """fp32 holds e4m3 values times 2^-127, bf16 only their first bits."""
    folder = shutil.copytree(TINY, tmp_path / "ckpt")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        name = "layers.0.attn.wq_a.scale"
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name].view(torch.uint8)).view(torch.float8_e8m0fnu)
            save_file(tensors, file)
    load_model(folder, progress=False, kernels="torch")
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wq_a\.scale: rows 0 to \d+ have scales so small"):
        load_model(folder, progress=False, kernels="torch", weight_dtype=torch.bfloat16)
