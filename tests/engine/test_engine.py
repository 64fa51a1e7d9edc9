# SPDX-License-Identifier: Apache-2.0
"""The engine: golden ids, continuous batching, slots, stops and limits."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.errors import DeepseekV41Error, RequestError
from modeling_deepseek_v41.loading import load_model
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Completion, Event, Request
from modeling_deepseek_v41.runner import Runner
from modeling_deepseek_v41.sampling import SamplingOptions
from modeling_deepseek_v41.text import TextTokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden/tiny_a"
LENGTHS = (1, 5, 17, 40, 100)


def requests_of_many_kinds(golden: dict) -> list[Request]:
    """Six requests that differ in length, options, limits and what they report."""
    sampled = SamplingOptions(1.0, seed=7)
    return [
        Request(golden[100][0], 9, logprobs=3, ignore_eos=True),
        Request(golden[1][0], 14, sampled, logprobs=0, ignore_eos=True),
        Request(golden[17][0], 5, SamplingOptions(1.3, top_k=30, top_p=0.9, seed=7), logprobs=2, ignore_eos=True),
        Request(golden[5][0], 12, ignore_eos=True),
        Request(golden[40][0], 11, dataclasses.replace(sampled, top_p=0.8), logprobs=1, ignore_eos=True),
        Request(golden[5][0], 7, sampled, logprobs=5, ignore_eos=True),
    ]


def outcome(completion: Completion) -> tuple:
    return completion.token_ids, completion.text, completion.logprobs, completion.finish_reason


def test_greedy_is_the_golden_continuation(model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict) -> None:
    engine = Engine(model, tokenizer, max_batch=3)
    requests = [Request(prompt, len(generated), ignore_eos=True) for prompt, generated in golden.values()]
    for completion, (prompt, generated) in zip(engine.generate(requests), golden.values(), strict=True):
        assert list(completion.prompt) == prompt
        assert list(completion.token_ids) == generated
        assert completion.text == tokenizer.decode(generated)
        assert completion.finish_reason == "length"
        assert min(completion.timings.queue, completion.timings.prefill, completion.timings.decode) >= 0
    assert engine.stats.prefill_tokens == sum(LENGTHS)
    assert engine.stats.decode_tokens == 24 * len(LENGTHS)
    assert not engine.busy


@pytest.mark.parametrize("numerics", ["fp32", "release"])
def test_a_request_is_the_same_alone_and_among_others(
    numerics: str, model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict
) -> None:
    model = model if numerics == "fp32" else load_model(GOLDEN / "ckpt", numerics, progress=False)
    requests = requests_of_many_kinds(golden)
    together = [outcome(each) for each in Engine(model, tokenizer, max_batch=4).generate(requests)]
    one_by_one = Engine(model, tokenizer, max_batch=1)
    alone = [outcome(one_by_one.generate([request])[0]) for request in requests]
    assert together == alone
    assert together[1] != together[5]


def test_a_used_slot_is_like_a_fresh_one(model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict) -> None:
    first, second = Request(golden[100][0], 20, ignore_eos=True), Request(golden[5][0], 20, ignore_eos=True, logprobs=2)
    fresh = outcome(Engine(model, tokenizer, max_batch=1).generate([second])[0])
    engine = Engine(model, tokenizer, max_batch=1)
    engine.generate([first])
    assert outcome(engine.generate([second])[0]) == fresh
    for tensor in engine.runner._state:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 3)
    assert outcome(engine.generate([second])[0]) == fresh


def test_requests_wait_for_a_slot_in_order(model: DeepseekV41Model, golden: dict) -> None:
    engine = Engine(model, max_batch=2)
    prompt, generated = golden[5]
    ids = [engine.add(Request(prompt, count, ignore_eos=True)) for count in (3, 5, 2, 4)]
    running: set[int] = set()
    started, most = [], 0
    while engine.busy:
        for event in engine.step():
            if event.request_id not in started:
                started.append(event.request_id)
            running.add(event.request_id)
            most = max(most, len(running))
            if event.finish_reason:
                running.remove(event.request_id)
    assert (started, most) == (ids, 2)
    for request_id, count in zip(ids, (3, 5, 2, 4), strict=True):
        completion = engine.take(request_id)
        assert (list(completion.token_ids), completion.text) == (generated[:count], None)
    with pytest.raises(RequestError, match="request id: 0 is not finished, or its result was taken before"):
        engine.take(0)


def test_requests_may_come_at_any_time(model: DeepseekV41Model, golden: dict) -> None:
    engine = Engine(model, max_batch=4)
    ids = {}
    for length in LENGTHS:
        ids[length] = engine.add(Request(golden[length][0], 10, ignore_eos=True))
        engine.step()
        engine.step()
    finished = engine.run()
    assert {length: list(finished[ids[length]].token_ids) for length in LENGTHS} == {n: golden[n][1][:10] for n in LENGTHS}


def test_cancel(model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict) -> None:
    engine = Engine(model, tokenizer, max_batch=2, prefill_buckets=[16])
    other = engine.add(Request(golden[17][0], 12, ignore_eos=True))
    reading = engine.add(Request(golden[100][0], 12))
    waiting = engine.add(Request(golden[5][0], 12))
    for _ in range(4):
        engine.step()
    assert engine.cancel(waiting) and engine.cancel(reading)
    late = engine.add(Request(golden[40][0], 12, ignore_eos=True))
    events = engine.step()
    assert [(event.request_id, event.finish_reason, event.token_ids) for event in events if event.finish_reason] == [
        (reading, "cancelled", ()),
        (waiting, "cancelled", ()),
    ]
    for _ in range(5):
        engine.step()
    assert engine.cancel(late)
    assert not engine.cancel(late) and not engine.cancel(waiting)
    finished = engine.run()
    assert list(finished[other].token_ids) == golden[17][1][:12]
    assert finished[late].finish_reason == "cancelled"
    assert finished[late].token_ids == tuple(golden[40][1][: len(finished[late].token_ids)]) != ()
    assert finished[late].text == tokenizer.decode(finished[late].token_ids)
    assert (finished[reading].token_ids, finished[waiting].token_ids) == ((), ())
    assert len(engine._free) == 2
    for unknown in (99, -1, "a"):
        with pytest.raises(RequestError, match="was never given out"):
            engine.cancel(unknown)


def collect(engine: Engine, request: Request) -> tuple[list[Event], Completion]:
    request_id = engine.add(request)
    events = []
    while engine.busy:
        events += [event for event in engine.step() if event.request_id == request_id]
    completion = engine.take(request_id)
    assert "".join(event.text for event in events) == completion.text
    assert [token for event in events for token in event.token_ids] == list(completion.token_ids)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == completion.finish_reason
    return events, completion


def test_stop_strings_over_token_boundaries(model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict) -> None:
    engine = Engine(model, tokenizer)
    prompt, generated = golden[17]
    text = tokenizer.decode(generated)
    for length in (1, 2, 5, 9):
        for start in range(0, len(text) - length, 3):
            stop = text[start : start + length]
            if "\ufffd" in stop:
                continue
            _, completion = collect(engine, Request(prompt, 25, stop_strings=["never there", stop], ignore_eos=True))
            assert completion.text == text[: text.find(stop)]
            assert completion.finish_reason == "stop_string"
            taken = len(completion.token_ids)
            assert list(completion.token_ids) == generated[:taken]
            assert stop in tokenizer.decode(generated[:taken]) and stop not in tokenizer.decode(generated[: taken - 1])


def test_the_beginning_of_a_stop_string_comes_late_but_comes(
    model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict
) -> None:
    prompt, generated = golden[17]
    text = tokenizer.decode(generated)
    events, completion = collect(Engine(model, tokenizer), Request(prompt, 25, stop_strings=[text[-3:] + "!"], ignore_eos=True))
    assert completion.text == text
    assert completion.finish_reason == "length"
    assert events[-1].text.endswith(text[-3:])


def test_end_of_sequence_and_stop_tokens(model: DeepseekV41Model, tokenizer: TextTokenizer, golden: dict, monkeypatch) -> None:
    prompt, generated = golden[40]
    fifth = generated[4]
    assert fifth not in generated[:4]
    _, completion = collect(Engine(model, tokenizer), Request(prompt, 25, stop_token_ids=[fifth], ignore_eos=True))
    assert list(completion.token_ids) == generated[:5]
    assert completion.text == tokenizer.decode(generated[:4])
    assert completion.finish_reason == "stop"
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_id=(fifth, 1)))
    engine = Engine(model, tokenizer)
    assert collect(engine, Request(prompt, 25))[1].token_ids == completion.token_ids
    assert engine.generate([Request(prompt, 5)])[0].finish_reason == "stop"
    assert list(engine.generate([Request(prompt, 25, ignore_eos=True)])[0].token_ids) == generated


def test_max_new_tokens(model: DeepseekV41Model, golden: dict) -> None:
    engine = Engine(model, max_batch=8)
    prompt, generated = golden[5]
    completions = engine.generate([Request(prompt, count, ignore_eos=True) for count in range(1, 8)])
    assert [list(completion.token_ids) for completion in completions] == [generated[:count] for count in range(1, 8)]
    assert {completion.finish_reason for completion in completions} == {"length"}


@pytest.mark.parametrize("buckets", [[16, 64], [8], [7]])
def test_max_seq_len(buckets: list[int], golden: dict) -> None:
    """The padding of the last chunk reaches beyond the 23 positions that there are."""
    model = load_model(GOLDEN / "ckpt", "fp32", max_seq_len=23, progress=False)
    prompt, generated = golden[17]
    engine = Engine(model, max_batch=2, prefill_buckets=buckets)
    until_full, fits = engine.generate([Request(prompt, ignore_eos=True), Request(prompt, 6, ignore_eos=True)])
    assert list(until_full.token_ids) == list(fits.token_ids) == generated[:6]
    assert until_full.finish_reason == "length"
    with pytest.raises(RequestError, match="17 tokens and max_new_tokens 7 make 24 positions, max_seq_len is 23; shorten"):
        engine.add(Request(prompt, 7))
    with pytest.raises(RequestError, match="23 tokens and max_new_tokens 1 make 24 positions"):
        engine.add(Request([5] * 23))


def test_chunks_give_the_same_logits_as_one_call(golden: dict) -> None:
    model = load_model(GOLDEN / "ckpt", "fp32_no_qdq", progress=False)
    prompt = golden[40][0]
    whole = torch.cat([logits for _, logits in Runner(model, 1).prompt_logits(prompt, 0)])
    assert whole.shape == (40, 512)
    for size in (1, 3, 6, 7, 15, 16, 17, 39):
        chunked = torch.empty_like(whole)
        for position, logits in Runner(model, 2, [size]).prompt_logits(prompt, 1):
            chunked[position : position + len(logits)] = logits
        assert ((chunked - whole).abs().amax(-1) / whole.abs().amax(-1)).max() < 1e-5
    last = list(Runner(model, 1, [16]).prompt_logits(prompt, 0, first=38))
    assert [position for position, _ in last] == [38]
    assert torch.cat([logits for _, logits in last]).shape == (2, 512)


def test_others_decode_between_the_chunks_of_a_long_prompt(model: DeepseekV41Model, golden: dict, capfd) -> None:
    engine = Engine(model, max_batch=2, prefill_buckets=[16], progress=True)
    short = engine.add(Request(golden[5][0], 20, ignore_eos=True))
    engine.step()
    long = engine.add(Request(golden[100][0], 10, ignore_eos=True))
    steps = [[event.request_id for event in engine.step()] for _ in range(8)]
    assert steps == [[short]] * 6 + [[short, long]] * 2
    finished = engine.run()
    assert list(finished[short].token_ids) == golden[5][1][:20]
    assert list(finished[long].token_ids) == golden[100][1][:10]
    assert engine._bar is None


def test_logprobs_are_the_models_own(model: DeepseekV41Model, golden: dict) -> None:
    stored = load_file(GOLDEN / "golden_f32.safetensors")["p5.logits"][0].log_softmax(-1)
    prompt, generated = golden[5]
    hot = Request(prompt, 1, SamplingOptions(5.0, top_k=3, seed=1), logprobs=4, ignore_eos=True)
    greedy, sampled = Engine(model).generate([Request(prompt, 25, logprobs=512, ignore_eos=True), hot])
    assert greedy.logprobs is not None and sampled.logprobs is not None
    for step, entry in enumerate(greedy.logprobs):
        assert entry.token_id == generated[step] == entry.alternatives[0][0]
        assert entry.logprob == entry.alternatives[0][1] == pytest.approx(stored[step, entry.token_id].item(), abs=1e-4)
        assert sorted(token for token, _ in entry.alternatives) == list(range(512))
    assert sampled.logprobs[0].alternatives == greedy.logprobs[0].alternatives[:4]
    assert sampled.logprobs[0].logprob in [logprob for _, logprob in sampled.logprobs[0].alternatives[:3]]


def test_sampled_tokens_come_from_the_requests_own_random_numbers(model: DeepseekV41Model, golden: dict) -> None:
    """One number in fp64 per token, in order, from a generator that is seeded once; the other rows take none of them."""
    requests = [Request(golden[n][0], 12, SamplingOptions(1.0, seed=9), logprobs=512, ignore_eos=True) for n in (5, 40, 17)]
    completions = Engine(model, max_batch=2).generate(requests)
    for completion in completions:
        assert completion.logprobs is not None
        generator = torch.Generator().manual_seed(9)
        for entry in completion.logprobs:
            probs = torch.tensor([logprob for _, logprob in sorted(entry.alternatives)], dtype=torch.float64).exp()
            before, u = probs.cumsum(0) - probs, torch.rand((), dtype=torch.float64, generator=generator)
            assert before[entry.token_id] - 1e-5 < u * probs.sum() < before[entry.token_id] + probs[entry.token_id] + 1e-5


def test_a_failed_step_can_be_repeated(model: DeepseekV41Model, golden: dict) -> None:
    prompt, generated = golden[5]
    engine = Engine(model, max_batch=2)
    ids = [engine.add(Request(prompt, 6, ignore_eos=True)) for _ in range(2)]
    engine.step()
    engine.step()
    weight = model.norm.weight.data.clone()
    model.norm.weight.data[3] = float("nan")
    for _ in range(2):
        with pytest.raises(DeepseekV41Error, match="logits are not finite"):
            engine.step()
    model.norm.weight.data.copy_(weight)
    finished = engine.run()
    assert [list(finished[request_id].token_ids) for request_id in ids] == [generated[:6]] * 2


def test_interrupted_generate_leaves_nothing_behind(model: DeepseekV41Model, golden: dict, monkeypatch) -> None:
    engine = Engine(model, max_batch=1)
    monkeypatch.setattr(engine.runner, "call", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(golden[5][0], 3), Request(golden[1][0], 3)])
    monkeypatch.undo()
    assert engine.run() == {}
    assert list(engine.generate([Request(golden[5][0], 3)])[0].token_ids) == golden[5][1][:3]
