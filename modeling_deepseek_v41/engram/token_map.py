# SPDX-License-Identifier: Apache-2.0
"""The map from token ids to the engram's compressed vocabulary (docs/model.md, section 8)."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers

from ..config import ModelConfig
from ..errors import ConfigError

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes bytes to that are no complete UTF-8 character."""

FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)
STRIP = normalizers.Strip()


def compress_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[np.ndarray, int]:
    """Numbers the classes of token ids that the engram does not tell apart, in order of first appearance.

    Returns (map, size): ``map`` is int32 [vocab_size], ``size`` the number of classes, so map < size everywhere. Two
    ids share a class where their keys are equal. An id that the tokenizer does not know decodes to the empty text, and
    so all unknown ids share one class. About 0.6 s for 129,280 ids. Source: docs/model.md, section 8.
    """
    classes: dict[str, int] = {}
    compressed = np.empty(vocab_size, dtype=np.int32)
    for token in range(vocab_size):
        compressed[token] = classes.setdefault(_key(tokenizer, token), len(classes))
    return compressed, len(classes)


def token_map(path: str | Path, config: ModelConfig) -> torch.Tensor:
    """Returns the map int32 [vocab_size] of the tokenizer at ``path``, a tokenizer.json or a folder that holds one.

    For configurations with engram layers. Raises ConfigError naming the file where it is missing or is no tokenizer, and
    where its compressed vocabulary has another size than ``config.engram_compressed_vocab_size``: every multiplier and
    so every table row depends on that number. Source: docs/model.md, section 8.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    compressed, size = compress_vocabulary(_load(file), config.vocab_size)
    expected = config.engram_compressed_vocab_size
    if size != expected:
        raise ConfigError(
            f"{file}: the {config.vocab_size} token ids compress to {size} engram ids, but engram_compressed_vocab_size in "
            f"{config.source} is {expected}; this tokenizer and this configuration do not belong together, take both from "
            f"the same checkpoint"
        )
    return torch.from_numpy(compressed)


def _load(file: Path) -> Tokenizer:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); the engram layers need the checkpoint's tokenizer.json"
        ) from None
    try:
        return Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ConfigError(
            f"{file}: expected a tokenizer of the tokenizers library, found something else ({error}); copy tokenizer.json "
            f"from the checkpoint again"
        ) from None


def _key(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if REPLACEMENT in text:
        return tokenizer.id_to_token(token) or text
    folded = FOLD.normalize_str(text)
    if folded == " ":
        return folded
    return STRIP.normalize_str(folded) or text
