# SPDX-License-Identifier: Apache-2.0
"""Text of a growing list of tokens: only what is certain, and nothing from a stop string on."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder gives for bytes that are no complete UTF-8 character."""

CONTEXT = 4
"""Tokens that are decoded again with a new one: an incomplete character has at most 3 bytes, so at most 3 tokens."""


class Detokenizer:
    """Decodes token after token; ``decode`` turns a list of ids into text, with U+FFFD for bytes that are no character.

    A sequence of bytes that can still become a character shows as one U+FFFD at the end, so only that one is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The characters that ``token`` makes certain; an id without a text of its own leaves everything as it is."""
        if not self._decode([token]):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text) - text.endswith(REPLACEMENT)
        new = text[self._shown : certain]
        self._shown = certain
        if len(self._window) > 2 * CONTEXT:
            self._window = self._window[-CONTEXT:]
            text = self._decode(self._window)
            self._shown = len(text) - text.endswith(REPLACEMENT)
        return new

    def close(self) -> str:
        """What was held back, as it is."""
        rest = self._decode(self._window)[self._shown :]
        self._shown += len(rest)
        return rest


class TextStream:
    """A detokenizer that ends before the first stop string that is completed.

    Where one token completes several, the one that ends first counts, of those the longest: the result does not depend
    on how the text is cut into tokens. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str]) -> None:
        self._tokens = Detokenizer(decode)
        self._stops = stop_strings
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain; sets ``stopped`` where it completes a stop string."""
        return self._add(self._tokens.push(token))

    def close(self) -> str:
        """The rest of the text, at its end; "" after a stop string."""
        if self.stopped:
            return ""
        new = self._add(self._tokens.close())
        rest, self._held = self._held, ""
        return new + ("" if self.stopped else rest)

    def _add(self, new: str) -> str:
        text = self._held + new
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
