# SPDX-License-Identifier: Apache-2.0
"""Whether the trained form and the package, loading what was written, are the same model."""

from pathlib import Path

import torch
from torch import Tensor

from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.errors import DeepseekV41Error
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import State, allocate, make_call

from .backbone import run_backbone
from .drafter import run_drafter
from .quantise import as_stored
from .weights import Weights, stored

TOLERANCE = 1e-4
"""Of the largest logit. fp32 sums in another order give 1e-6; a wrong rounding or layer gives more than 1e-2."""

SHARE = 0.97
"""Positions that must agree: where two groups score almost the same, another order of sums may select the other one."""


def check_agreement(folder: Path, weights: Weights, ids: Tensor, token_map: Tensor) -> str:
    """Compares logits and drafts of ``ids`` [n] between the weights as stored and ``folder``; returns what was found.

    The package runs in numerics fp32_no_qdq and fp32; raises DeepseekV41Error where it is another model.
    """
    found = []
    for numerics, quantises in (("fp32_no_qdq", False), ("fp32", True)):
        model = load_model(folder, numerics, kernels="torch", progress=False, drafter=True)
        k = model.config.dspark_block_size
        text, known = ids[None, :-k], ids[None, None, -k:]
        logits, drafts = package_outputs(model, text, known[0, 0, 0])
        with torch.no_grad():
            w = as_stored(weights, stored(model.config))
            mine = run_backbone(text, w, model.config, token_map, quantises)
            known = torch.cat([known[..., :1], drafts.ids[:, None, :-1]], -1)
            place = torch.tensor([[text.shape[1] - 1]])
            own = run_drafter(mine.taps, place, known, w, model.config, quantises)
        pairs = ((mine.logits, logits), (own.logits[:, 0], drafts.logits), (own.confidence[:, 0, :, None], drafts.confidence))
        errors = [float(_errors(a, b.view(a.shape)).quantile(SHARE)) for a, b in pairs]
        if not max(errors) < TOLERANCE:
            raise DeepseekV41Error(
                f"{folder}: in numerics {numerics} the package's logits, drafts and confidences differ from the trained model's"
                f" by {errors} of the largest, expected less than {TOLERANCE}; the training form and the package do not agree"
            )
        found.append(f"{numerics} {max(errors):.0e}")
    return f"largest difference between the trained form and the package: {', '.join(found)}"


def package_outputs(model: DeepseekV41Model, ids: Tensor, newest: Tensor) -> tuple[Tensor, Drafts]:
    """The package's logits [1, T, vocab] of ids [1, T], and its greedy drafts behind ``newest`` at position T."""
    state, rank, k = allocate(model.state_spec(1)), torch.zeros(1, dtype=torch.int64), model.config.dspark_block_size
    start, length, slot, read = torch.tensor([0]), torch.tensor([ids.shape[1]]), torch.tensor([0]), ids.shape[1] + k
    assert model.drafter is not None
    with torch.inference_mode():
        hidden, taps, *_ = model(ids, start, length, slot, rank, *state, read_len=read)
        names, tensors = model.state_names, tuple(state)
        model.drafter.update(taps, State(names, tensors, make_call(start, length, slot, ids.shape[1], read)))
        view = State(names, tensors, make_call(length, torch.tensor([k]), slot, k, read))
        drafts = model.drafter.propose(newest.view(1), rank, view, model.embed, model.logits, k)
        return model.logits(hidden), drafts


def _errors(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference of each row, as a share of the largest value of all."""
    return (a - b).abs().amax(-1).flatten() / b.abs().max()
