# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods against the golden logits and against the engine's own logprobs."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.score import Scorer
from modeling_deepseek_v41.text import load_tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden/tiny_a"


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    model = load_model(GOLDEN / "ckpt", "fp32_no_qdq", progress=False)
    return Scorer(model, load_tokenizer(GOLDEN / "ckpt", model.config))


def test_a_greedy_continuation_has_the_golden_logits(scorer: Scorer) -> None:
    stored = load_file(GOLDEN / "golden_f32_noq.safetensors")
    prompt, generated = stored["p17.input_ids"][0].tolist(), stored["p17.generated"][0].tolist()
    expected = stored["p17.logits"][0].log_softmax(-1)[torch.arange(25), stored["p17.generated"][0]]
    score = scorer.continuation(prompt, generated)
    torch.testing.assert_close(torch.tensor(score.logprobs), expected, atol=2e-4, rtol=0)
    assert score.is_greedy
    assert score.total == pytest.approx(expected.double().sum().item(), abs=1e-3)
    other = [*generated[:10], (generated[10] + 1) % 500, *generated[11:]]
    changed = scorer.continuation(prompt, other)
    assert not changed.is_greedy
    assert changed.logprobs[:10] == pytest.approx(score.logprobs[:10], abs=1e-4)


def test_scores_of_a_text(scorer: Scorer) -> None:
    text = "Every morning the ferry leaves. 我们 " * 6
    score = scorer.text(text)
    assert scorer.tokenizer is not None
    ids = scorer.tokenizer.encode(text, bos=False)
    assert len(ids) > 64
    assert list(score.token_ids) == ids
    assert score.logprobs == scorer.continuation([0], ids).logprobs
    in_two = scorer.continuation([0], ids[:30]).total + scorer.continuation([0, *ids[:30]], ids[30:]).total
    assert score.total == pytest.approx(in_two, abs=1e-2)
    assert score.perplexity == pytest.approx(math.exp(-score.total / len(ids)))
    assert score.bits_per_byte == pytest.approx(-score.total / math.log(2) / len(text.encode()))


def test_engine_and_scorer_agree(scorer: Scorer) -> None:
    prompt = [0, 40, 41, 42, 300, 301, 40, 41]
    completion = Engine(scorer.model).generate([Request(prompt, 20, logprobs=0, ignore_eos=True)])[0]
    assert completion.logprobs is not None
    score = scorer.continuation(prompt, completion.token_ids)
    assert score.is_greedy
    assert score.logprobs == pytest.approx([entry.logprob for entry in completion.logprobs], abs=2e-4)


def test_the_start_token_of_a_model_without_bos(scorer: Scorer, monkeypatch) -> None:
    config = scorer.model.config
    monkeypatch.setattr(scorer.model, "config", dataclasses.replace(config, bos_token_id=None))
    assert scorer.text("ab").logprobs == scorer.continuation([1], scorer.text("ab").token_ids).logprobs
    monkeypatch.setattr(scorer.model, "config", dataclasses.replace(config, bos_token_id=None, eos_token_id=None))
    with pytest.raises(RequestError, match="has neither bos_token_id nor eos_token_id"):
        scorer.text("ab")


def test_as_many_tokens_as_positions(scorer: Scorer) -> None:
    assert len(scorer.continuation([0], [5] * 256).logprobs) == 256
    with pytest.raises(RequestError, match=r"258 tokens \(context 2, scored 256\) need 257 positions, max_seq_len is 256"):
        scorer.continuation([0, 3], [5] * 256)


def test_what_cannot_be_scored(scorer: Scorer) -> None:
    for context, continuation, message in (
        ([], [1], "context: is empty"),
        ([1], [], "continuation: is empty"),
        ([1], [512], "token 1: expected an id from 0 to 511, found 512"),
        ([510], [1], "token 0 is the image token 510"),
        ("ab", [1], "context: expected a list of token ids, found 'ab'"),
    ):
        with pytest.raises(RequestError, match=message):
            scorer.continuation(context, continuation)
    with pytest.raises(RequestError, match="text: is empty"):
        scorer.text("")
    with pytest.raises(RequestError, match="text: needs a tokenizer"):
        Scorer(scorer.model).text("ab")
