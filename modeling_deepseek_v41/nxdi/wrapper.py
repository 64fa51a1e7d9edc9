# SPDX-License-Identifier: Apache-2.0
"""NxDI's wrapper around the graphs of one stage, which owns how a batch is split into graph calls."""

import time
from typing import Any

import torch
from neuronx_distributed_inference.models.model_wrapper import CONTEXT_ENCODING_MODEL_TAG, ModelWrapper
from torch import Tensor

from .chunks import Batch, check_slots, groups, merge, prompt_chunks, step_inputs
from .counts import Counts
from .graph_sampling import NUMBERS


class DeepseekV41ModelWrapper(ModelWrapper):
    """As NxDI's, but inactive rows are marked instead of repeated, long prompts run in chunks, and only results come back.

    NxDI's own split of a batch breaks continuous batching with logits and with fused speculation. On a CPU the wrapper
    keeps the state, which a device keeps through aliases; so its results are the same in both places.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.counts = Counts()

    def forward(self, *args: Any, pad_type: str = "first_fit") -> list[Tensor]:
        """NxDI's inputs of B rows, of which the first five count, to the results of every row (the module's ``forward``)."""
        if self.model is None:
            raise RuntimeError(f"{self.tag}: the model is not loaded; call load(), or to_cpu() on a machine without Neuron")
        ids, mask, positions, slots, sampling = self.convert_int64_to_int32(*args[:5])
        run = self.neuron_config
        check_slots(slots, run.kv_cache_batch_size)
        rows = ids.shape[0]
        sampling = sampling[:1].expand(rows, -1) if sampling.shape[0] != rows else sampling
        results = []
        for part, real in groups(Batch(ids, mask, positions, slots, sampling), run.batch_size):
            found = self._read(part) if self.tag == CONTEXT_ENCODING_MODEL_TAG else self._step(part)
            results.append([tensor[:real] for tensor in found])
        widest = [max(tensor.shape[1:] for tensor in tensors) for tensors in zip(*results, strict=True)]
        return [
            torch.cat([_widened(tensor, shape) for tensor in tensors])
            for tensors, shape in zip(zip(*results, strict=True), widest, strict=True)
        ]

    def _read(self, batch: Batch) -> list[Tensor]:
        chunks = list(prompt_chunks(batch, self.neuron_config.buckets, self.neuron_config.seq_len))
        return merge([self._call(chunk.inputs) for chunk in chunks], [chunk.ends for chunk in chunks])

    def _step(self, batch: Batch) -> list[Tensor]:
        return self._call(step_inputs(batch, self.neuron_config.buckets, max(1, self.neuron_config.speculation_length)))

    def _call(self, batch: Batch) -> list[Tensor]:
        """One graph call: its results, without the state, which is kept."""
        began = time.perf_counter()
        unused = torch.zeros(batch.seq_ids.shape, dtype=torch.int32)
        found = self._forward(*(tensor.contiguous() for tensor in batch), self._numbers(len(unused)), unused)
        if self.is_neuron():
            results = [found] if isinstance(found, Tensor) else list(found)
        else:
            self.model.store(found[self.model.results :])
            results = found[: self.model.results]
        self._count(batch, results[0], time.perf_counter() - began)
        return results

    def _numbers(self, rows: int) -> Tensor:
        """What a graph draws with: [rows] int32 below NUMBERS, of PyTorch's generator, the same on every rank."""
        run = self.neuron_config
        if not run.samples_in_graph:
            return torch.zeros(rows, dtype=torch.int32)
        if run.on_device_sampling_config.deterministic:
            return torch.full((rows,), NUMBERS // 2, dtype=torch.int32)
        numbers = torch.randint(NUMBERS, (rows,), dtype=torch.int32)
        if not self.is_neuron():
            torch.distributed.broadcast(numbers, 0)
        return numbers

    def _count(self, batch: Batch, tokens: Tensor, seconds: float) -> None:
        active = batch.seq_ids >= 0
        self.counts.calls += 1
        self.counts.rows += int(active.sum())
        fused = self.neuron_config.enable_fused_speculation
        self.counts.tokens += int((tokens[active] >= 0).sum()) if fused else int(active.sum())
        self.counts.seconds += seconds


def _widened(tensor: Tensor, shape: torch.Size) -> Tensor:
    """``tensor`` [B, ...] with zeros behind its second dimension up to ``shape``: masks of groups in different buckets."""
    if tensor.shape[1:] == shape or tensor.dim() != 2:
        return tensor
    return torch.nn.functional.pad(tensor, (0, shape[0] - tensor.shape[1]))
