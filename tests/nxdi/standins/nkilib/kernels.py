# SPDX-License-Identifier: Apache-2.0
"""What the kernels that NxDI's samplers name compute, in plain PyTorch; kernel[lnc](...) is allowed."""

import torch


class Kernel:
    """One kernel."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, _):
        return self.function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


cascaded_max = Kernel(lambda x: torch.max(x, dim=-1, keepdim=True))
topk = Kernel(lambda x, k, sorted_flag=True, **_: torch.topk(x, k, dim=-1, sorted=sorted_flag))
cumsum = Kernel(lambda x, axis=-1, **_: torch.cumsum(x, dim=axis))
