# SPDX-License-Identifier: Apache-2.0
"""to_cpu() and generation on NxD's and NxDI's own code: token for token the reference's, in every way a batch can be run.

All cases of as many ranks run in one process each, or one torchrun. docs/nxdi.md has a table of what they cover.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sources import TINY, child
from texts import BUCKET, TRAINED, bucket_prompts, engine, golden, trained_prompts

pytestmark = pytest.mark.nxdi
ON_DEVICE = {"on_device_sampling_config": {}}
LOGITS = ON_DEVICE | {"output_logits": True}
FUSED = ON_DEVICE | {"enable_fused_speculation": True, "speculation_length": 6}
FOUR = {"batch_size": 4}
CONTINUOUS = FOUR | {"ctx_batch_size": 1, "is_continuous_batching": True}
SAMPLED = {"on_device_sampling_config": {"do_sample": True}}
CHUNKS = {"max_context_length": BUCKET}
MIXED = [1, 40, 17, 100]
"""A batch with a one-token row; where the largest bucket is 40, a row of its size and one of three chunks."""


class Case(NamedTuple):
    """texts: lengths of golden prompts; or "buckets", of one token, the bucket and three of it; or "trained", of the same
    lengths and 17, for the trained checkpoint. adapter: through NxDI's. alone: one text after another, in the same slot."""

    options: dict[str, Any]
    texts: list[int] | str = MIXED
    ranks: int = 1
    adapter: bool = False
    alone: bool = False

    @property
    def folder(self) -> Path:
        return (TRAINED if self.texts == "trained" else TINY) / "ckpt"

    @property
    def is_fused(self) -> bool:
        return "enable_fused_speculation" in self.options

    @property
    def prompts(self) -> list[list[int]]:
        if isinstance(self.texts, list):
            return golden(self.texts)[0]
        return trained_prompts() if self.texts == "trained" else bucket_prompts()

    @property
    def expected(self) -> list[list[int]]:
        if isinstance(self.texts, list):
            return golden(self.texts)[1]
        return engine(self.folder, self.prompts, fused=False).texts

    def arguments(self) -> dict[str, Any]:
        options = self.options | {"tp_degree": self.ranks}
        more = {"adapter": self.adapter, "alone": self.alone, "folder": str(self.folder)}
        return {"options": options, "texts": self.prompts} | more


CASES = {
    "batch 4": Case(FOUR | {"expert_weight_format": "bf16"}),
    "batch 4, adapter": Case(FOUR, adapter=True),
    "batch 4, chunks": Case(FOUR | CHUNKS | {"expert_weight_format": "fp4_bytes"}),
    "batch 4, fused, logits": Case(FUSED | FOUR | {"output_logits": True}),
    "continuous, adapter": Case(CONTINUOUS, adapter=True),
    "continuous, buckets, adapter": Case(
        CONTINUOUS
        | {"enable_bucketing": True, "context_encoding_buckets": [16, BUCKET], "token_generation_buckets": [64, 256]},
        adapter=True,
    ),
    "continuous, on-device, logits, adapter": Case(CONTINUOUS | LOGITS, adapter=True),
    "continuous, fused, chunks": Case(CONTINUOUS | FUSED | CHUNKS | {"expert_weight_format": "fp4_bytes"}),
    "batch 1": Case(CHUNKS, "buckets", alone=True),
    "batch 1, on-device": Case(ON_DEVICE | CHUNKS, "buckets", alone=True),
    "batch 1, fused": Case(FUSED | CHUNKS, "buckets", alone=True),
    "batch 1, fused, adapter": Case(FUSED | CHUNKS, [1, 5, 40], adapter=True, alone=True),
    "batch 1, three tokens verified": Case(FUSED | {"speculation_length": 3}, [17]),
    "trained, batch 4": Case(FOUR | CHUNKS, "trained"),
    "trained, continuous, on-device, logits": Case(CONTINUOUS | LOGITS | CHUNKS, "trained"),
    "trained, continuous, fused": Case(CONTINUOUS | FUSED | CHUNKS, "trained"),
    "trained, batch 1, fused": Case(FUSED | CHUNKS, "trained", alone=True),
    "batch 4, drawn of one": Case(FOUR | SAMPLED),
    "tp 2, continuous, chunks": Case(CONTINUOUS | CHUNKS, ranks=2),
    "tp 2, attention 1, batch 4": Case(FOUR | {"attn_tp_degree": 1, "expert_weight_format": "bf16"}, ranks=2),
    "tp 2, continuous, on-device, adapter": Case(CONTINUOUS | ON_DEVICE, ranks=2, adapter=True),
    "tp 2, continuous, fused": Case(CONTINUOUS | FUSED, ranks=2),
    "tp 2, trained, continuous, fused": Case(CONTINUOUS | FUSED | CHUNKS, "trained", ranks=2),
    "tp 8, attention 8, continuous, chunks": Case(CONTINUOUS | CHUNKS, ranks=8),
    "tp 8, attention 4, experts 4 x 2, continuous, fused": Case(
        CONTINUOUS | FUSED | {"attn_tp_degree": 4, "moe_ep_degree": 4, "moe_tp_degree": 2}, ranks=8
    ),
    "tp 8, attention 2, continuous, on-device, logits": Case(CONTINUOUS | LOGITS | {"attn_tp_degree": 2}, ranks=8),
    "tp 8, attention 2, trained, continuous, fused": Case(CONTINUOUS | FUSED | CHUNKS, "trained", ranks=8),
}

DRAWN = {f"tp {ranks}, drawn": Case(FOUR | SAMPLED, ranks=ranks, adapter=True) for ranks in (1, 2)}
SAMPLING = {"top_k": 8, "top_p": 0.9, "temperature": 1.5}


@functools.cache
def outcomes(ranks: int) -> list[dict[str, Any]]:
    """What every rank found in the cases of ``ranks`` ranks, by name."""
    runs = {name: case.arguments() for name, case in CASES.items() if case.ranks == ranks}
    runs |= {name: case.arguments() | SAMPLING for name, case in DRAWN.items() if case.ranks == ranks}
    with tempfile.TemporaryDirectory() as folder:
        return child("generate_all", {"runs": runs}, Path(folder), ranks=ranks)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (case.ranks == 8)) for name, case in CASES.items()]
)
def test_tokens_and_acceptance_are_the_reference_s(name: str) -> None:
    case = CASES[name]
    for found in outcomes(case.ranks):
        assert found[name]["tokens"] == case.expected
        counts = found[name]["counts"]
        if case.alone and case.texts == "buckets":
            assert counts["context_encoding_model"]["calls"] == 1 + 1 + 3
        if case.is_fused and not case.adapter and "three" not in name:  # the adapter goes on behind the last token
            assert counts["fused_speculation_model"]["rows"] == engine(case.folder, case.prompts, fused=True).steps


def test_drawn_tokens_follow_from_the_first_rank_s_numbers() -> None:
    drawn = outcomes(1)[0]["tp 1, drawn"]["tokens"]
    assert all(one != other for one, other in zip(drawn, golden(MIXED)[1], strict=True))
    assert [found["tp 2, drawn"]["tokens"] for found in outcomes(2)] == [drawn, drawn]


REFUSED = [
    ({"kernels": "nki", "torch_dtype": "bfloat16"}, "kernels: nki needs a Neuron device; on a CPU choose torch"),
    (
        {"kernels": "nki", "torch_dtype": "bfloat16", "expert_weight_format": "fp4_bytes"},
        "kernels: nki reads fp8_exact experts",
    ),
    ({"kernels": "numba"}, "kernels: found 'numba', expected one of torch, nki"),
    (FUSED | SAMPLED, "enable_fused_speculation: accepts greedily in the graph"),
    ({"expert_weight_format": "fp8"}, "expected one of bf16, fp4_bytes, fp8_exact, found 'fp8'"),
]


def test_what_a_cpu_cannot_serve(tmp_path: Path) -> None:
    [found] = child("refusals", {"runs": [options for options, _ in REFUSED]}, tmp_path)
    for text, (_, words) in zip(found, REFUSED, strict=True):
        assert words in text
