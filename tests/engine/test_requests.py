# SPDX-License-Identifier: Apache-2.0
"""What is refused, where a block of tokens ends, and the shapes of calls."""

import dataclasses

import pytest
import torch

from modeling_deepseek_v41.buckets import next_chunk, prefill_buckets, read_length
from modeling_deepseek_v41.engine import Engine
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.generation import Generation
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.request import Event, Request, TokenLogprobs
from modeling_deepseek_v41.text import TextTokenizer

IMAGE = 510


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt: is empty; give at least one token"),
        ({"prompt": "text"}, "prompt: expected a list of token ids, found 'text'"),
        ({"prompt": [1, 2.0]}, r"prompt: expected a list of token ids, found \[1, 2.0\]"),
        ({"prompt": [True]}, "prompt: expected a list of token ids"),
        ({"prompt": b"ab"}, "prompt: expected a list of token ids, found b'ab'"),
        ({"prompt": torch.zeros(1, 2, dtype=torch.int64)}, "prompt: expected a list of token ids, found tensor"),
        ({"prompt": None}, "prompt: expected a list of token ids, found None"),
        ({"prompt": [3, 512]}, "prompt: token 1: expected an id from 0 to 511, found 512"),
        ({"prompt": [-1]}, "prompt: token 0: expected an id from 0 to 511, found -1"),
        ({"prompt": [3, IMAGE]}, "prompt: token 1 is the image token 510: image tokens are not supported in a text run"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of 1 or more, or None, found 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected an integer"),
        ({"max_new_tokens": 255}, "2 tokens and max_new_tokens 255 make 257 positions, max_seq_len is 256"),
        ({"logprobs": -1}, "logprobs: expected an integer of 0 or more, or None, found -1"),
        ({"logprobs": 513}, "logprobs: expected at most the vocabulary's 512 tokens, found 513"),
        ({"stop_strings": ""}, "stop_strings: expected a list of texts that are not empty, found ''"),
        ({"stop_strings": None}, "stop_strings: expected a list of texts that are not empty, found None"),
        ({"stop_strings": ["a", ""]}, "stop_strings: expected a list of texts"),
        ({"stop_strings": ["a"]}, "stop_strings: need a tokenizer"),
        ({"stop_token_ids": [512]}, "stop_token_ids: expected ids from 0 to 511, found 512"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a list of token ids, found 3"),
        ({"sampling": {"temperature": 1}}, "sampling: expected SamplingOptions"),
    ],
)
def test_requests_that_cannot_be_served(options: dict, message: str, model: DeepseekV41Model) -> None:
    engine = Engine(model)
    with pytest.raises(RequestError, match=message):
        engine.add(Request(**({"prompt": [3, 4]} | options)))
    with pytest.raises(RequestError, match=message):
        engine.generate([Request([3]), Request(**({"prompt": [3, 4]} | options))])
    assert not engine.busy


def test_image_ids_are_plain_ids_without_vision(model: DeepseekV41Model, monkeypatch) -> None:
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, has_vision=False))
    assert Engine(model).generate([Request([3, IMAGE], 1)])[0].token_ids


@pytest.mark.parametrize("slots", [0, -1, True, 1.5, None])
def test_max_batch_outside_its_range(slots: object, model: DeepseekV41Model) -> None:
    with pytest.raises(RequestError, match="max_batch: expected an integer of 1 or more"):
        Engine(model, max_batch=slots)


@pytest.mark.parametrize("buckets", [[], [0], [16, -1], [1.5]])
def test_prefill_buckets_outside_their_range(buckets: list, model: DeepseekV41Model) -> None:
    with pytest.raises(RequestError, match="prefill_buckets: expected a list of token counts above 0"):
        Engine(model, prefill_buckets=buckets)


def test_what_is_no_request(model: DeepseekV41Model) -> None:
    with pytest.raises(RequestError, match="request: expected a Request, found list"):
        Engine(model).add([1, 2])


def test_a_block_of_tokens_ends_where_the_request_ends(tokenizer: TextTokenizer) -> None:
    block = [TokenLogprobs(token, -1.0, ()) for token in (40, 41, 9, 42, 43)]
    tokens = [entry.token_id for entry in block]
    cases = [({}, 9, 3, "stop", 2), ({}, 43, 5, "stop", 4), ({"max_new_tokens": 2}, 9, 2, "length", 2)]
    cases += [({"max_new_tokens": 3}, 9, 3, "stop", 2), ({"max_new_tokens": 9}, 99, 5, None, 5)]
    cases += [({"stop_strings": [tokenizer.decode([41, 9])]}, 99, 3, "stop_string", 1)]
    for options, stop, taken, reason, shown in cases:
        request = Request([3], logprobs=0, **options)
        generation = Generation(4, request, request.max_new_tokens or 100, frozenset([stop]), tokenizer.decode)
        event = generation.advance(tokens, block)
        assert event == Event(4, tuple(tokens[:taken]), tokenizer.decode(tokens[:shown]), tuple(block[:taken]), reason)
        assert generation.position == taken


def test_buckets() -> None:
    assert prefill_buckets(8192) == (16, 64, 256, 512)
    assert prefill_buckets(100) == (16, 64, 100)
    assert prefill_buckets(3) == (3,)
    assert [read_length(end, 3000) for end in (1, 512, 513, 1024, 1025, 2049, 3000)] == [512, 512, 1024, 1024, 2048, 3000, 3000]
    assert read_length(5, 100) == 100
    for limit in (1, 5, 16, 100, 600, 1000, 1030, 2048):
        buckets = prefill_buckets(limit)
        for end in range(1, limit + 1):
            start = 0
            while start < end:
                tokens, padded = next_chunk(start, end, buckets)
                assert padded in buckets
                assert 0 < tokens <= padded
                start += tokens
            assert start == end
