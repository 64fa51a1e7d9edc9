# SPDX-License-Identifier: Apache-2.0
"""How far a long piece of work has come: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from typing import TextIO

from tqdm import tqdm

LINE_INTERVAL = 10.0
"""Seconds between two lines where the output is not a terminal."""


class Progress:
    """Shows how much of ``total`` is done, on ``stream`` (stderr by default).

    ``unit`` is what is counted ("B" for bytes, "tokens", ...), ``description`` what is being done. A terminal gets a tqdm
    bar; anything else gets one line every ``interval`` seconds and, if there was one, a last line at the end. Work that
    ends sooner than ``interval`` prints nothing there.
    """

    def __init__(
        self, total: int, unit: str, description: str, stream: TextIO | None = None, interval: float = LINE_INTERVAL
    ) -> None:
        self.total, self.unit, self.description = total, unit, description
        self.done = 0
        self._stream = stream or sys.stderr
        self._interval = interval
        self._started = self._printed = time.monotonic()
        self._closed = False
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm(
                total=total, unit=unit, unit_scale=True, unit_divisor=1024, desc=description, file=self._stream, leave=False
            )

    def update(self, amount: int) -> None:
        """Adds ``amount`` to what is done."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif time.monotonic() - self._printed >= self._interval:
            self._line()

    def close(self) -> None:
        """Ends the display; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        elif self._printed > self._started:
            self._line()

    def _line(self) -> None:
        self._printed = time.monotonic()
        rate = self.done / max(self._printed - self._started, 1e-9)
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        done, total, speed = (self._amount(number) for number in (self.done, self.total, rate))
        print(f"{self.description}: {done} of {total}{share}, {speed}/s", file=self._stream, flush=True)

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return format_bytes(number)
        return f"{number:.0f} {self.unit}"


def format_bytes(number: float) -> str:
    """``number`` of bytes for people: ``format_bytes(5 * 2**30)`` is "5.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
