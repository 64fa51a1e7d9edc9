# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's tokenizer: a user's text to token ids and back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .config import ModelConfig
from .errors import CheckpointError, RequestError


class TextTokenizer:
    """Encodes what users type, in which nothing is a special token, and decodes what the model writes."""

    def __init__(self, tokenizer: Tokenizer, bos_token_id: int | None) -> None:
        self._tokenizer, self.bos_token_id = tokenizer, bos_token_id

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling; the library's own forgets that nothing is a special token."""
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """``text`` as token ids, after the configuration's beginning-of-sequence id where it has one and ``bos`` is set.

        The name of a special token in ``text`` stays text. Raises RequestError where ``text`` is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text: character {error.start} is half of a surrogate pair ({text[error.start]!r}), which no tokenizer can"
                " read; give the text as valid UTF-8"
            ) from None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if bos and self.bos_token_id is not None else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``: special tokens under their names, U+FFFD for bytes that are no character.

        Ids that the tokenizer does not know, such as those that pad a vocabulary, have no text.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(folder: str | Path, config: ModelConfig) -> TextTokenizer:
    """Reads the tokenizer.json in ``folder``; raises CheckpointError where it is missing, no tokenizer, or not this model's.

    The release declares most of its control tokens (``<｜User｜>``, ``<think>``, ...) as ordinary added tokens, which the
    library would find in any text. Here all added tokens are declared special, and special tokens are not looked for.
    """
    file = Path(folder) / "tokenizer.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); text needs the tokenizer.json that belongs to the checkpoint"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error}); copy it from the checkpoint again") from None
    try:
        for token in content.get("added_tokens", ()):
            token["special"] = True
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise CheckpointError(
            f"{file}: expected a tokenizer of the tokenizers library, found something else ({error}); copy it from the"
            " checkpoint again"
        ) from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= config.vocab_size:
        raise CheckpointError(
            f"{file}: has token ids up to {highest}, vocab_size in {config.source} is {config.vocab_size}; take both files from"
            " the same checkpoint"
        )
    return TextTokenizer(tokenizer, config.bos_token_id)
