# SPDX-License-Identifier: Apache-2.0
"""The ranks' selections merged by position without a sort: the same bits as a sort gives."""

import pytest
import torch

from modeling_deepseek_v41.position_split import by_position


@pytest.mark.parametrize("lists", [1, 2, 8, 16])
@pytest.mark.parametrize("length", [1, 3, 8, 21])
def test_a_merge_is_a_sort(lists: int, length: int) -> None:
    generator = torch.Generator().manual_seed(lists * length)
    rows, count = 5, lists * length
    where = torch.stack([torch.randperm(2 * count, generator=generator)[:count] for _ in range(rows)])
    where = where.view(rows, lists, length).float().sort(-1).values
    used = torch.randint(0, length + 1, (rows, lists, 1), generator=generator)
    unused = torch.arange(length) >= used
    scores = torch.randn(where.shape, generator=generator).masked_fill(unused, -torch.inf)
    where = where.masked_fill(unused, torch.inf)
    found_scores, found = by_position(scores, where)
    order = where.flatten(1).argsort(-1)
    assert torch.equal(found[:, :count], where.flatten(1).gather(1, order))
    assert torch.equal(found_scores[:, :count], scores.flatten(1).gather(1, order))
    assert torch.isinf(found[:, count:]).all() and torch.isinf(found_scores[:, count:]).all()
