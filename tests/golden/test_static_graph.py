# SPDX-License-Identifier: Apache-2.0
"""A forward reads no tensor on the host and no shape depends on data: a graph per bucket can be traced."""

from typing import Any

import pytest
import torch
from driving import TINY, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate

SHAPES = pytest.mark.parametrize(("batch", "width"), [(1, 1), (2, 6), (1, 32)])
"""Decode, verification and prefill buckets."""

HOST = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "bincount")
"""Operations that read data back or whose result's shape depends on it."""


class NoHostReads(TorchDispatchMode):
    """Fails on an operation of HOST; the experts' own operation is opaque, as a kernel is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.add(name)
        assert name not in HOST and not name.startswith("unique"), f"{name} reads data on the host"
        if name == "local_experts":
            return torch.empty_like(args[0]).fill_(0.01)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def traced() -> DeepseekV41Model:
    """The model on the operations that a graph is traced from."""
    return load_model(TINY / "ckpt", "release", kernels="torch", progress=False)


def inputs(model: DeepseekV41Model, batch: int, width: int) -> tuple[Tensor, ...]:
    ids = tokens(model, batch * width).view(batch, width)
    start, length = torch.arange(batch) * 3 + 17, torch.full((batch,), width)
    return ids, start, length, torch.arange(batch), torch.zeros(1, dtype=torch.int64), *allocate(model.state_spec(batch))


@SHAPES
@torch.inference_mode()
def test_nothing_is_read_on_the_host(traced: DeepseekV41Model, batch: int, width: int) -> None:
    given = inputs(traced, batch, width)
    with NoHostReads() as watch:
        hidden, *_ = traced(*given, read_len=traced.max_seq_len)
        traced.logits(hidden)
    assert "local_experts" in watch.seen


@SHAPES
def test_shapes_follow_from_the_bucket(traced: DeepseekV41Model, batch: int, width: int) -> None:
    """Fake tensors have no data: what runs on them asks for none."""
    config = traced.config
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    given = tuple(fake.from_tensor(tensor) for tensor in inputs(traced, batch, width))
    with fake, torch.no_grad():
        hidden, taps, *state = traced(*given, read_len=traced.max_seq_len)
        logits = traced.logits(hidden)
    assert logits.shape == (batch, width, config.vocab_size) and logits.dtype == torch.float32
    assert taps.shape == (batch, width, len(config.dspark_target_layer_ids) * config.hidden_size)
    assert [tensor.shape for tensor in state] == [entry.shape for entry in traced.state_spec(batch)]


@pytest.mark.parametrize(("batch", "width"), [(2, 1), (1, 32)])
def test_a_bucket_is_one_graph(traced: DeepseekV41Model, batch: int, width: int) -> None:
    """The graph, traced without data, gives the eager logits and writes the eager state."""

    def forward(*given: Tensor) -> Tensor:
        hidden, *_ = traced(*given, read_len=traced.max_seq_len)
        return traced.logits(hidden)

    given = inputs(traced, batch, width)
    with torch.no_grad():
        graph = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
        copies = [tensor.clone() for tensor in given]
        found, expected = graph(*given), forward(*copies)
    assert torch.equal(found, expected)
    for one, other in zip(given, copies, strict=True):
        assert torch.equal(one, other)
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if any(f"aten.{host}." in name for host in HOST)]
