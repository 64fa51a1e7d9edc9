# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter: from the backbone's taps and the newest token to a block of drafts (docs/model.md, section 9).

Parameters carry the checkpoint's names (mtp.{i}. ...). The embedding and the head are the backbone's and come as arguments.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ..attention import Rotary, Selection
from ..config import ModelConfig
from ..errors import RequestError
from ..expert_bank import ExpertStorage
from ..numerics import Arithmetic
from ..parallel import SINGLE, Parallel
from ..sampling import draw, greedy
from ..state import State
from .choice import Choice
from .stage import Stage


class Drafts(NamedTuple):
    """k proposed tokens for each of B rows."""

    ids: Tensor
    """[B, k] int64."""
    logits: Tensor
    """[B, k, vocab] fp32, Markov logits included."""
    probabilities: Tensor | None
    """[B, k, vocab] fp32: the distributions that sampled drafts were drawn from; None for greedy drafts."""
    confidence: Tensor
    """[B, k] fp32, raw: before the sigmoid."""


class Drafter(nn.Module):
    """num_nextn_predict_layers stages over the backbone's taps. Parameters are uninitialised until they are loaded."""

    rope_plain: Tensor

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, expert_weight_format: str = "bf16", parallel: Parallel = SINGLE,
        expert_exception_rows: int | None = None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.numerics = config, arithmetic
        storage = ExpertStorage(expert_weight_format, expert_exception_rows)
        stages = range(config.num_nextn_predict_layers)
        self.mtp = nn.ModuleList(Stage(config, index, arithmetic, storage, parallel) for index in stages)
        self.register_buffer("rope_plain", torch.empty(0), persistent=False)

    @property
    def stages(self) -> list[Stage]:
        """mtp.0, mtp.1, ..."""
        return [cast(Stage, stage) for stage in self.mtp]

    def update(self, taps: Tensor, state: State) -> None:
        """Puts the call's positions into every stage's window: taps [B, T, targets * d] of the same call of the backbone.

        Rows of rejected drafts may be among them: they lie behind every position that ``propose`` reads, and the next call
        at their positions overwrites them.
        """
        first, numerics = self.stages[0], self.numerics
        main_x = first.main_norm(first.main_proj(numerics.activation(taps)))
        table = self._rotary_rows(state.call.positions)
        kvs = numerics.ops.quantised_linears([main_x], [stage.attn.wkv.weight for stage in self.stages], numerics)
        for stage, kv in zip(self.stages, kvs, strict=True):
            state.write_ring(stage.attn.ring, stage.attn.window_kv(kv, table))

    def propose(
        self, token: Tensor, rank: Tensor, state: State, embed: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor], num_draft_tokens: int, choice: Choice | None = None, uniforms: Tensor | None = None,
    ) -> Drafts:  # fmt: skip
        """Drafts the tokens that follow ``token`` [B] int64, the newest one, whose taps are not known yet.

        The call of ``state`` has dspark_block_size tokens and starts at the position of ``token``; the windows hold the
        positions before it. The block runs in full, as trained, also where fewer drafts are wanted. ``embed(ids, rank)`` and
        ``head`` are the backbone's. Drafts are greedy, or with ``choice`` drawn with ``uniforms`` [B, k] in [0, 1).
        State is not written.
        """
        check_num_draft_tokens(num_draft_tokens, self.config)
        h = self._run_block(token, rank, state, embed)
        last = self.stages[-1]
        base = head(last.norm(h))
        ids, logits, probabilities, known = [], [], [], []
        for i in range(num_draft_tokens):
            known.append(last.markov_head.embed(token).unsqueeze(1))
            now = base[:, i : i + 1] + last.markov_head.head(known[i])
            if choice is None or uniforms is None:
                token = greedy(now.squeeze(1))
            else:
                probabilities.append(choice.probabilities(now))
                token = draw(probabilities[-1].squeeze(1), uniforms[:, i])
            ids.append(token)
            logits.append(now)
        chances = torch.cat(probabilities, 1) if probabilities else None
        confidence = last.confidence_head(torch.cat([h[:, :num_draft_tokens], torch.cat(known, 1)], -1)).squeeze(-1)
        return Drafts(torch.stack(ids, 1), torch.cat(logits, 1), chances, confidence)

    def _run_block(self, token: Tensor, rank: Tensor, state: State, embed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The block [token, noise, ...] through the stages to the collapsed streams [B, block, d] before ``norm``."""
        c = self.config
        noise = token.new_full((token.shape[0], c.dspark_block_size - 1), c.dspark_noise_token_id)
        x = embed(torch.cat([token.unsqueeze(1), noise], 1), rank).unsqueeze(2).repeat(1, 1, c.hc_mult, 1)
        pre_mix = torch.zeros(x.shape[:3], device=x.device)
        pre_mix[..., 0] = 1.0
        rows = self._rotary_rows(state.call.positions)
        rotary, selection = Rotary(self.rope_plain, self.rope_plain, rows, rows), Selection()
        call = state.call._replace(rank=rank)
        for stage in self.stages:
            x, pre_mix, selection = stage(x, pre_mix, rotary, call, state, selection)
        return self.numerics.ops.weighted_sum(x, pre_mix, self.numerics)

    def _rotary_rows(self, positions: Tensor) -> Tensor:
        """Rotary rows [B, T, 2, R] at ``positions`` [B, T]; those behind the table's end belong to no real token."""
        return self.rope_plain[positions.clamp_max(self.rope_plain.shape[0] - 1)]


def check_num_draft_tokens(num_draft_tokens: int, config: ModelConfig) -> None:
    """Raises RequestError where the drafter cannot make ``num_draft_tokens`` drafts at a time."""
    block = config.dspark_block_size
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or not 1 <= num_draft_tokens <= block:
        raise RequestError(
            f"num_draft_tokens: expected 1 to {block}, found {num_draft_tokens!r}; the drafter was trained on blocks of"
            f" dspark_block_size {block} positions ({config.source}) and has learned nothing about those behind;"
            " give a number of drafts in that range, or none for all of the block"
        )
