# SPDX-License-Identifier: Apache-2.0
"""Parameters and defaults are those of the documentation's stubs."""

import enum
import inspect

import nki.isa as nisa
import nki.language as nl
import pytest

from . import real_nki
from .operators import Operator
from .signatures import ISA, LANGUAGE

pytestmark = pytest.mark.skipif(real_nki(), reason="the emulator's own signatures")


def text(function) -> str:
    """The parameters as the stubs write them."""
    return ", ".join(
        one.name if one.default is inspect.Parameter.empty else f"{one.name}={default(one.default)}"
        for one in inspect.signature(function).parameters.values()
    )


def default(value) -> str:
    """A default as the stubs write it."""
    if isinstance(value, enum.Enum):
        return value.name if isinstance(value, nl.MemoryRegion) else f"{type(value).__name__}.{value.name}"
    return value.name if isinstance(value, Operator) else repr(value)


@pytest.mark.parametrize("name", sorted(ISA))
def test_instruction(name):
    expected = ISA[name].replace("on_false_value=...", f"on_false_value={-3.4028234663852886e38!r}")
    assert text(getattr(nisa, name)) == expected


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_language(name):
    owner, _, method = name.rpartition(".")
    expected = LANGUAGE[name].replace("dtype=uint8", "dtype='uint8'")
    assert text(getattr(nl.NkiTensor if owner else nl, method)) == expected


def test_every_instruction_is_compared():
    from .isa import INSTRUCTIONS

    assert {function.__name__ for function in INSTRUCTIONS} <= set(ISA)
