# SPDX-License-Identifier: Apache-2.0
"""A rank enters a forward as a tensor: all ranks run the same operations on the same shapes, and read nothing on the host."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.layout import make_layout
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.parallel import Group, Parallel
from modeling_deepseek_v41.state import State, allocate, make_call

TINY = Path(__file__).resolve().parents[1] / "data" / "golden" / "tiny_a" / "ckpt"
HOST = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount")


class Alone(Group):
    """A group whose other ranks say what this one says, so that one process can run any rank's graph."""

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([x] * self.size)


class Record(TorchDispatchMode):
    """The operations that run, with their shapes and numbers; the experts' own is one of them, as a kernel is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in HOST, f"{name} reads data on the host"
        self.calls.append(f"{func} {described(args)} {described(kwargs or {})}")
        return torch.empty_like(args[0]).fill_(0.01) if name == "local_experts" else func(*args, **(kwargs or {}))


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return {key: described(item) for key, item in value.items()} if isinstance(value, dict) else value


@torch.inference_mode()
def operations_of(rank: int, options: dict[str, Any]) -> list[str]:
    """What a verification of two rows, its head and a draft run on ``rank``."""
    layout = make_layout(load_config(TINY), **options)
    world = tuple(range(layout.world_size))
    parallel = Parallel(layout, rank, Alone((world,)), Alone(layout.mesh))
    model = load_model(TINY, "release", 128, kernels="torch", progress=False, drafter=True, parallel=parallel)
    assert model.drafter is not None
    ids, start, slot = torch.arange(12).view(2, 6), torch.tensor([17, 40]), torch.tensor([0, 1])
    state = allocate(model.state_spec(2))
    with Record() as record:
        hidden, taps, *_ = model(ids, start, torch.tensor([6, 6]), slot, parallel.rank_tensor(), *state, read_len=128)
        model.logits(hidden)
        call = make_call(start, torch.tensor([5, 5]), slot, 5, 128)
        view = State(model.state_names, tuple(state), call)
        model.drafter.propose(ids[:, 0], parallel.rank_tensor(), view, model.embed, model.logits, 5)
    return record.calls


@pytest.mark.parametrize(
    "options",
    [
        {
            "world_size": 8,
            "attn_tp_degree": 4,
            "mesh": [[0, 2, 5, 7], [1, 3, 4, 6]],
            "moe_ep_degree": 4,
            "o_proj_reduce": "world",
        },
        {"world_size": 4},
    ],
)
def test_all_ranks_run_the_same_graph(options: dict[str, Any]) -> None:
    first = operations_of(0, options)
    assert any("local_experts" in call for call in first)
    for rank in (1, options["world_size"] - 1):
        assert operations_of(rank, options) == first
