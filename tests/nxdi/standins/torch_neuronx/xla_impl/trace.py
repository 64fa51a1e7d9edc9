# SPDX-License-Identifier: Apache-2.0
"""generate_hlo over plain torch_xla on the CPU, with a report of everything that a graph must not do. Nothing behind HLO."""

import dataclasses
import re
from typing import Any

import _absent
import torch
import torch_xla
import torch_xla.debug.metrics as metrics

from torch_neuronx.pyhlo import hlo_pb2

__getattr__ = _absent.getattr_of(__name__)
LOG = []
"""One report per traced graph, in order."""


@dataclasses.dataclass
class HloArtifacts:
    """What NxD reads of a traced graph."""

    hlo_module: Any
    flattener: Any = None
    packer: Any = None
    metaneff: Any = None
    weights: Any = None
    constant_parameter_tensors: Any = None
    weight_name_to_idx: dict = dataclasses.field(default_factory=dict)


class _Metaneff:
    def SerializeToString(self):
        return b""


def generate_hlo(func, example_inputs, input_output_aliases=None, **kwargs):
    """Traces ``func`` and logs its report."""
    device = torch_xla.device()
    aliases = [(tuple(parameter.shape), index) for parameter, index in (input_output_aliases or {}).items()]
    func.to(device)
    args = [tensor.to(device) for tensor in example_inputs]
    torch_xla.sync(wait=True)
    metrics.clear_all()
    with torch.no_grad():
        out = list(func(*args))
    counters = {name: metrics.counter_value(name) for name in metrics.counter_names()}
    transfers = {name: metrics.metric_data(name)[0] for name in metrics.metric_names()}
    on_device = [tensor for tensor in out if tensor.device.type == "xla"]
    module = hlo_pb2.HloModuleProto()
    module.ParseFromString(torch_xla._XLAC._get_xla_tensors_hlo_proto(on_device))
    text = torch_xla._XLAC._get_xla_tensors_hlo(on_device)
    wrong = [(index, shape) for shape, index in aliases if index >= len(out) or tuple(out[index].shape) != shape]
    LOG.append(
        {
            "outputs": len(out),
            "outputs_off_device": len(out) - len(on_device),
            "instructions": sum(len(computation.instructions) for computation in module.computations),
            "collectives": [
                line.split("metadata")[0]
                for line in text.splitlines()
                if any(f" {kind}(" in line for kind in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute"))
            ],
            "sorts": sorted({re.findall(r'op_type="(\w*)"', line)[0] for line in text.splitlines() if " sort(" in line}),
            "host_fallbacks": {name: count for name, count in counters.items() if name.startswith("aten::")},
            "host_reads": transfers.get("TransferFromDeviceTime", 0),
            "mid_graph_executes": counters.get("UncachedCompile", 0) + counters.get("CachedCompile", 0),
            "dynamic_shape": "<=" in text,
            "aliases": sorted(index for _, index in aliases),
            "wrong_aliases": wrong,
            "unread_state": _unread(module, func, text),
        }
    )
    func.to("cpu")
    return HloArtifacts(module, metaneff=_Metaneff())


def _unread(module, func, text):
    """How many entry parameters no instruction reads: a state that is overwritten unread may be pruned."""
    entry = next(one for one in module.computations if one.id == module.entry_computation_id)
    read = {operand for instruction in entry.instructions for operand in instruction.operand_ids}
    return sum(one.opcode == "parameter" and one.id not in read for one in entry.instructions)


def get_torch_dtype(kind):
    """Not needed before the compiler."""
    raise NotImplementedError
