# SPDX-License-Identifier: Apache-2.0
"""The files that a Neuron machine loads its weights from, and the configuration in the compiled folder."""

from pathlib import Path

import pytest
from sources import child, needs_nxdi

pytestmark = needs_nxdi


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("fused", [False, True])
def test_shards_are_what_each_rank_reads(tp: int, fused: bool, tmp_path: Path) -> None:
    options: dict[str, object] = {"tp_degree": tp, "on_device_sampling_config": {}}
    options |= {"enable_fused_speculation": True, "speculation_length": 6} if fused else {}
    [found] = child("shards", {"options": options, "work": str(tmp_path)}, tmp_path, cpu_mode=False)
    assert found["bad"] == [] and found["same_config"]
    assert len(found["sizes"]) == tp
