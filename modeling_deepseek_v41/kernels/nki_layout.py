# SPDX-License-Identifier: Apache-2.0
"""A loaded model's weights in the order in which the NKI kernels stream them: put there once, in the place of the stored ones.

Parameters keep their names. A linear [n, k] becomes [C, min(k, 128), ceil(k / 128) * n / C] for C cores, two of them where n is
even (nki/linear_layout.py), in the arithmetic's dtype, which holds what the checkpoint stores. The hyper-connections' fn, scale
and base become operands of one kernel (nki/streams_layout.py), or fn a linear where that kernel's parts do not fit; all fp32.
The output projection's groups stand one after the other, [G C, ...]; the experts of a bank kept in bf16, as the shared
expert is, are linears [E, C, ...]. A bank kept as fp8_exact becomes the fused kernel's operands w13 and w2
(nki/experts_layout.py); an expert with a row that fp8 cannot hold becomes a linear in bf16 instead: its number is in
``places``, its weights are in ``exceptions``.
"""

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..errors import RequestError
from ..expert_bank import ExpertBank, Weight, weights_of
from ..fp8_exact import ExactRows
from ..hyper_connections import HyperConnection
from ..linear import Linear
from ..moe import Router
from .nki.experts_layout import exact_rows, pack, stack
from .nki.linear_layout import pack as pack_linear
from .nki.streams_layout import by_stream, fits, pack_streams
from .nki_launch import CORES


def lay_out(model: nn.Module) -> None:
    """dispatch.as_loaded for the kernels. Raises RequestError for a format of experts that no kernel reads."""
    groups: dict[nn.Module, int] = {module.wo_a: module.groups for module in model.modules() if isinstance(module, Attention)}
    for module in model.modules():
        if isinstance(module, Linear):
            parts = module.weight.data.to(module.arithmetic.dtype).chunk(groups.get(module, 1))
            _put(module, weight=torch.cat([as_linear(part) for part in parts]))
        elif isinstance(module, Router):
            _put(module, weight=as_linear(module.weight.data.to(module.arithmetic.dtype)))
        elif isinstance(module, HyperConnection):
            _lay_out_streams(module)
        elif isinstance(module, ExpertBank):
            _lay_out_experts(module)


def as_linear(weight: Tensor) -> Tensor:
    """The linear kernel's operand of weight [n, k]."""
    return pack_linear(weight, 1 if weight.shape[0] % CORES else CORES)


def _lay_out_streams(module: HyperConnection) -> None:
    hc, dim = module.hc, module.fn.shape[1] // module.hc
    if not fits(hc, dim, CORES):
        _put(module, fn=as_linear(module.fn.data))
        return
    mixes = {name: by_stream(getattr(module, name).data, hc).contiguous() for name in ("scale", "base")}
    _put(module, fn=pack_streams(module.fn.data, hc, CORES), **mixes)


def _lay_out_experts(bank: ExpertBank) -> None:
    kind, dtype = bank.storage.format, bank.arithmetic.dtype
    w13, w2 = weights_of([tensor.data for tensor in bank.tensors])
    if kind == "bf16":
        _put(bank, w13=_as_linears(w13, range(len(w13.rows))), w2=_as_linears(w2, range(len(w2.rows))))
    elif kind == "fp8_exact" and dtype == torch.bfloat16:
        cores = 1 if bank.whole else 2
        exact = [exact_rows(w13, w2, expert) for expert in range(len(w13.rows))]
        unfit = [expert for expert, parts in enumerate(exact) if not all(rows.exact.all() for rows in parts)]
        packed = stack([pack(_taken(w1), _taken(w3), _taken(down), cores) for w1, w3, down in exact])
        places = torch.tensor(unfit, dtype=torch.int32)
        _put(bank, w13=packed.w13, w13_exceptions=_as_linears(w13, unfit), w13_places=places)
        _put(bank, w2=packed.w2, w2_exceptions=_as_linears(w2, unfit), w2_places=places)
    else:
        raise RequestError(
            f"expert_weight_format: the NKI kernels read bf16 and, in release numerics, fp8_exact; found {kind} with values of"
            f" {str(dtype).removeprefix('torch.')}"
        )


def _taken(rows: ExactRows) -> ExactRows:
    """Rows as if all of them fitted: those that do not are zeros, and the kernel does not read their expert."""
    return rows._replace(exact=torch.ones_like(rows.exact))


def _as_linears(weight: Weight, experts: range | list[int]) -> Tensor:
    """Some experts of a bank's matrix, each as a linear: [experts, C, ...]."""
    dtype = weight.rows.dtype if weight.scale is None else torch.bfloat16
    found = [as_linear(weight.of(expert).to(dtype)) for expert in experts]
    return torch.stack(found) if found else torch.empty(0, dtype=dtype)


def _put(module: nn.Module, **tensors: Tensor) -> None:
    """Puts tensors in the places of parameters, whatever their shape."""
    for name, tensor in tensors.items():
        setattr(module, name, nn.Parameter(tensor, requires_grad=False))
