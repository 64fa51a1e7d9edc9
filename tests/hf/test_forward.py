# SPDX-License-Identifier: Apache-2.0
"""Logits: equal to the release's reference, and equal to a row alone however a batch is padded, split and repeated."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling_deepseek_v41 import DeepseekV41ForCausalLM
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.hf import DeepseekV41Cache

PAD = 2
GOLDEN_TOLERANCE = 1e-5
"""Of a row's largest logit. The golden's noise is 4e-7, every bug that was tried moves it by 1e-3 or more."""

SPLIT_TOLERANCE = 1e-5
"""Of a row's largest logit, without rounding steps: other pieces, or other tokens behind, are summed in another order."""


def some_rows(*lengths: int) -> list[Tensor]:
    """Rows of ordinary token ids."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 500, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], left: list[int], columns: int) -> tuple[Tensor, Tensor]:
    """Rows at the columns ``left`` of a padded batch, and its mask."""
    ids = torch.full((len(rows), columns), PAD)
    mask = torch.zeros(len(rows), columns, dtype=torch.long)
    for row, (tokens, first) in enumerate(zip(rows, left, strict=True)):
        ids[row, first : first + len(tokens)] = tokens
        mask[row, first : first + len(tokens)] = 1
    return ids, mask


def cache_of(output: object) -> DeepseekV41Cache:
    """The cache of an output, which transformers names differently from version to version."""
    found = [value for value in vars(output).values() if isinstance(value, DeepseekV41Cache)]
    assert len(found) == 1
    return found[0]


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of any row: max|a - b| / max|b| over the vocabulary."""
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


@pytest.mark.parametrize("length", [1, 5, 17, 40, 100])
def test_logits_of_a_whole_sequence_are_the_references(
    model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], length: int
) -> None:
    ids = torch.cat([golden[f"p{length}.input_ids"], golden[f"p{length}.generated"]], 1)[:, :-1]
    logits = model(ids).logits
    assert logits.dtype == torch.float32
    assert logits.shape == (1, length + 24, 512)
    assert distance(logits[:, length - 1 :], golden[f"p{length}.logits"]) <= GOLDEN_TOLERANCE


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_row_is_the_row_alone(model: DeepseekV41ForCausalLM, side: str) -> None:
    rows = some_rows(1, 5, 17, 40, 1, 70)
    columns = 73
    gaps = [columns - len(row) for row in rows]
    left = {"left": gaps, "right": [0] * 6, "both": [gap // 2 for gap in gaps]}[side]
    ids, mask = padded(rows, left, columns)
    for given in (mask, mask.bool(), mask.float()):
        logits = model(ids, attention_mask=given).logits
        assert logits.shape == (6, columns, 512)
        assert not logits[mask == 0].any()
        for row, first, found in zip(rows, left, logits, strict=True):
            assert torch.equal(found[first : first + len(row)], model(row[None]).logits[0])


def test_a_row_of_padding_gives_zeros_and_disturbs_nothing(model: DeepseekV41ForCausalLM) -> None:
    (row,) = some_rows(9)
    ids, mask = padded([row, row[:0]], [3, 0], 12)
    logits = model(ids, mask).logits
    assert not logits[1].any()
    assert torch.equal(logits[0, 3:], model(row[None]).logits[0])


def test_without_a_mask_every_column_counts(smooth: DeepseekV41ForCausalLM) -> None:
    (row,) = some_rows(20)
    ids = torch.cat([row, torch.full((5,), PAD)])[None]
    assert torch.equal(smooth(ids).logits, smooth(ids, torch.ones_like(ids)).logits)
    assert distance(smooth(ids).logits[0, :20], smooth(row[None]).logits[0]) <= SPLIT_TOLERANCE


def test_a_call_does_not_see_an_earlier_one(model: DeepseekV41ForCausalLM) -> None:
    first, second = some_rows(60, 40)
    alone = model(second[None]).logits
    model(first[None])
    assert torch.equal(model(second[None]).logits, alone)
    model.generate(first[None], max_new_tokens=2)
    assert torch.equal(model(second[None]).logits, alone)


@pytest.mark.parametrize("pieces", [[1] * 12 + [30], [7, 1, 1, 33], [16, 17, 9], [40, 2]])
def test_pieces_through_the_cache_are_the_whole(smooth: DeepseekV41ForCausalLM, pieces: list[int]) -> None:
    (row,) = some_rows(sum(pieces))
    whole = smooth(row[None]).logits
    cache, found = None, []
    for piece in row[None].split(pieces, 1):
        output = smooth(piece, past_key_values=cache)
        cache = cache_of(output)
        found.append(output.logits)
    assert cache is not None
    assert (cache.lengths, cache.get_seq_length()) == ([42], 42)
    assert distance(torch.cat(found, 1), whole) <= SPLIT_TOLERANCE


def test_a_padded_batch_goes_on_through_the_cache(smooth: DeepseekV41ForCausalLM) -> None:
    rows = some_rows(20, 33, 9)
    whole = [smooth(row[None]).logits[0] for row in rows]
    ids, mask = padded([row[: len(row) // 2] for row in rows], [6, 0, 3], 16)
    cache = cache_of(smooth(ids, mask))
    more, more_mask = padded([row[len(row) // 2 :] for row in rows], [0, 0, 12], 17)
    for given in (more_mask, torch.cat([mask, more_mask], 1)):
        mine = copy.deepcopy(cache)
        logits = smooth(more, given, cache=mine).logits
        assert mine.lengths == [20, 33, 9]
        assert mine.get_seq_length() == 33
        for found, expected, places in zip(logits, whole, more_mask.bool(), strict=True):
            assert distance(found[places], expected[-int(places.sum()) :]) <= SPLIT_TOLERANCE
    assert cache.lengths == [10, 16, 4]
    with pytest.raises(RequestError, match=r"attention_mask: expected \[3, 17\] or \[3, 33\] .* found \[3, 32\]"):
        smooth(more, torch.ones(3, 32), cache=cache)


def test_logits_to_keep(model: DeepseekV41ForCausalLM) -> None:
    rows = some_rows(12, 5)
    for left in ([0, 7], [0, 0]):
        ids, mask = padded(rows, left, 12)
        every = model(ids, mask).logits
        for keep, columns in (
            (1, [11]),
            (4, [8, 9, 10, 11]),
            (torch.tensor([3, 0, 3, -1]), [3, 0, 3, 11]),
            (99, list(range(12))),
        ):
            kept = model(ids, mask, logits_to_keep=keep).logits
            assert torch.allclose(kept, every[:, columns], rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="logits_to_keep: expected column numbers below 12"):
        model(ids, mask, logits_to_keep=torch.tensor([12]))


def test_tuple_and_no_cache(model: DeepseekV41ForCausalLM) -> None:
    (row,) = some_rows(6)
    logits, cache = model(row[None], return_dict=False)
    assert isinstance(cache, DeepseekV41Cache)
    assert torch.equal(logits, model(input_ids=row[None]).logits)
    assert len(model(row[None], return_dict=False, use_cache=False)) == 1


def test_loss(model: DeepseekV41ForCausalLM) -> None:
    rows = some_rows(12, 7)
    ids, mask = padded(rows, [0, 5], 12)
    output = model(ids, mask, labels=ids.masked_fill(mask == 0, -100))
    logprobs = model(ids, mask).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    counted = mask[:, 1:].bool()
    assert torch.allclose(output.loss, -logprobs[counted].mean(), rtol=1e-5)
    with pytest.raises(RequestError, match="labels: need the logits of every column"):
        model(ids, mask, labels=ids, logits_to_keep=1)


def test_no_gradients(model: DeepseekV41ForCausalLM) -> None:
    (row,) = some_rows(4)
    assert not model(row[None]).logits.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_scoring_as_an_evaluation_harness_does(smooth: DeepseekV41ForCausalLM) -> None:
    """Padded on the right without a mask, then each row's own positions are read: causality makes that right."""
    smooth.tie_weights()
    smooth.eval()
    lm = smooth.to("cpu").to(torch.device("cpu"))
    assert lm.device.type == "cpu"
    assert lm.config.max_position_embeddings == 256
    assert lm.config.vocab_size == lm.config.get_text_config().vocab_size == 512
    contexts, continuations = some_rows(30, 3, 18), some_rows(4, 6, 1)
    requests = [torch.cat(pair) for pair in zip(contexts, continuations, strict=True)]
    inputs = [tokens[:-1] for tokens in requests]
    longest = max(len(tokens) for tokens in inputs)
    batch = torch.stack([F.pad(tokens, (0, longest - len(tokens))) for tokens in inputs])
    with torch.no_grad():
        scores = F.log_softmax(lm(batch.to(lm.device)).logits, dim=-1, dtype=torch.float32).cpu()
    for row, (tokens, continuation) in enumerate(zip(inputs, continuations, strict=True)):
        own = scores[row, len(tokens) - len(continuation) : len(tokens)]
        alone = F.log_softmax(lm(tokens[None]).logits[0, -len(continuation) :], dim=-1)
        picked = (values.gather(1, continuation[:, None]).sum() for values in (own, alone))
        assert next(picked).item() == pytest.approx(next(picked).item(), rel=1e-4)


def test_release_numerics_run(folder: object) -> None:
    release = DeepseekV41ForCausalLM.from_pretrained(folder, expert_weight_format="fp4_bytes")  # type: ignore[arg-type]
    assert release.dtype == torch.bfloat16
    rows = some_rows(3, 25)
    ids, mask = padded(rows, [22, 0], 25)
    logits = release(ids, mask).logits
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert torch.equal(logits[0, 22:], release(rows[0][None]).logits[0])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": None}, "input_ids: none given"),
        ({"input_ids": torch.tensor([3, 4])}, r"input_ids: expected integers \[batch, tokens\], found torch.int64 \[2\]"),
        ({"input_ids": torch.tensor([[3.0]])}, "input_ids: expected integers"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids: expected at least one token"),
        ({"input_ids": torch.tensor([[3, 4], [5, 512]])}, "ids from 0 to 511, found 512 at row 1, column 1"),
        ({"input_ids": torch.tensor([[3, 510]])}, "row 0 has the image token 510; .* remove images"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 has padding between its tokens .columns 0 to 2, 2 real"),
        ({"attention_mask": torch.tensor([[1, 1]])}, r"attention_mask: expected \[1, 3\] .* found \[1, 2\]"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask: expected \[1, 3\]"),
        ({"attention_mask": torch.tensor([[1, 1, 2]])}, "expected 1 for tokens and 0 for padding, found other values"),
        ({"inputs_embeds": torch.zeros(1, 3, 128)}, "inputs_embeds: .* engram layers look up token ids"),
        ({"pixel_values": torch.zeros(1)}, "pixel_values: .* without the vision tower"),
        ({"position_ids": torch.zeros(1, 3)}, "position_ids: .* positions follow from attention_mask"),
        ({"output_attentions": True}, "output_attentions: .* not kept"),
        ({"output_hidden_states": True}, "output_hidden_states: .* not kept"),
        ({"token_type_ids": torch.ones(1, 3)}, "token_type_ids: found values other than 0"),
        ({"past_key_values": [(1, 2)]}, "past_key_values: found list, expected the DeepseekV41Cache"),
        ({"atention_mask": torch.ones(1, 3)}, "atention_mask: .* forward has no such input"),
    ],
)
def test_refused_inputs(model: DeepseekV41ForCausalLM, inputs: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model(**({"input_ids": torch.tensor([[3, 4, 5]])} | inputs))


def test_harmless_inputs(model: DeepseekV41ForCausalLM) -> None:
    ids = torch.tensor([[3, 4, 5]])
    model(ids, output_attentions=False, output_hidden_states=None, inputs_embeds=None, token_type_ids=torch.zeros_like(ids))


def test_too_long_is_refused_with_numbers(model: DeepseekV41ForCausalLM) -> None:
    (row,) = some_rows(257)
    with pytest.raises(RequestError, match="row 1: 0 tokens so far and 257 more make 257, max_seq_len is 256"):
        model(*padded([row[:9], row], [0, 0], 257))
    cache = cache_of(model(row[None, :250]))
    with pytest.raises(RequestError, match="row 0: 250 tokens so far and 7 more make 257"):
        model(row[None, 250:], past_key_values=cache)
    assert cache.lengths == [250]
    assert model(row[None, 250:256], past_key_values=cache).logits.isfinite().all()


def test_a_cache_serves_its_own_batch_and_is_neither_cut_nor_reordered(model: DeepseekV41ForCausalLM) -> None:
    cache = cache_of(model(torch.tensor([[3, 4], [5, 6]])))
    assert cache.batch_size == 2
    assert cache.get_max_cache_shape() == 256
    with pytest.raises(RequestError, match="the cache holds 2 rows, the batch has 1"):
        model(torch.tensor([[7]]), past_key_values=cache)
    with pytest.raises(RequestError, match=r"reorder_cache: .* num_beams=1"):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(RequestError, match=r"crop: .*deepcopy"):
        cache.crop(1)
