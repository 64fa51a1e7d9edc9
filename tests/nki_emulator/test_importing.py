# SPDX-License-Identifier: Apache-2.0
"""The emulator never stands in for an installed package."""

import subprocess
import sys
from pathlib import Path

import pytest

from . import load_kernel, real_nki, run

TESTS = Path(__file__).resolve().parents[1]


def in_new_process(folder, code):
    """Run code with ``folder`` and the tests on the path; (exit code, output)."""
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(TESTS)!r}]\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def package(folder, **files):
    """Write a package nki."""
    (folder / "nki").mkdir()
    for name, text in {"__init__": "", **files}.items():
        (folder / "nki" / f"{name}.py").write_text(text)


def test_an_installed_package_wins(tmp_path):
    package(tmp_path, isa="REAL = 1", language="")
    code = "import nki_emulator as e\nassert not e.provide_nki() and e.real_nki()\nimport nki.isa\nprint(nki.isa.REAL)"
    assert in_new_process(tmp_path, code) == (0, "1\n")


def test_run_simulates_with_an_installed_package(tmp_path):
    simulate = "class jit:\n    def __init__(self, f): self.f = f\n    def __getitem__(self, cores): return self.f, cores\n"
    simulate += "def simulate(launched): return lambda *a: (launched[1], launched[0](*a))\n"
    package(tmp_path, __init__=simulate, isa="", language="")
    code = "import nki_emulator as e, nki\nprint(e.run(nki.jit(lambda x: x + 1), 4, cores=2))"
    assert in_new_process(tmp_path, code) == (0, "Result(outputs=(2, 5), trace=None)\n")


def test_a_placeholder_is_refused(tmp_path):
    package(tmp_path)
    status, text = in_new_process(tmp_path, "import nki_emulator as e\ne.provide_nki()")
    assert status == 1 and "has no nki.isa: pip uninstall nki" in text


@pytest.mark.skipif(real_nki(), reason="the emulator's modules")
def test_a_kernel_file_is_loaded(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text("import nki\nimport nki.language as nl\n\n\n@nki.jit\ndef kernel():\n    return nl.tile_size.pmax\n")
    assert run(load_kernel(path).kernel).outputs == 128


@pytest.mark.skipif(real_nki(), reason="the emulator's modules")
def test_absent_names_say_so():
    import nki.isa as nisa
    import nki.language as nl

    for module, name in ((nisa, "nc_matmul_mx"), (nl, "rms_norm")):
        with pytest.raises(AttributeError, match="the emulator does not have it"):
            getattr(module, name)
