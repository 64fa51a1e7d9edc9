# SPDX-License-Identifier: Apache-2.0
"""The text: its held-out part, its tokens, and random crops of it."""

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from modeling_deepseek_v41.errors import DeepseekV41Error

HELD_OUT = 0.04
"""The last part of the text, which neither the tokenizer nor the model sees."""

SHORTEST = 200_000
"""Bytes of text below which a model learns nothing worth keeping."""


class Text(NamedTuple):
    """A text in two parts, both whole lines."""

    train: str
    held_out: str


def read_text(file: Path) -> Text:
    """Reads ``file`` (UTF-8) and splits off its last lines; raises DeepseekV41Error for a file that cannot serve."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise DeepseekV41Error(f"{file}: cannot be read ({error.strerror}); give a text file") from None
    except UnicodeDecodeError as error:
        raise DeepseekV41Error(f"{file}: is not UTF-8 ({error}); convert it first") from None
    if len(text.encode()) < SHORTEST:
        raise DeepseekV41Error(f"{file}: expected {SHORTEST} bytes of text or more, found {len(text.encode())}")
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    if cut == 0:
        raise DeepseekV41Error(f"{file}: expected lines of text, found one line; break it into lines")
    return Text(text[:cut], text[cut:])


def first_lines(text: str, size: int) -> str:
    """The first whole lines of ``text``, about ``size`` characters."""
    return text[: text.rfind("\n", 0, size) + 1] or text[:size]


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """``text`` as token ids [n] int64, line by line, which is much faster than at once and the same."""
    lines = tokenizer.encode_batch(text.splitlines(keepends=True), add_special_tokens=False)
    return torch.tensor([token for line in lines for token in line.ids])


def crops(ids: Tensor, bos: int, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``batch`` random pieces of ``ids`` [n]: what the model reads, a start token first, and what it must say: [B, T] each."""
    starts = torch.randint(ids.numel() - length + 1, (batch, 1), generator=generator)
    targets = ids[starts + torch.arange(length)]
    return torch.cat([targets.new_full((batch, 1), bos), targets[:, :-1]], 1), targets
