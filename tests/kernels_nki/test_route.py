# SPDX-License-Identifier: Apache-2.0
"""The router kernel against moe.route."""

import pytest
import torch
from comparing import CORES, arithmetic, array, normal, tensor
from nki_emulator import Result, lint, real_nki, run
from torch import Tensor

from modeling_deepseek_v41.kernels.nki import route as module
from modeling_deepseek_v41.moe import route

FACTOR = 1.5


def launch(logits: Tensor, bias: Tensor, k: int, normalises: bool = True, cores: int = 1) -> Result:
    return run(module.route, array(logits), array(bias.unsqueeze(0)), k, normalises, FACTOR, cores=cores)


def check(logits: Tensor, bias: Tensor, k: int, normalises: bool, cores: int) -> None:
    """Ids are equal and weights within 1e-5 of their row's largest."""
    ids, weights = (tensor(one) for one in launch(logits, bias, k, normalises, cores).outputs)
    expected, values = (one[0] for one in route(logits[None], bias, k, normalises, FACTOR, arithmetic(torch.float32)))
    assert torch.equal(ids.long(), expected)
    assert ((weights - values).abs() <= 1e-5 * values.abs().amax(-1, keepdim=True)).all()


@CORES
@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("rows", [1, 6, 7, 128, 131])
@pytest.mark.parametrize(("experts", "k"), [(384, 6), (128, 6), (8, 2), (5, 3), (24, 20), (1, 1)])
def test_chosen_and_weighed(experts, k, rows, normalises, cores):
    check(normal(rows, experts) * 3, normal(experts, seed=1) / 4, k, normalises, cores)


@CORES
@pytest.mark.parametrize(("low", "high"), [(-200, 200), (-60, -20), (-8, -1), (-3.6, -3.4), (1, 100)])
def test_extreme_logits(low, high, cores):
    """Scores from 0 to 14, and of one order of magnitude where they are tiny: the weights are relative."""
    logits = torch.linspace(low, high, 64).repeat(3, 1)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    check(logits, torch.zeros(64), 8, True, cores)
    check(logits, torch.linspace(0, 20, 64), 8, True, cores)


@CORES
@pytest.mark.parametrize("k", [1, 6, 8, 9, 30])
def test_equal_scores_by_lower_id(k, cores):
    """Few different logits, over all of the row and at the boundary of the chosen ones."""
    logits = torch.randint(3, (7, 64), generator=torch.Generator().manual_seed(0)).float()
    check(logits, torch.zeros(64), k, True, cores)
    check(torch.zeros(7, 64), torch.zeros(64), k, True, cores)


@pytest.mark.slow
def test_many_rows():
    check(normal(4096, 384) * 3, normal(384, seed=1) / 4, 6, True, 2)


def test_refusals():
    logits, bias = normal(2, 16), normal(16)
    for arguments, text in (
        ((logits, bias[:8], 6), r"bias \(1, 8\), expected \(1, 16\)"),
        ((logits.bfloat16(), bias, 6), "logits bfloat16"),
        ((logits, bias, 17), "k 17 of 16 experts"),
        ((normal(1, 2056), normal(2056), 6), "2056 experts: 1 to all of at most 2048"),
    ):
        with pytest.raises(AssertionError, match=text):
            launch(*arguments)


@pytest.mark.skipif(real_nki(), reason="real nki gives no trace")
def test_cost():
    trace = launch(normal(6, 384), normal(384), 6, cores=2).trace
    assert trace.counts(0) == {
        "activation": 6, "dma_copy": 4, "max8": 1, "memset": 1, "nc_find_index8": 1, "nc_n_gather": 1, "reciprocal": 1,
        "scalar_tensor_tensor": 3, "tensor_copy_predicated": 1, "tensor_reduce": 1, "tensor_scalar": 5, "tensor_tensor": 2,
    }  # fmt: skip
    assert trace.critical_path_us() == pytest.approx(12.6, abs=0.06)


def test_lint():
    assert lint(module.__file__) == []
