# SPDX-License-Identifier: Apache-2.0
"""One speculative step of the release on one of 64 ranks, each of its kernel launches run in the emulator once.

The model is the package's own and runs its own forward, so that the list of launches is what the model calls. Weights are
zeros that take no memory; exchanges hand back tensors of the right shape.
"""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparing import array, tensor
from nki_emulator import run
from torch import Tensor, nn

from modeling_deepseek_v41.attention import Attention
from modeling_deepseek_v41.config import load_config
from modeling_deepseek_v41.dspark.step import draft_and_verify
from modeling_deepseek_v41.engram.layer import Engram
from modeling_deepseek_v41.expert_bank import ExpertBank
from modeling_deepseek_v41.hyper_connections import HyperConnection
from modeling_deepseek_v41.kernels.dispatch import register
from modeling_deepseek_v41.kernels.nki_ops import nki_operations
from modeling_deepseek_v41.layout import Layout, make_layout
from modeling_deepseek_v41.linear import Linear
from modeling_deepseek_v41.loading import build_model
from modeling_deepseek_v41.model import Block, DeepseekV41Model
from modeling_deepseek_v41.moe import Router
from modeling_deepseek_v41.numerics import NUMERICS
from modeling_deepseek_v41.parallel import Group, Parallel
from modeling_deepseek_v41.plan.predict import busiest_share
from modeling_deepseek_v41.rope import rope_table
from modeling_deepseek_v41.state import allocate

CONFIG = Path(__file__).resolve().parents[1] / "data" / "release_config.json"
WORLD, BY_ID, POSITIONS = 64, 8, 131_072
"""Ranks; parts of the experts by id, each split by columns among as many ranks; positions that state holds and a step reads."""
DMA_RATE = 362_500.0
"""Bytes per us of one of the two cores (tests/nki_emulator/costs.py)."""
DRAFTER, HEAD, REST = "drafter, beside its stages", "head (twice: step and drafter)", "model, beside its layers"


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one launch: us that each engine of the busier core is busy, bytes that both cores moved, us from first to last.

    ``bound``: the busiest engine, the DMAs by their bytes alone.
    """

    busy: dict[str, float]
    nbytes: int
    bound: float
    latency: float


class Launches:
    """Launches by where they come from and what they are. A launch of known shapes is not run again: its outputs are."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        self.costs: dict[tuple, Cost] = {}
        self.places = [REST]
        self._outputs: dict[tuple, Any] = {}

    def launch(self, kernel: Any, *tensors: Tensor, cores: int = 2, **constants: Any) -> Any:
        """As nki_ops' launch."""
        name = kernel.__name__
        shapes = tuple((tuple(one.shape), one.dtype) for one in tensors)
        key = (name, shapes, cores, tuple(sorted(constants.items())))
        if key not in self.costs:
            arrays = [array(one) for one in (_chosen(tensors) if name == "active_experts" else tensors)]
            result = run(kernel, *arrays, cores=cores, **constants)
            busy = result.trace.busy()
            engines = max(us for engine, us in busy.items() if engine != "dma")
            bound = max(engines, max(result.trace.dma_bytes(core) for core in range(cores)) / DMA_RATE)
            self.costs[key] = Cost(busy, result.trace.dma_bytes(), bound, result.trace.critical_path_us())
            self._outputs[key] = result.outputs
        self.counts[self.places[-1]][key] += 1
        outputs = self._outputs[key]
        return tuple(tensor(one) for one in outputs) if isinstance(outputs, tuple) else tensor(outputs)

    def watch(self, module: nn.Module, place: str) -> None:
        """Launches inside ``module``'s forward are counted under ``place``."""
        module.register_forward_pre_hook(lambda module, args: self.places.append(place))
        module.register_forward_hook(lambda module, args, out: self.places.pop() and None)


def _chosen(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The operands of ``active_experts`` with as many chosen experts as the busiest rank has on average."""
    x, routing, *weights = tensors
    local, rows = routing.shape
    config = load_config(CONFIG)
    top_k = config.experts(local != config.n_routed_experts // BY_ID)[1]
    count = round(busiest_share(rows, top_k, local, BY_ID) * local)
    table = torch.zeros(routing.shape)
    table[range(count), [expert % rows for expert in range(count)]] = 1.0
    return [x, table, *weights]


class Alone(Group):
    """A group whose other ranks have what this one has."""

    def __init__(self, mesh: Any, name: str, exchanges: collections.Counter):
        super().__init__(mesh)
        self._name, self._exchanges = name, exchanges

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, ...]."""
        self._exchanges[self._name] += 1
        return x.expand(self.size, *x.shape)

    def all_reduce(self, x: Tensor) -> Tensor:
        """x as it is."""
        self._exchanges[self._name] += 1
        return x.clone()


def layer_kind(model: DeepseekV41Model, layer: int) -> str:
    """What distinguishes the launches of a backbone layer."""
    c, ratio = model.config, model.config.compress_ratios[layer]
    if not ratio:
        return "layer, window only"
    kind = f"layer, ratio {ratio}"
    if layer not in c.index_source_layer_ids:
        return kind
    source = "its own keys" if layer in c.kv_source_layer_ids else "keys of a source"
    chooses = ", candidate blocks" if layer == c.candidate_source_layer_id else ""
    return f"{kind}, indexer over {source}{chooses}"


def places(model: DeepseekV41Model) -> list[tuple[nn.Module, str]]:
    """Modules whose launches belong together, and what they are called."""
    found: list[tuple[nn.Module, str]] = [(layer, layer_kind(model, index)) for index, layer in enumerate(model.blocks)]
    for module in model.modules():
        if isinstance(module, Engram):
            found.append((module, "engram"))
    assert model.drafter is not None
    first, last = model.drafter.stages[0], model.drafter.stages[-1]
    found += [(stage, "drafter stage") for stage in model.drafter.stages]
    beside = (first.main_proj, first.main_norm, last.norm, last.markov_head.head, last.confidence_head)
    return [*found, *((module, DRAFTER) for module in beside), (model.head, HEAD)]


def kinds(model: DeepseekV41Model) -> collections.Counter:
    """How many modules of each kind a step runs."""
    found = collections.Counter(place for module, place in places(model) if isinstance(module, Block | Engram))
    return found + collections.Counter({DRAFTER: 1, HEAD: 1, REST: 1})


def release_step() -> tuple[DeepseekV41Model, Launches, collections.Counter]:
    """The model, the launches of one step of 6 rows and 5 drafts, and its exchanges by group."""
    config, launches, exchanges = load_config(CONFIG), Launches(), collections.Counter()
    operations = nki_operations("release step", launches.launch)
    register(operations)
    layout: Layout = make_layout(config, WORLD, moe_ep_degree=BY_ID, dspark_moe_ep_degree=BY_ID)
    everyone = Alone((tuple(range(WORLD)),), "world", exchanges)
    parallel = Parallel(layout, 0, everyone, Alone(layout.mesh, "attention", exchanges))
    model = build_model(
        config, NUMERICS["release"], POSITIONS, "fp8_exact", operations.name, True, parallel, expert_exception_rows=1
    )
    assert model.drafter is not None
    for name, parameter in list(model.named_parameters()):
        _put(model, name, parameter.shape, parameter.dtype, -1 if name.endswith("_places") else 0)
    model.rope_plain, model.rope_compressed = rope_table(config, False, POSITIONS), rope_table(config, True, POSITIONS)
    model.drafter.rope_plain, model.token_map = model.rope_plain, torch.zeros(config.vocab_size, dtype=torch.int32)
    _lay_out(model)
    for module, place in places(model):
        launches.watch(module, place)
    k, one = config.dspark_block_size, torch.zeros(1, dtype=torch.int64)
    start = one + POSITIONS - k - 1
    with torch.inference_mode():
        draft_and_verify(
            model, model.drafter, one, start, one + k + 1, one, one, allocate(model.state_spec(1)),
            num_draft_tokens=k, read_len=POSITIONS,
        )  # fmt: skip
    return model, launches, exchanges


def _put(model: nn.Module, name: str, shape: Any, dtype: torch.dtype, value: int) -> None:
    """A parameter of one value in one place of memory."""
    path, _, key = name.rpartition(".")
    values = torch.full((1,), value).to(dtype).expand(shape)
    setattr(model.get_submodule(path), key, nn.Parameter(values, requires_grad=False))


def _lay_out(model: DeepseekV41Model) -> None:
    """Lays out one module of each kind in full, and gives the others its shapes."""
    known: dict[tuple, dict[str, tuple[Any, torch.dtype]]] = {}
    for module in list(_units(model)):
        before = {name: (tuple(one.shape), one.dtype) for name, one in module.named_parameters()}
        key = type(module), tuple(before.items())
        if key not in known:
            model.numerics.ops.lay_out(module)
            known[key] = {name: (tuple(one.shape), one.dtype) for name, one in module.named_parameters()}
        for name, (shape, dtype) in known[key].items():
            _put(module, name, shape, dtype, 0)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are laid out together: an attention, whose output projection has its groups, and single ones."""
    for child in module.children():
        if isinstance(child, Attention | ExpertBank | HyperConnection | Linear | Router):
            yield child
        else:
            yield from _units(child)
