# SPDX-License-Identifier: Apache-2.0
"""Padded batches taken apart into rows of real tokens: left padding, right padding, both or none."""

import torch
from torch import Tensor

from ..config import ModelConfig
from ..errors import RequestError


def check_ids(input_ids: Tensor | None, config: ModelConfig) -> Tensor:
    """``input_ids`` as int64 [B, S] with every id inside the vocabulary and none an image's; else RequestError."""
    if input_ids is None:
        raise RequestError("input_ids: none given; pass token ids [batch, tokens]")
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        found = f"{input_ids.dtype} {list(input_ids.shape)}"
        raise RequestError(f"input_ids: expected integers [batch, tokens], found {found}")
    if not input_ids.numel():
        raise RequestError(f"input_ids: expected at least one token, found {list(input_ids.shape)}")
    ids = input_ids.long()
    outside = ((ids < 0) | (ids >= config.vocab_size)).nonzero().tolist()
    if outside:
        row, column = outside[0]
        raise RequestError(
            f"input_ids: expected ids from 0 to {config.vocab_size - 1}, found {ids[row, column]} at row {row}, column"
            f" {column}; use this checkpoint's tokenizer"
        )
    return ids


def check_images(tokens: list[Tensor], config: ModelConfig) -> None:
    """Raises RequestError where the rows' real tokens [n] have an image's place holder."""
    for row, ids in enumerate(tokens):
        if config.image_token_id is not None and bool((ids == config.image_token_id).any()):
            raise RequestError(
                f"input_ids: row {row} has the image token {config.image_token_id}; this is the text model, without the"
                " vision tower: remove images from the prompt"
            )


def check_mask(attention_mask: Tensor | None, ids: Tensor, earlier: int = 0) -> Tensor:
    """The mask of ids [B, S] as bool [B, S]; without a mask every token is real.

    ``earlier``: columns of earlier calls, which a mask may cover too. RequestError for another shape or values other than
    0 and 1.
    """
    batch, columns = ids.shape
    if attention_mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    shapes = [[batch, columns], [batch, earlier + columns]][: 2 if earlier else 1]
    if list(attention_mask.shape) not in shapes:
        raise RequestError(
            f"attention_mask: expected {' or '.join(map(str, shapes))} with 1 for tokens and 0 for padding, found"
            f" {list(attention_mask.shape)}"
        )
    real = attention_mask != 0
    if not bool((real == attention_mask).all()):
        raise RequestError("attention_mask: expected 1 for tokens and 0 for padding, found other values")
    return real[:, attention_mask.shape[1] - columns :].to(ids.device)


def spans(real: Tensor) -> list[tuple[int, int]]:
    """First and one past the last real column of every row of bool [B, S]; (0, 0) without any.

    Raises RequestError where padding stands between real tokens.
    """
    found = []
    for row, columns in enumerate(real):
        places = columns.nonzero().flatten()
        if not len(places):
            found.append((0, 0))
            continue
        first, stop = int(places[0]), int(places[-1]) + 1
        if stop - first != len(places):
            raise RequestError(
                f"attention_mask: row {row} has padding between its tokens (columns {first} to {stop - 1}, {len(places)} real);"
                " only left and right padding can be served. Where no mask was given, pad tokens inside the prompt were taken"
                " for padding: pass attention_mask"
            )
        found.append((first, stop))
    return found
