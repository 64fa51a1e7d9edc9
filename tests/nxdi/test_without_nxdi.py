# SPDX-License-Identifier: Apache-2.0
"""What of the application needs no NxDI: imports, refusals, and the arithmetic of batches and chunks."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_deepseek_v41 import nxdi
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.nxdi.chunks import Batch, check_slots, groups, merge, prompt_chunks, step_inputs
from modeling_deepseek_v41.nxdi.refusals import refusal, refused
from modeling_deepseek_v41.nxdi.rows import graph_call, last_row, prompt_read_length

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

without = pytest.mark.skipif(
    importlib.util.find_spec("neuronx_distributed_inference") is not None, reason="NxD Inference is installed"
)


@without
def test_a_missing_package_is_named() -> None:
    with pytest.raises(nxdi.MissingNxDI, match="neuronx_distributed is not installed"):
        nxdi.NeuronDeepseekV41ForCausalLM  # noqa: B018


@without
def test_the_command_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "modeling_deepseek_v41.inference_demo", "run"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "pip install" in done.stderr and "Traceback" not in done.stderr


@without
@pytest.mark.parametrize("name", ["compile", "generate", "benchmark", "serve_loop"])
def test_an_example_says_what_to_install(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"trn2_{name}.py")]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "--compiled-path" in shown.stdout
    options = ["--model-path", "ckpt", "--compiled-path", "out", *(["--prompt", "a"] if name == "generate" else [])]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pip install" in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        nxdi.NoSuchName  # noqa: B018


def test_every_option_that_left_its_default_is_listed() -> None:
    options = argparse.Namespace(quantized=True, fused_qkv=False, padding_side="left", batch_size=4)
    defaults = {"quantized": False, "fused_qkv": False, "padding_side": None}
    lines = refused(options, defaults.get)
    assert [line.split(":")[0] for line in lines] == ["padding_side", "quantized"]
    assert refusal(lines).startswith("2 option(s)")


def batch(rows: list[list[int]], slots: list[int] | None = None) -> Batch:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
    positions = torch.arange(longest, dtype=torch.int32).expand(len(rows), -1).masked_fill(mask == 0, 1)
    return Batch(ids, mask, positions, torch.tensor(slots or list(range(len(rows)))), torch.ones(len(rows), 3))


def test_a_last_group_is_filled_with_inactive_rows() -> None:
    parts = list(groups(batch([[1], [2], [3]], [2, 0, 1]), 2))
    assert [real for _, real in parts] == [2, 1]
    assert parts[1][0].seq_ids.tolist() == [1, -1] and parts[1][0].attention_mask.sum(1).tolist() == [1, 0]


def test_a_short_prompt_is_one_call_of_the_smallest_bucket() -> None:
    [chunk] = prompt_chunks(batch([[7, 8, 9], [5]]), [4, 8], 64)
    assert chunk.inputs.input_ids.shape == (2, 4) and chunk.ends.tolist() == [True, True]
    assert chunk.inputs.attention_mask.sum(1).tolist() == [3, 1]


def test_a_prompt_of_a_bucket_s_size_takes_that_bucket() -> None:
    [chunk] = prompt_chunks(batch([[7, 8, 9, 1]]), [4, 8], 64)
    assert chunk.inputs.input_ids.shape == (1, 4)


def test_a_long_prompt_runs_in_chunks_of_the_largest_bucket() -> None:
    chunks = list(prompt_chunks(batch([list(range(9)), [5, 6]]), [2, 4], 64))
    assert [chunk.inputs.input_ids.shape[1] for chunk in chunks] == [4, 4, 4]
    assert [chunk.inputs.position_ids[0, 0].item() for chunk in chunks] == [0, 4, 8]
    assert [chunk.inputs.attention_mask.sum(1).tolist() for chunk in chunks] == [[4, 2], [4, 0], [1, 0]]
    assert [chunk.inputs.seq_ids.tolist() for chunk in chunks] == [[0, 1], [0, -1], [0, -1]]
    assert [chunk.ends.tolist() for chunk in chunks] == [[False, True], [False, False], [True, False]]
    results = [[torch.tensor([10 * i, 10 * i + 1])] for i in range(3)]
    assert merge(results, [chunk.ends for chunk in chunks])[0].tolist() == [20, 1]


def test_prompts_that_cannot_be_read_are_refused() -> None:
    good = batch([[1, 2], [3]])
    with pytest.raises(RequestError, match="pad on the right"):
        list(prompt_chunks(good._replace(attention_mask=torch.tensor([[1, 1], [0, 1]])), [4], 64))
    with pytest.raises(RequestError, match="begins at position 0"):
        list(prompt_chunks(good._replace(position_ids=good.position_ids + 3), [4], 64))
    with pytest.raises(RequestError, match="expected 1 to seq_len 1"):
        list(prompt_chunks(good, [4], 1))


def test_a_step_takes_the_bucket_that_holds_its_tokens() -> None:
    step = Batch(
        torch.ones(2, 1), torch.ones(2, 9, dtype=torch.int32), torch.tensor([[9], [4]]), torch.tensor([0, 1]), torch.ones(2, 3)
    )
    assert step_inputs(step, [10, 20], 1).attention_mask.shape == (2, 10)
    found = step_inputs(step, [10, 20], 6)
    assert found.attention_mask.sum(1).tolist() == [9, 4] and found.attention_mask.shape == (2, 20)
    with pytest.raises(RequestError, match="full"):
        step_inputs(step, [9], 1)


def test_sequence_ids_are_checked() -> None:
    check_slots(torch.tensor([3, -1, -1, 0]), 4)
    with pytest.raises(RequestError, match="kv_cache_batch_size 3"):
        check_slots(torch.tensor([3]), 3)
    with pytest.raises(RequestError, match="different ids"):
        check_slots(torch.tensor([1, 1]), 3)


def test_the_rows_of_a_prompt_and_of_a_step() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[8, 9, 10, 1], [0, 1, 1, 1]], dtype=torch.int32)
    call = graph_call(torch.ones(2, 4, dtype=torch.int32), mask, positions, torch.tensor([1, -1], dtype=torch.int32))
    assert (call.start.tolist(), call.length.tolist(), call.is_prompt) == ([8, 0], [3, 0], True)
    late = torch.tensor([[3], [2]], dtype=torch.int32)
    call = graph_call(torch.ones(2, 1, dtype=torch.int32), mask, late, torch.tensor([0, 1], dtype=torch.int32))
    assert (call.start.tolist(), call.length.tolist(), call.is_prompt) == ([3, 1], [1, 1], False)


def test_the_last_real_row() -> None:
    hidden = torch.arange(8.0).view(2, 4, 1)
    assert last_row(hidden, torch.tensor([3, 0])).flatten().tolist() == [2.0, 4.0]


def test_only_the_largest_bucket_reads_everything() -> None:
    assert [prompt_read_length(tokens, 32, 256) for tokens in (16, 32)] == [16, 256]
