# SPDX-License-Identifier: Apache-2.0
"""The engine with a drafter: the same greedy texts, whatever it says, stops and limits inside a block, statistics."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.dspark.options import Speculation
from modeling_deepseek_v41.dspark.statistics import SpeculationStats
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.errors import DeepseekV41Error, RequestError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Request
from modeling_deepseek_v41.sampling import SamplingOptions
from modeling_deepseek_v41.state import State
from modeling_deepseek_v41.text import TextTokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden/tiny_a"


@pytest.fixture(scope="session")
def drafting() -> DeepseekV41Model:
    """The golden checkpoint in fp32 with its drafter."""
    return load_model(GOLDEN / "ckpt", "fp32", progress=False, drafter=True)


class Known:
    """A drafter that knows every slot's text, prompt and continuation, and is ``wrong`` at some places of it."""

    def __init__(self, vocab: int, texts: list[list[int]], wrong: frozenset[int] = frozenset()):
        self.vocab, self.texts, self.wrong = vocab, texts, wrong

    def update(self, taps: Tensor, state: State) -> None:
        """Nothing to learn."""

    def propose(self, token: Tensor, rank: Tensor, state: State, embed: object, head: object, count: int, *_: object) -> Drafts:
        """What stands behind ``token``, one off at the places that are wrong; a confidence of 2 and -2."""
        ids = torch.zeros(len(token), count, dtype=torch.int64)
        confidence = torch.full((len(token), count), 2.0)
        for row, (slot, start) in enumerate(zip(state.call.slot.tolist(), state.call.start.tolist(), strict=True)):
            text = self.texts[slot]
            for place in range(count):
                at = start + 1 + place
                ids[row, place] = text[at] if at < len(text) else 0
                if at in self.wrong:
                    ids[row, place] = (ids[row, place] + 1) % self.vocab
                    confidence[row, place] = -2.0
        return Drafts(ids, torch.zeros(len(token), count, self.vocab), None, confidence)


def texts(golden: dict, *lengths: int) -> list[list[int]]:
    return [golden[length][0] + golden[length][1] for length in lengths]


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_greedy_is_the_golden_continuation(drafting: DeepseekV41Model, golden: dict, k: int) -> None:
    engine = Engine(drafting, max_batch=3, speculation=Speculation(k))
    requests = [Request(prompt, len(generated) - k, ignore_eos=True) for prompt, generated in golden.values()]
    for completion, (_, generated) in zip(engine.generate(requests), golden.values(), strict=True):
        assert list(completion.token_ids) == generated[: len(generated) - k]
        assert completion.finish_reason == "length"
    stats = engine.stats.speculation
    assert stats is not None
    assert stats.tokens == engine.stats.decode_tokens == sum(len(generated) - k - 1 for _, generated in golden.values())
    assert stats.steps + sum(stats.accepted) == stats.tokens


@pytest.mark.parametrize("numerics", ["fp32", "release"])
def test_batches_with_and_without_speculation(numerics: str, drafting: DeepseekV41Model, golden: dict) -> None:
    """Rows of many kinds, of which greedy ones give the plain engine's tokens and log-probabilities, alone and together."""
    model = drafting if numerics == "fp32" else load_model(GOLDEN / "ckpt", numerics, progress=False, drafter=True)
    sampled = SamplingOptions(1.1, top_k=40, seed=3)
    requests = [
        Request(golden[100][0], 19, logprobs=2, ignore_eos=True),
        Request(golden[5][0], 23, sampled, ignore_eos=True),
        Request(golden[17][0], 9, logprobs=1, ignore_eos=True),
        Request(golden[1][0], 30, ignore_eos=True),
        Request(golden[40][0], 12, dataclasses.replace(sampled, top_p=0.9), logprobs=0, ignore_eos=True),
    ]
    plain = Engine(model, max_batch=2).generate(requests)
    for options in (Speculation(), Speculation(3, sampled_drafts=True)):
        together = Engine(model, max_batch=4, speculation=options).generate(requests)
        alone = Engine(model, max_batch=1, speculation=options)
        for request, found, expected in zip(requests, together, plain, strict=True):
            single = alone.generate([request])[0]
            assert (found.token_ids, found.logprobs) == (single.token_ids, single.logprobs)
            if request.sampling.is_greedy:
                assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
            else:
                assert len(found.token_ids) == len(expected.token_ids)


def test_the_end_inside_a_block(drafting: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict) -> None:
    """With drafts that are all right, every end falls inside a block at some length."""
    prompt, generated = golden[17]
    drafter = Known(512, texts(golden, 17))
    engine = Engine(drafting, tokenizer, max_batch=1, speculation=Speculation(5, drafter=drafter))
    for taken in range(2, 14):
        limited = engine.generate([Request(prompt, taken, ignore_eos=True)])[0]
        assert (list(limited.token_ids), limited.finish_reason) == (generated[:taken], "length")
        stop = generated[taken - 1]
        ended = engine.generate([Request(prompt, 25, stop_token_ids=[stop], ignore_eos=True, logprobs=0)])[0]
        first = generated.index(stop) + 1
        assert (list(ended.token_ids), ended.finish_reason) == (generated[:first], "stop")
        assert ended.text == tokenizer.decode(generated[: first - 1])
        assert ended.logprobs is not None and [entry.token_id for entry in ended.logprobs] == generated[:first]
    text = tokenizer.decode(generated)
    stopped = engine.generate([Request(prompt, 25, stop_strings=[text[6:9]], ignore_eos=True)])[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.find(text[6:9])], "stop_string")
    after = engine.generate([Request(prompt, 25, ignore_eos=True)])[0]
    assert list(after.token_ids) == generated, "a slot in which a block was cut short is like a fresh one"


def test_cancel_and_late_requests(drafting: DeepseekV41Model, golden: dict) -> None:
    engine = Engine(drafting, max_batch=2, prefill_buckets=[16], speculation=Speculation())
    first = engine.add(Request(golden[5][0], 20, ignore_eos=True))
    other = engine.add(Request(golden[100][0], 20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.cancel(first)
    late = engine.add(Request(golden[40][0], 20, ignore_eos=True))
    finished = engine.run()
    assert list(finished[other].token_ids) == golden[100][1][:20]
    assert list(finished[late].token_ids) == golden[40][1][:20]
    assert finished[first].finish_reason == "cancelled"
    assert list(finished[first].token_ids) == golden[5][1][: len(finished[first].token_ids)]


def test_a_failed_step_can_be_repeated(drafting: DeepseekV41Model, golden: dict) -> None:
    prompt, generated = golden[5]
    engine = Engine(drafting, max_batch=2, speculation=Speculation())
    ids = [engine.add(Request(prompt, 12, ignore_eos=True)) for _ in range(2)]
    engine.step()
    engine.step()
    weight = drafting.norm.weight.data.clone()
    drafting.norm.weight.data[3] = float("nan")
    for _ in range(2):
        with pytest.raises(DeepseekV41Error, match="logits are not finite"):
            engine.step()
    drafting.norm.weight.data.copy_(weight)
    finished = engine.run()
    assert [list(finished[request_id].token_ids) for request_id in ids] == [generated[:12]] * 2


def test_up_to_the_last_position(golden: dict) -> None:
    model = load_model(GOLDEN / "ckpt", "fp32", max_seq_len=23, progress=False, drafter=True)
    prompt, generated = golden[17]
    for k in (1, 3, 5):
        (full,) = Engine(model, max_batch=1, speculation=Speculation(k)).generate([Request(prompt, ignore_eos=True)])
        assert (list(full.token_ids), full.finish_reason) == (generated[:6], "length")


def test_statistics_of_a_known_drafter(drafting: DeepseekV41Model, golden: dict) -> None:
    """Counted by hand: 24 tokens behind the first, one wrong draft, at the fourth new token behind it."""
    drafter = Known(512, texts(golden, 17, 17), frozenset([17 + 4]))
    engine = Engine(drafting, max_batch=1, speculation=Speculation(5, drafter=drafter))
    completion = engine.generate([Request(golden[17][0], 25, ignore_eos=True)])[0]
    assert list(completion.token_ids) == golden[17][1]
    stats = completion.speculation
    assert stats is not None
    # 4 tokens (3 drafts kept, the fourth not), then 6, 6, 6, then the last 2, of which one was drafted.
    assert (stats.steps, stats.tokens, stats.tokens_per_step) == (5, 24, 4.8)
    assert (stats.judged, stats.accepted) == ([5, 4, 4, 4, 3], [5, 4, 4, 3, 3])
    assert stats.calibration() == [(0.1, 0.2, 1, 0.0), (0.8, 0.9, 19, 1.0)]
    assert stats.as_dict()["confidence_bands"][0] == {"from": 0.1, "to": 0.2, "judged": 1, "accepted_share": 0.0}
    assert engine.stats.speculation == stats
    assert Engine(drafting, max_batch=1).generate([Request(golden[17][0], 2)])[0].speculation is None


def test_statistics_where_the_text_ends_inside_a_block() -> None:
    stats = SpeculationStats(3)
    assert stats.tokens_per_step is None and stats.calibration() == []
    stats.record([0.0, 1e9, -1e9], 4, 2)  # all three kept, the text ended with the second
    assert (stats.judged, stats.accepted, stats.tokens) == ([1, 1, 0], [1, 1, 0], 2)
    stats.record([0.0, 0.0, 0.0], 3, 3)  # two kept, the third not
    stats.record([], 1, 1)  # the limit left no room for drafts
    stats.record([5.0], 1, 1)  # the only one not kept
    assert (stats.judged, stats.accepted, stats.tokens, stats.steps) == ([3, 2, 1], [2, 2, 0], 7, 4)
    assert stats.band_judged == [0, 0, 0, 0, 0, 4, 0, 0, 0, 2]


def test_sampled_texts_repeat_with_their_seed(drafting: DeepseekV41Model, golden: dict) -> None:
    hot = Request(golden[17][0], 20, SamplingOptions(1.0, seed=5), ignore_eos=True)
    for options in (Speculation(4), Speculation(4, sampled_drafts=True)):
        first, second = (Engine(drafting, max_batch=1, speculation=options).generate([hot])[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        other = dataclasses.replace(hot, sampling=SamplingOptions(1.0, seed=6))
        assert Engine(drafting, max_batch=1, speculation=options).generate([other])[0].token_ids != first.token_ids


@pytest.mark.parametrize("count", [0, 6, -1, True, 2.0, "3"])
def test_block_lengths_that_the_drafter_does_not_have(drafting: DeepseekV41Model, count: object) -> None:
    with pytest.raises(RequestError, match=r"num_draft_tokens: expected 1 to 5, found .* trained on blocks"):
        Engine(drafting, speculation=Speculation(count))  # type: ignore[arg-type]


def test_a_model_without_its_drafter(model: DeepseekV41Model) -> None:
    with pytest.raises(RequestError, match="loaded without its drafter; load it with drafter=True"):
        Engine(model, speculation=Speculation())
