# SPDX-License-Identifier: Apache-2.0
"""The drafter's windows after prompts that are longer than a window and longer than a prefill's bucket.

A prompt reaches the drafter in padded chunks; only the last ``sliding_window`` positions count. What every chunk leaves behind
must be what one call of the whole prompt leaves, and nothing older may be read.
"""

import pytest
import torch
from speculating import RANK, Session
from torch import Tensor

from modeling_deepseek_v41.buckets import next_chunk
from modeling_deepseek_v41.dspark.drafter import Drafts
from modeling_deepseek_v41.dspark.step import read_prompt
from modeling_deepseek_v41.model import DeepseekV41Model
from modeling_deepseek_v41.state import allocate

LENGTHS = (17, 40, 200)
"""One more than the window, longer than the shorter bucket below, and longer than both and than two rings."""

CHUNKS = {"buckets of 16 and 64": (16, 64), "buckets of 64": (64,), "verifications": (6,), "tokens": (1,)}

EVERY = pytest.mark.parametrize(("numerics", "kernels"), [
    ("fp32", "auto"), ("release", "auto"), ("fp32_no_qdq", "auto"), ("release", "torch"),
])  # fmt: skip
EXACT = pytest.mark.parametrize("numerics", ["fp32", "release"])


def text(model: DeepseekV41Model, length: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))


@torch.inference_mode()
def taps_of(model: DeepseekV41Model, ids: Tensor) -> Tensor:
    """[T, targets * d] of one call of the backbone."""
    where = (torch.tensor([0]), torch.tensor([ids.numel()]), torch.tensor([0]), RANK)
    _, taps, *_ = model(ids.unsqueeze(0), *where, *allocate(model.state_spec(1)), read_len=model.max_seq_len)
    return taps[0]


@torch.inference_mode()
def learned(model: DeepseekV41Model, taps: Tensor, buckets: tuple[int, ...]) -> Session:
    """A session whose drafter has seen ``taps`` in chunks of ``buckets``, padded with NaN."""
    session, start, end = Session(model), 0, taps.shape[0]
    while start < end:
        real, padded = next_chunk(start, end, buckets)
        rows = torch.full((1, padded, taps.shape[1]), torch.nan)
        rows[0, :real] = taps[start : start + real]
        session.drafter.update(rows, session.view(torch.tensor([start]), torch.tensor([real]), torch.tensor([0]), padded))
        start += real
    return session


def windows(session: Session, end: int) -> Tensor:
    """The stages' windows before position ``end``: [stages, window, D] fp32."""
    window = session.model.config.sliding_window
    rings = [state for name, state in zip(session.model.state_names, session.state, strict=True) if name.startswith("mtp.swa.")]
    return torch.stack([ring[0, torch.arange(end - window, end) % (ring.shape[1] - 1)] for ring in rings]).float()


def relative(found: Drafts, expected: Drafts) -> float:
    """The larger error of logits and confidence, max|found - expected| / max|expected| over a row."""
    pairs = (found.logits, expected.logits), (found.confidence, expected.confidence)
    return max(((a - b).abs().amax(-1) / b.abs().amax(-1)).max().item() for a, b in pairs)


@EVERY
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_leave_the_windows_of_one_call(model: DeepseekV41Model, numerics: str, length: int, chunks: str) -> None:
    """Sums of another order are rounded away by the caches' QDQ, but for a rare value at a boundary; without QDQ they stay."""
    taps = taps_of(model, text(model, length))
    one, many = learned(model, taps, (length,)), learned(model, taps, CHUNKS[chunks])
    expected, found = windows(one, length), windows(many, length)
    token = torch.tensor(7)
    error = relative(many.propose(token, length), one.propose(token, length))
    if numerics == "fp32_no_qdq":
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() and error < 1e-5
    else:
        different = int((found != expected).sum())
        assert different <= 1e-3 * found.numel()
        assert error == 0 or different > 0


@EXACT
@pytest.mark.parametrize("length", LENGTHS)
def test_what_lies_before_the_window_is_not_read(model: DeepseekV41Model, length: int) -> None:
    """NaN in every older tap changes no bit; another oldest tap of the window changes the drafts."""
    taps, window = taps_of(model, text(model, length)), model.config.sliding_window
    expected = learned(model, taps, (64,)).propose(torch.tensor(7), length)
    older, oldest = taps.clone(), taps.clone()
    older[: length - window] = torch.nan
    oldest[length - window] *= -1
    same = learned(model, older, (64,)).propose(torch.tensor(7), length)
    assert torch.equal(same.logits, expected.logits) and torch.equal(same.confidence, expected.confidence)
    assert relative(learned(model, oldest, (64,)).propose(torch.tensor(7), length), expected) > 1e-3


@torch.inference_mode()
def read_in_chunks(model: DeepseekV41Model, ids: Tensor, buckets: tuple[int, ...]) -> tuple[Session, Tensor]:
    """A prompt as an engine reads it, padded with id 0; the session and the greedy token behind the prompt."""
    session, start = Session(model), 0
    while start < ids.numel():
        real, padded = next_chunk(start, ids.numel(), buckets)
        chunk = torch.zeros(1, padded, dtype=torch.int64)
        chunk[0, :real] = ids[start : start + real]
        where = (torch.tensor([start]), torch.tensor([real]), torch.tensor([0]), RANK)
        hidden, *_ = read_prompt(model, session.drafter, chunk, *where, *session.state, read_len=model.max_seq_len)
        start += real
    return session, model.logits(hidden[:, real - 1 : real])[0, 0].argmax()


@pytest.mark.parametrize("numerics", ["fp32_no_qdq"])
@pytest.mark.parametrize("length", LENGTHS)
def test_drafts_after_a_prompt_in_buckets(model: DeepseekV41Model, length: int) -> None:
    """Backbone and drafter together: the backbone's sums come in another order, so 1e-4 and no QDQ."""
    ids = text(model, length)
    one, token = read_in_chunks(model, ids, (length,))
    expected = one.propose(token, length)
    for buckets in ((16, 64), (16,), (64,)):
        many, same = read_in_chunks(model, ids, buckets)
        assert token == same
        found = many.propose(token, length)
        assert torch.equal(found.ids, expected.ids) and relative(found, expected) < 1e-4
