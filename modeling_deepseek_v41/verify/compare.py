# SPDX-License-Identifier: Apache-2.0
"""How two tensors are compared."""

import torch
from torch import Tensor


def relative_error(found: Tensor, golden: Tensor) -> Tensor:
    """max |found - golden| / max |golden| over the last dimension; 0 where both are equal, NaN where ``found`` has one."""
    error = (found.float() - golden.float()).abs().amax(-1)
    return torch.where(error == 0, 0.0, error / golden.float().abs().amax(-1))


def within(found: Tensor, golden: Tensor, tolerance: float) -> Tensor:
    """Per element: |found - golden| <= tolerance times the largest |golden| of its row."""
    golden = golden.float()
    return (found.float() - golden).abs() <= tolerance * golden.abs().amax(-1, keepdim=True)


def largest(errors: Tensor) -> float:
    """The largest error, infinity where one is NaN: a NaN must never look small."""
    return errors.nan_to_num(nan=torch.inf).max().item() if errors.numel() else 0.0
