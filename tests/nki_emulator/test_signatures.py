# SPDX-License-Identifier: Apache-2.0
"""Parameters and defaults are those of the documentation's stubs."""

import ast
import enum
import inspect
import os
from pathlib import Path

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
    expected = ISA[name]
    assert text(getattr(nisa, name)) == expected


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_language(name):
    owner, _, method = name.rpartition(".")
    expected = LANGUAGE[name].replace("dtype=uint8", "dtype='uint8'")
    assert text(getattr(nl.NkiTensor if owner else nl, method)) == expected


def test_every_instruction_is_compared():
    from .isa import INSTRUCTIONS

    assert {function.__name__ for function in INSTRUCTIONS} <= set(ISA)


@pytest.mark.skipif("NEURON_SDK" not in os.environ, reason="NEURON_SDK names no checkout of aws-neuron-sdk")
@pytest.mark.parametrize(("module", "expected"), [("isa", ISA), ("language", LANGUAGE)])
def test_data_is_that_of_the_stubs(module, expected):
    """With a checkout of github.com/aws-neuron/aws-neuron-sdk, named by NEURON_SDK."""
    source = Path(os.environ["NEURON_SDK"], "nki", "api", "nki", module, "__init__.py").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(source).body:
        methods = node.body if isinstance(node, ast.ClassDef) and node.name == "NkiTensor" else []
        for one in (node, *methods):
            if isinstance(one, ast.FunctionDef):
                for argument in one.args.args:
                    argument.annotation = None
                found[one.name if one is node else f"NkiTensor.{one.name}"] = ast.unparse(one.args)
    assert {name: found.get(name) for name in expected} == expected
