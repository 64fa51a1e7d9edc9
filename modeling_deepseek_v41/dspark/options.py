# SPDX-License-Identifier: Apache-2.0
"""How an engine speculates."""

import dataclasses
from typing import TYPE_CHECKING

from ..config import ModelConfig
from ..errors import RequestError
from .drafter import check_num_draft_tokens

if TYPE_CHECKING:
    from ..model import DeepseekV41Model
    from .step import Proposer


@dataclasses.dataclass(frozen=True)
class Speculation:
    """num_draft_tokens: drafts per step, 1 to dspark_block_size, by default all of a block.

    sampled_drafts: where tokens are sampled, drafts are too, under the same temperature, top-k and top-p; by default the
    most probable ones are proposed. The text's distribution is the same either way, the share that is kept is not.
    drafter: what proposes, in place of the model's own drafter.
    """

    num_draft_tokens: int | None = None
    sampled_drafts: bool = False
    drafter: "Proposer | None" = None

    def block(self, config: ModelConfig) -> int:
        """Drafts per step for a model of ``config``; raises RequestError where it cannot make them."""
        count = config.dspark_block_size if self.num_draft_tokens is None else self.num_draft_tokens
        check_num_draft_tokens(count, config)
        return count

    def proposer(self, model: "DeepseekV41Model") -> "Proposer":
        """What proposes; raises RequestError where ``model`` was loaded without its drafter."""
        found = self.drafter or model.drafter
        if found is None:
            raise RequestError("speculation: the model was loaded without its drafter; load it with drafter=True")
        return found
