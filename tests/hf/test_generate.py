# SPDX-License-Identifier: Apache-2.0
"""generate: the release's greedy tokens, rows that do not disturb each other, and the options around the loop."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from modeling_deepseek_v41 import DeepseekV41ForCausalLM
from modeling_deepseek_v41.errors import RequestError
from modeling_deepseek_v41.hf import DeepseekV41Cache

PAD = 2
LENGTHS = (1, 5, 17, 40, 100)


def prompts(golden: dict[str, Tensor], lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts [n] and the reference's 25 greedy tokens of each."""
    return [golden[f"p{n}.input_ids"][0] for n in lengths], [golden[f"p{n}.generated"][0] for n in lengths]


def batch(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows padded on one side, and the mask."""
    columns = max(len(row) for row in rows)
    ids = torch.full((len(rows), columns), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        place = slice(columns - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


def cache_of(output: Any) -> DeepseekV41Cache:
    """The cache of an output, which transformers names differently from version to version."""
    (found,) = [value for value in vars(output).values() if isinstance(value, DeepseekV41Cache)]
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_are_the_references(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], length: int) -> None:
    prompt, expected = golden[f"p{length}.input_ids"], golden[f"p{length}.generated"]
    found = model.generate(prompt, max_new_tokens=25, do_sample=False)
    assert torch.equal(found, torch.cat([prompt, expected], 1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_are_the_rows_alone(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], side: str) -> None:
    rows, expected = prompts(golden, (17, 1, 40, 5))
    ids, mask = batch(rows, side)
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    together = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(together.sequences[:, :40], ids)
    for row, tokens in enumerate(rows):
        alone = model.generate(tokens[None], **options)
        assert torch.equal(together.sequences[row, 40:], alone.sequences[0, len(tokens) :])
        assert torch.equal(together.sequences[row, 40:], expected[row][:6])
        for step, step_alone in zip(together.logits, alone.logits, strict=True):
            assert torch.equal(step[row], step_alone[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_recognised_without_a_mask(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], side: str) -> None:
    rows, expected = prompts(golden, (17, 5))
    ids, _ = batch(rows, side)
    found = model.generate(ids, max_new_tokens=3)
    assert torch.equal(found[:, 17:], torch.stack(expected)[:, :3])


def test_rows_end_at_their_end_token(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "left")
    end = int(expected[0][2])
    assert end not in expected[1][:6]
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=end)
    assert found[0, 17:].tolist() == [*expected[0][:3].tolist(), PAD, PAD, PAD]
    assert torch.equal(found[1, 17:], expected[1][:6])
    shared = int(expected[1][3])
    assert shared == expected[0][1]
    both = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=[511, shared], pad_token_id=9)
    assert both[:, 17:].tolist() == [[*expected[0][:2].tolist(), 9, 9], expected[1][:4].tolist()]


def test_no_end_token_goes_on(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    model_default = model.generation_config.eos_token_id
    found = model.generate(golden["p5.input_ids"], generation_config=GenerationConfig(max_new_tokens=4, pad_token_id=PAD))
    assert found.shape == (1, 9)
    assert model.generation_config.eos_token_id == model_default == 1


def test_scores_and_logits(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    prompt, expected = golden["p17.input_ids"], golden["p17.logits"]
    output = model.generate(
        prompt, max_new_tokens=4, return_dict_in_generate=True, output_scores=True, output_logits=True, suppress_tokens=[3, 4]
    )
    assert output.sequences.shape == (1, 21)
    assert len(output.scores) == len(output.logits) == 4
    for step, (scores, logits) in enumerate(zip(output.scores, output.logits, strict=True)):
        assert scores.shape == logits.shape == (1, 512)
        assert (logits - expected[:, step]).abs().max() <= 1e-5 * expected[:, step].abs().max()
        assert scores[0, 3] == scores[0, 4] == -torch.inf
        assert logits[0, 3].isfinite()
        assert torch.equal(scores[0, 5:], logits[0, 5:])
    transition = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert transition.shape == (1, 4)
    assert (transition < 0).all()
    plain = model.generate(prompt, max_new_tokens=2, return_dict_in_generate=True)
    assert plain.scores is None
    assert plain.logits is None


def test_a_second_call_begins_anew(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    rows, expected = prompts(golden, (40, 5))
    for _ in range(2):
        for tokens, answer in zip(rows, expected, strict=True):
            assert torch.equal(model.generate(tokens[None], max_new_tokens=3)[0, len(tokens) :], answer[:3])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.filterwarnings("ignore:.*past_key_values.*is deprecated:FutureWarning")
def test_going_on_from_a_cache(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], name: str) -> None:
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "right")
    first = model.generate(ids, attention_mask=mask, max_new_tokens=3, return_dict_in_generate=True)
    cache = cache_of(first)
    assert cache.lengths == [7, 19]
    assert cache.get_seq_length() == 19
    longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    second = model.generate(first.sequences, attention_mask=longer, max_new_tokens=3, **{name: cache})
    assert torch.equal(second[:, 17:], torch.stack(expected)[:, :6])
    with pytest.raises(RequestError, match="row 0 has 5 tokens, of which the cache holds 10"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, **{name: cache})


def test_without_cache_everything_is_computed_again(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "left")
    output = model.generate(ids, attention_mask=mask, max_new_tokens=3, use_cache=False, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, 17:], torch.stack(expected)[:, :3])
    assert not [value for value in vars(output).values() if isinstance(value, DeepseekV41Cache)]


def test_sampling_repeats_with_the_seed(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    ids, mask = batch(prompts(golden, (5, 17))[0], "left")
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 0}
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model.generate(ids, **options))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_narrow_sampling_is_greedy(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5}):
        found = model.generate(golden["p5.input_ids"], max_new_tokens=3, do_sample=True, **options)
        assert torch.equal(found[:, 5:], golden["p5.generated"][:, :3])


def test_several_sequences_of_one_prompt(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    ids, mask = batch(prompts(golden, (5, 17))[0], "right")
    torch.manual_seed(0)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=True, top_k=0, temperature=2.0, num_return_sequences=2
    )
    assert found.shape == (4, 22)
    assert torch.equal(found[:, :17], ids.repeat_interleave(2, 0))
    assert not torch.equal(found[0], found[1])


class Collector(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with every step's tokens [B]."""
        self.values.append(value)

    def end(self) -> None:
        """Called behind the last token."""
        self.ended = True


def test_streamer(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor], folder: Any) -> None:
    prompt, streamer = golden["p5.input_ids"], Collector()
    found = model.generate(prompt, max_new_tokens=4, streamer=streamer)
    assert streamer.ended
    assert torch.equal(streamer.values[0], prompt)
    assert torch.equal(torch.cat(streamer.values[1:]), found[0, 5:])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(prompt, max_new_tokens=4, streamer=text)
    assert "".join(text) == tokenizer.decode(found[0, 5:])


class StopBehind(StoppingCriteria):
    """Stops the rows whose last token is ``token``."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row stops: bool [B]."""
        return input_ids[:, -1] == self.token


def test_stopping_criteria_and_lengths(model: DeepseekV41ForCausalLM, golden: dict[str, Tensor]) -> None:
    rows, expected = prompts(golden, (5, 17))
    ids, mask = batch(rows, "left")
    stop = StoppingCriteriaList([StopBehind(int(expected[0][1]))])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=4, stopping_criteria=stop)
    assert found[0, 17:].tolist() == [*expected[0][:2].tolist(), PAD, PAD]
    assert torch.equal(found[1, 17:], expected[1][:4])
    assert model.generate(ids, attention_mask=mask, max_length=19).shape == (2, 19)
    held_back = model.generate(golden["p5.input_ids"], max_new_tokens=4, min_new_tokens=4, eos_token_id=int(expected[0][1]))
    assert held_back.shape == (1, 9)
    assert int(expected[0][1]) not in held_back[0, 5:]


def test_tokenizer_output_and_start_token(model: DeepseekV41ForCausalLM, folder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["Hello", "Hello there, how"], return_tensors="pt", padding=True)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    found = model.generate(**inputs, max_new_tokens=3)
    assert tokenizer.batch_decode(found)[1].startswith("Hello there, how")
    assert model.generate(max_new_tokens=2).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams: found 4, expected 1; beam search is not available"),
        ({"num_beams": 4, "do_sample": True}, "num_beams: found 4"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: asks for contrastive_search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: asks for assisted_generation"),
        ({"assistant_model": object()}, "assistant_model: .* no assisted decoding"),
        ({"dola_layers": "high"}, "dola_layers: asks for dola_generation"),
        ({"cache_implementation": "static"}, "cache_implementation: found 'static', expected None"),
        ({"cache_implementation": "paged"}, "cache_implementation: found 'paged', expected None"),
        ({"inputs_embeds": torch.zeros(1, 2, 128)}, "inputs_embeds: .* pass input_ids"),
        ({"pixel_values": torch.zeros(1, 3, 9, 9)}, "pixel_values: .* without the vision tower"),
        ({"position_ids": torch.zeros(1, 3)}, "position_ids: "),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: .* not kept"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: .* not kept"),
        ({"custom_generate": "some/recipe"}, "custom_generate: "),
        ({"synced_gpus": True}, "synced_gpus: "),
        ({"past_key_values": ((1, 2),)}, "past_key_values: found tuple, expected the DeepseekV41Cache"),
        ({"max_new_token": 3}, "max_new_token: .* generate has no such input; check the spelling"),
        ({"max_new_tokens": 255}, "row 0 has 3 tokens and 255 new ones need 257 positions, max_seq_len is 256"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 has padding between its tokens"),
        ({"attention_mask": torch.zeros(1, 3)}, "row 0 has 0 tokens"),
        ({"inputs": torch.tensor([[3, 510]])}, "row 0 has the image token 510"),
        ({"inputs": torch.tensor([[3, 700]])}, "ids from 0 to 511, found 700"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*past_key_values.*is deprecated:FutureWarning")
def test_refused(model: DeepseekV41ForCausalLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate(**({"inputs": torch.tensor([[3, 4, 5]]), "max_new_tokens": 2} | options))


def test_continuous_batching_of_transformers_is_refused(model: DeepseekV41ForCausalLM) -> None:
    with pytest.raises(RequestError, match="generate_batch: needs transformers' paged cache"):
        model.generate_batch([[3, 4]])
    with pytest.raises(RequestError, match="generate_batch: needs transformers' paged cache"):
        model.init_continuous_batching()


def test_the_last_position_can_be_filled(model: DeepseekV41ForCausalLM) -> None:
    prompt = torch.randint(3, 500, (1, 253), generator=torch.Generator().manual_seed(0))
    assert model.generate(prompt, max_new_tokens=4, eos_token_id=None).shape == (1, 257)
