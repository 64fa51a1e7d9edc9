# SPDX-License-Identifier: Apache-2.0
"""Built by every initialize_model_parallel; its value is read by ring attention only."""


class CollectivesConfig:
    """Stand-in; the order of the ring is a guess."""

    def __init__(self, replica_groups=(), **kwargs):
        self.replica_groups = replica_groups
        self.rank_src_tgt_pairs = {
            rank: [[row[i], row[(i + 1) % len(row)]] for i in range(len(row))] for row in replica_groups for rank in row
        }
