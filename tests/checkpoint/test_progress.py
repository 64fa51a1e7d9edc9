# SPDX-License-Identifier: Apache-2.0
"""Progress on a terminal and elsewhere."""

import io

import pytest

from modeling_deepseek_v41.progress import Progress, format_bytes


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """True."""
        return True


def test_lines_elsewhere() -> None:
    stream = io.StringIO()
    bar = Progress(4096, "B", "loading", stream, interval=0)
    bar.update(1024)
    bar.update(3072)
    bar.close()
    bar.close()
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("loading: 1.0 KiB of 4.0 KiB (25 %), ")
    assert lines[-1].startswith("loading: 4.0 KiB of 4.0 KiB (100 %), ")
    assert len(lines) == 3 and all(line.endswith("/s") for line in lines)


def test_other_units_and_unknown_total() -> None:
    stream = io.StringIO()
    bar = Progress(0, "tokens", "prefill", stream, interval=0)
    bar.update(7)
    assert stream.getvalue().startswith("prefill: 7 tokens of 0 tokens, ")


def test_short_work_is_silent_elsewhere() -> None:
    stream = io.StringIO()
    bar = Progress(10, "B", "loading", stream)
    bar.update(10)
    bar.close()
    assert stream.getvalue() == ""


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    bar = Progress(2048, "B", "loading", stream)
    bar.update(2048)
    bar.close()
    assert "loading" in stream.getvalue() and "2.00k" in stream.getvalue()


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (3 * 2**40, "3.0 TiB")]
)
def test_format_bytes(number: int, text: str) -> None:
    assert format_bytes(number) == text
