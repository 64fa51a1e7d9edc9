# SPDX-License-Identifier: Apache-2.0
"""What the few Neuron operations that NxD and NxDI call by class compute, in plain PyTorch."""

import torch

from .base import xla_hlo_call

__all__ = ["Argmax", "ConcatenateOp", "RmsNorm", "Softmax", "TopK", "nki_jit", "xla_hlo_call"]
nki_jit = xla_hlo_call


class Argmax:
    """Stand-in."""

    @staticmethod
    def apply(tensor, dim=None, keepdim=False):
        """The first largest."""
        return torch.argmax(tensor, dim=dim, keepdim=keepdim)


class TopK:
    """Stand-in."""

    @staticmethod
    def apply(tensor, k, dim=-1):
        """Values and positions."""
        return torch.topk(tensor, k, dim=-1 if dim is None else dim)


class Softmax:
    """Stand-in."""

    @staticmethod
    def apply(tensor, dim=-1):
        """softmax."""
        return torch.softmax(tensor, dim=dim)


class ConcatenateOp:
    """Stand-in."""

    @staticmethod
    def apply(*tensors, dim=0):
        """cat."""
        return torch.cat(tensors, dim=dim)


class RmsNorm:
    """Stand-in."""

    @staticmethod
    def apply(hidden, weight, eps, dim=-1):
        """RMSNorm in fp32."""
        x = hidden.float()
        return (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)).to(hidden.dtype) * weight
