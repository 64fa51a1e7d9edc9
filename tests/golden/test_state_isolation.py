# SPDX-License-Identifier: Apache-2.0
"""State is read only where it belongs to the query's past, and written only by real rows."""

import pytest
import torch
from driving import Session, tokens
from torch import Tensor

from modeling_deepseek_v41.model import DeepseekV41Model

NUMERICS = pytest.mark.parametrize("numerics", ["release", "fp32"])


def poisoned(model: DeepseekV41Model, slots: int = 1) -> Session:
    """A session whose state held garbage before: NaN, or the largest integer."""
    session = Session(model, slots)
    for tensor in session.state:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return session


def copies(session: Session) -> list[Tensor]:
    return [tensor.clone() for tensor in session.state]


def untouched(session: Session, before: list[Tensor], slot: int) -> None:
    """Requires every row of ``slot`` but the last, which takes padding, to be as before."""
    after = session.slot_state(slot)
    session.state = before
    for name, tensor in session.slot_state(slot).items():
        assert torch.equal(after[name].nan_to_num(nan=-7), tensor.nan_to_num(nan=-7)), name


@NUMERICS
@pytest.mark.parametrize("first", [1, 5, 16, 37])
def test_garbage_in_the_state_is_never_read(model: DeepseekV41Model, first: int) -> None:
    ids = tokens(model, 45, seed=first)
    sizes = [first] + [1] * 5 + [39 - first + 1]
    clean, dirty = Session(model), poisoned(model)
    expected = clean.chunks(ids, sizes)
    found = dirty.chunks(ids, sizes)
    assert found.isfinite().all()
    assert torch.equal(found, expected)


@NUMERICS
def test_padding_in_garbage_is_never_read(model: DeepseekV41Model) -> None:
    ids = torch.cat([tokens(model, 9), torch.full((23,), 511)])
    clean, dirty = Session(model, 2), poisoned(model, 2)
    batch = torch.stack([ids, ids])
    expected = clean.call(batch, [0, 0], length=[9, 9], slot=[0, -1])
    found = dirty.call(batch, [0, 0], length=[9, 9], slot=[0, -1])
    assert torch.equal(found[0, :9], expected[0, :9])
    assert torch.equal(clean.call(ids[None, :1], [9]), dirty.call(ids[None, :1], [9]))


@NUMERICS
@pytest.mark.parametrize("width", [1, 6, 40])
def test_an_inactive_row_writes_nothing(model: DeepseekV41Model, width: int) -> None:
    session = poisoned(model, 2)
    before = copies(session)
    session.call(tokens(model, 2 * width).view(2, width), [0, 5], slot=[-1, -1])
    for slot in (0, 1):
        untouched(session, before, slot)


@NUMERICS
@pytest.mark.parametrize("width", [1, 6, 40])
def test_an_inactive_row_reads_nothing(model: DeepseekV41Model, width: int) -> None:
    ids = tokens(model, 2 * width).view(2, width)
    expected, found = (session.call(ids, [0, 21], slot=[1, -1]) for session in (Session(model, 2), poisoned(model, 2)))
    assert found.isfinite().all()
    assert torch.equal(found, expected)


@NUMERICS
@pytest.mark.parametrize("width", [1, 6, 40])
def test_a_row_writes_to_its_own_slot_only(model: DeepseekV41Model, width: int) -> None:
    session = poisoned(model, 3)
    before = copies(session)
    session.call(tokens(model, 2 * width).view(2, width), [0, 3], slot=[1, -1])
    untouched(session, before, 0)
    session.state, before = before, copies(session)
    session.call(tokens(model, width).view(1, width), [0], slot=[1])
    untouched(session, before, 2)


@NUMERICS
@pytest.mark.parametrize(("start", "length", "width"), [(0, 9, 32), (0, 0, 8), (11, 2, 6), (15, 1, 6), (20, 17, 40)])
def test_padding_writes_nothing(model: DeepseekV41Model, start: int, length: int, width: int) -> None:
    ids = tokens(model, start + width, seed=start + length)
    session = poisoned(model)
    if start:
        session.chunks(ids[:start], [start])
    before = Session(model)
    before.state = copies(session)
    session.call(ids[None, start:], [start], length=[length])
    for name, rows in _written(model, start, length).items():
        new, old = (by_position(owner, name) for owner in (session, before))
        changed = torch.zeros(len(new), dtype=torch.bool)
        changed[rows] = True
        assert torch.equal(new[~changed].nan_to_num(nan=-7), old[~changed].nan_to_num(nan=-7)), name
        assert new[changed].isfinite().all(), name


def by_position(session: Session, name: str) -> Tensor:
    """Slot 0's rows of a state, [rows, ...]."""
    rows = session.slot_state(0)[name]
    return rows.mT if name.startswith("ikey.") else rows


def _written(model: DeepseekV41Model, start: int, length: int) -> dict[str, list[int]]:
    """Rows that a call of ``length`` real tokens at ``start`` may write, by state."""
    config, names = model.config, model.state_names
    shapes = {entry.name: entry.shape for entry in model.state_spec(1)}
    rows = {}
    for name in names:
        kind, _, layer = name.partition(".")
        if kind in ("swa", "craw", "tok"):
            size = shapes[name][1] - 1
            rows[name] = [position % size for position in range(start, start + length)]
        else:
            ratio = config.compress_ratios[int(layer)]
            rows[name] = list(range(start // ratio, (start + length) // ratio))
    return rows


@NUMERICS
def test_a_reused_slot_is_a_fresh_one(model: DeepseekV41Model) -> None:
    first, second = tokens(model, 60, seed=8), tokens(model, 30, seed=9)
    used, fresh = Session(model, 2), Session(model, 2)
    used.chunks(first, [40] + [1] * 20, slot=1)
    sizes = [13, 6, *[1] * 11]
    assert torch.equal(used.chunks(second, sizes, slot=1), fresh.chunks(second, sizes, slot=1))


@NUMERICS
def test_unread_slots_do_not_matter(model: DeepseekV41Model) -> None:
    ids = tokens(model, 30, seed=10)
    alone, beside = Session(model), poisoned(model, 3)
    sizes = [17, 7, *[1] * 6]
    assert torch.equal(alone.chunks(ids, sizes), beside.chunks(ids, sizes, slot=2))
