# SPDX-License-Identifier: Apache-2.0
"""The lint reports Python that NKI's compiler is not known to accept."""

from pathlib import Path

import pytest

from . import lint

CLEAN = '''
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

LEAST = float(np.finfo(np.float32).min)


def helper(tile, values):
    for i in range(len(values)):
        if i % 2 == 0 and values[i] is not None:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=values[i])


@nki.jit
def kernel(x, count: int = 1):
    """Docstring."""
    assert x.shape[0] <= 128, f"found {x.shape[0]}"
    tile = nl.load(x)
    helper(tile, [1.0, None])
    with nl.no_reorder():
        nisa.memset(tile, 0 if count else LEAST)

    def body(i):
        nisa.memset(tile, 0)

    nl.fori_loop(0, 3, body)
    return tile


def host(x):
    return [kernel(one) for one in x]
'''


def findings(tmp_path, source):
    path = tmp_path / "kernel.py"
    path.write_text(source)
    return lint(path)


def test_clean_kernel(tmp_path):
    assert findings(tmp_path, CLEAN) == []


@pytest.mark.parametrize(
    "line, text",
    [
        ("a = [i for i in range(3)]", "comprehension"),
        ("a = lambda: 1", "lambda"),
        ("a = np.zeros(3)", "np.zeros: a Python module"),
        ("a = sorted([2, 1])", "sorted(): a builtin"),
        ("a = {1: 2}", "other keys than strings"),
        ("a = 1 << 2; b = 2**40 + 8589934592", "integers have 32 bits"),
        ("raise ValueError('x')", "raise"),
        ("import math", "import inside a kernel"),
        ("with nl.other(): pass", "only nl.no_reorder()"),
        ("kernel2(x)", "a kernel under nki.jit is called by another"),
        ("if (n := 3) > 2: pass", "assignment expression"),
        ("helper(*[tile, []])", "unpacking"),
    ],
)
def test_finding(tmp_path, line, text):
    source = CLEAN.replace("    tile = nl.load(x)\n", f"    tile = nl.load(x)\n    {line}\n")
    source += "\n\n@nki.jit\ndef kernel2(x):\n    return x\n"
    found = findings(tmp_path, source)
    assert len(found) == 1 and text in found[0], found
    assert found[0].startswith(f"{tmp_path / 'kernel.py'}:21: kernel: ")


def test_a_file_of_helpers_is_checked_whole(tmp_path):
    assert "lambda" in findings(tmp_path, "def helper(x):\n    return lambda: x\n")[0]


def test_the_kernels_of_these_tests_are_clean():
    assert lint(Path(__file__).with_name("test_kernels.py")) == []
