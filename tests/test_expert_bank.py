# SPDX-License-Identifier: Apache-2.0
"""Every format of a bank holds every stored value; rows that fp8 cannot hold are counted, kept and, if too many, refused."""

import re
from pathlib import Path

import pytest
import torch
from arithmetics import arithmetic
from safetensors.torch import load_file, save_file
from stored_experts import StoredExperts, bank

from modeling_deepseek_v41.errors import CheckpointError, RequestError
from modeling_deepseek_v41.expert_bank import ExpertStorage, exceptions_of, put_chosen, put_static, weights_of
from modeling_deepseek_v41.formats import decode_fp4
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate

TINY = Path(__file__).parent / "data" / "golden" / "tiny_a" / "ckpt"
WIDE = {"w1": [(0, 5), (2, 31)], "w3": [(2, 0)], "w2": [(1, 0), (1, 63), (3, 7), (0, 1), (3, 6)]}


@pytest.mark.parametrize("wide", [None, WIDE], ids=["all rows fit", "exceptions"])
@pytest.mark.parametrize("storage", ["bf16", "fp4_bytes", "fp8_exact"])
def test_every_value_is_kept_to_the_bit(storage: str, wide: dict[str, list[tuple[int, int]]] | None) -> None:
    stored = StoredExperts(4, 64, 64, wide=wide)
    made = bank(arithmetic("release"), stored, storage, 5 if storage == "fp8_exact" else None)
    w13, w2 = weights_of(made.tensors)
    for expert in range(4):
        values = {
            part: decode_fp4(*(stored.tensors[f"experts.{expert}.{part}.{key}"] for key in ("weight", "scale")))
            for part in ("w1", "w2", "w3")
        }
        for found, expected in ((w13.of(expert), torch.cat([values["w1"], values["w3"]])), (w2.of(expert), values["w2"])):
            assert torch.equal(found.float().view(torch.int32), expected.view(torch.int32))
    assert made.exceptions() == (8 if wide and storage == "fp8_exact" else 0, 4 * (128 + 64))


def test_graphs_put_exceptions_in_their_places_as_the_cpu_does() -> None:
    values, rows = torch.randn(6, 4), torch.randn(5, 4, dtype=torch.bfloat16)
    index = torch.tensor([-1, 3, 9, 0, -1], dtype=torch.int32)
    found = put_static(values, index, rows)
    assert torch.equal(found, put_chosen(values, index, rows)) and torch.equal(found[[3, 0]], rows[[1, 3]].float())


def test_shapes_of_fp8_exact() -> None:
    made = bank(arithmetic("fp32"), StoredExperts(4, 64, 64), "fp8_exact")
    assert {name: (list(tensor.shape), tensor.dtype) for name, tensor in made.named_parameters()} == {
        "w13": ([4, 128, 64], torch.uint8), "w13_scale": ([4, 128], torch.bfloat16),
        "w13_exceptions": ([2, 64], torch.bfloat16), "w13_places": ([2], torch.int32),
        "w2": ([4, 64, 64], torch.uint8), "w2_scale": ([4, 64], torch.bfloat16),
        "w2_exceptions": ([1, 64], torch.bfloat16), "w2_places": ([1], torch.int32),
    }  # fmt: skip


def test_too_many_exceptions_are_counted_and_refused() -> None:
    stored = StoredExperts(4, 64, 64, wide=WIDE)
    with pytest.raises(
        CheckpointError, match=re.escape("experts: w2: 5 rows of this rank have values too far apart")
    ) as caught:
        bank(arithmetic("release"), stored, "fp8_exact", 4)
    assert "room for 4 of them (expert_exception_rows); give at least 5, or choose expert_weight_format fp4_bytes" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        (ExpertStorage("fp8"), "expert_weight_format: expected one of bf16, fp4_bytes, fp8_exact, found 'fp8'"),
        (ExpertStorage("bf16", 3), "expert_exception_rows: expected an integer of 1 or more, with expert_weight_format fp8"),
        (ExpertStorage("fp8_exact", 0), "found 0 with fp8_exact"),
    ],
)
def test_what_makes_no_sense_is_refused(storage: ExpertStorage, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        storage.check()


def logits(model: DeepseekV41Model) -> torch.Tensor:
    """Of a prompt of 20 tokens, and of one more."""
    state, slot, found = allocate(model.state_spec(1)), torch.zeros(1, dtype=torch.int64), []
    for start, ids in ((0, torch.arange(3, 23).view(1, -1)), (20, torch.tensor([[9]]))):
        where = torch.tensor([start]), torch.tensor([ids.shape[1]]), slot, slot
        found.append(model.logits(model(ids, *where, *state, read_len=64)[0]))
    return torch.cat(found, 1)


@torch.inference_mode()
@pytest.mark.parametrize("numerics", ["release", "fp32"])
def test_a_model_gives_the_same_logits_in_every_format(numerics: str, tmp_path: Path) -> None:
    """Its first layer has two experts whose w3 are too wide for fp8 in every row."""
    folder = tmp_path / "ckpt"
    folder.mkdir()
    names = {f"layers.0.ffn.experts.{expert}.w3.scale" for expert in (1, 4)}
    for file in TINY.iterdir():
        tensors = load_file(file) if file.suffix == ".safetensors" else {}
        if names & set(tensors):
            for name in names & set(tensors):
                tensors[name].view(torch.uint8)[:, 0] -= 20
            save_file(tensors, folder / file.name)
        else:
            (folder / file.name).symlink_to(file)
    found = {}
    for storage, rows in (("bf16", None), ("fp4_bytes", None), ("fp8_exact", 128)):
        model = load_model(folder, numerics, 64, storage, "torch", False, expert_exception_rows=rows)
        found[storage] = logits(model)
    assert exceptions_of(model)[0] == 128
    assert torch.equal(found["fp8_exact"], found["fp4_bytes"])
    assert (found["bf16"] - found["fp4_bytes"]).abs().max() < (0.05 if numerics == "release" else 1e-5)
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts: w1 and w3: 128 rows"):
        load_model(folder, numerics, 64, "fp8_exact", "torch", False)
