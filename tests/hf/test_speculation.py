# SPDX-License-Identifier: Apache-2.0
"""generate(speculative=True): the tokens of the same call without it, sampled ones too, whatever the options are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from modeling_deepseek_v41 import DeepseekV41ForCausalLM
from modeling_deepseek_v41.errors import RequestError

from .test_generate import PAD, StopBehind, batch, cache_of, prompts


@pytest.fixture(scope="module")
def drafting(folder: Path) -> DeepseekV41ForCausalLM:
    """In fp32, with its drafter."""
    return DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32", drafter=True)


@pytest.mark.parametrize("k", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 17, 100])
def test_greedy_tokens_are_the_references(
    drafting: DeepseekV41ForCausalLM, golden: dict[str, Tensor], length: int, k: int | None
) -> None:
    prompt, expected = golden[f"p{length}.input_ids"], golden[f"p{length}.generated"]
    output = drafting.generate(
        prompt, max_new_tokens=25, do_sample=False, speculative=True, num_draft_tokens=k, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, torch.cat([prompt, expected], 1))
    stats = output.speculation
    assert stats.num_draft_tokens == (k or 5)
    assert stats.tokens == stats.steps + sum(stats.accepted) == (25 if length == 1 else 24)
    assert torch.equal(drafting.generate(prompt, max_new_tokens=25, speculative=True, num_draft_tokens=k), output.sequences)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 1.3, "top_k": 0},
    {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 5, "suppress_tokens": [3, 4]},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_same_with_and_without(
    drafting: DeepseekV41ForCausalLM, golden: dict[str, Tensor], side: str, options: dict[str, Any]
) -> None:
    """Rows accept different counts and end at different times; scores and logits are equal to the bit."""
    rows, expected = prompts(golden, (17, 1, 40, 5))
    ids, mask = batch(rows, side)
    everything = {
        "attention_mask": mask, "max_new_tokens": 14, "eos_token_id": [int(expected[0][3]), int(expected[2][7])],
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True,
    } | options  # fmt: skip
    found = []
    for speculative in (False, True):
        torch.manual_seed(4)
        found.append(drafting.generate(ids, speculative=speculative, **everything))
    plain, ahead = found
    assert torch.equal(plain.sequences, ahead.sequences)
    for name in ("logits", "scores"):
        for one, other in zip(getattr(plain, name), getattr(ahead, name), strict=True):
            assert torch.equal(one, other)
    assert cache_of(plain).lengths == cache_of(ahead).lengths
    assert ahead.speculation.steps < ahead.speculation.tokens


def test_ends_inside_a_block(drafting: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "left")
    for place in range(6):
        stop = StoppingCriteriaList([StopBehind(int(expected[0][place]))])
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 9, "stopping_criteria": stop}
        assert torch.equal(drafting.generate(ids, speculative=True, **options), drafting.generate(ids, **options))


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*is deprecated:FutureWarning")
def test_going_on_from_a_cache(drafting: DeepseekV41ForCausalLM, golden: dict[str, Tensor], speculative: bool) -> None:
    """The drafter saw what was generated before, with and without speculation."""
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "left")
    first = drafting.generate(ids, attention_mask=mask, max_new_tokens=6, return_dict_in_generate=True, speculative=speculative)
    longer = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
    options: dict[str, Any] = {"speculative": True, "return_dict_in_generate": True, "max_new_tokens": 19}
    second = drafting.generate(first.sequences, attention_mask=longer, past_key_values=cache_of(first), **options)
    assert torch.equal(second.sequences[:, 17:], torch.stack(expected))
    fresh = drafting.generate(first.sequences, attention_mask=longer, **options)
    assert torch.equal(fresh.sequences, second.sequences)


def test_up_to_the_last_position(folder: Path) -> None:
    model = DeepseekV41ForCausalLM.from_pretrained(folder, numerics="fp32", drafter=True, max_seq_len=20)
    prompt = torch.randint(3, 500, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = model.generate(prompt, max_new_tokens=12, eos_token_id=None)
    for k in (1, 4, 5):
        found = model.generate(prompt, max_new_tokens=12, eos_token_id=None, speculative=True, num_draft_tokens=k)
        assert torch.equal(found, plain) and found.shape == (1, 21)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 6}, "num_draft_tokens: expected 1 to 5, found 6; the drafter was trained on blocks"),
        ({"num_draft_tokens": 0}, "num_draft_tokens: expected 1 to 5, found 0"),
        ({"use_cache": False}, "use_cache: found False, but speculation lives on the cache"),
        ({"num_beams": 2}, "num_beams: found 2"),
        ({"speculative": 5}, "speculative: expected True or False, found 5"),
        ({"speculative": False, "num_draft_tokens": 3}, "num_draft_tokens: found 3 without speculative=True"),
    ],
)
def test_refused(drafting: DeepseekV41ForCausalLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        drafting.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, **({"speculative": True} | options))


def test_a_model_without_its_drafter(model: DeepseekV41ForCausalLM) -> None:
    with pytest.raises(RequestError, match=r"has no drafter; load it with from_pretrained\(folder, drafter=True\)"):
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, speculative=True, pad_token_id=PAD)
