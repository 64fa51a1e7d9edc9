# SPDX-License-Identifier: Apache-2.0
"""The emulator never stands in for an installed package."""

import subprocess
import sys
from pathlib import Path

import pytest

from . import load_kernel, real_nki, run

TESTS = Path(__file__).resolve().parents[1]


def in_new_process(folder, code, timeout=60):
    """Run code with ``folder`` and the tests on the path; (exit code, output)."""
    start = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(TESTS)!r}]\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=timeout)
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


STAND_IN = """
from nki_emulator.kernel import Kernel
class jit:
    def __init__(self, function, cores=1): self.function, self.cores, self.__name__ = function, cores, function.__name__
    def __getitem__(self, cores): return jit(self.function, cores)
def simulate(kernel): return lambda *a, **k: Kernel(kernel.function, kernel.cores, kernel.cores > 1).launch(a, k).outputs
"""


@pytest.mark.slow
def test_kernel_tests_run_with_an_installed_package(tmp_path):
    """A package nki that is not the emulator, but computes as it does: kernels match, traces are skipped, refusals are seen."""
    names = {name: f"from nki_emulator.{name} import *\n" for name in ("isa", "language")}
    package(tmp_path, __init__=STAND_IN, **names)
    chosen = "test_a_row_of_zeros or test_refusals or test_cost or test_lint"
    file = str(TESTS / "kernels_nki" / "test_rms_norm.py")
    code = f"import pytest; pytest.main(['-qrs', '-p', 'no:cacheprovider', {file!r}, '-k', {chosen!r}])"
    _, text = in_new_process(tmp_path, code, 600)
    assert "4 passed, 1 skipped" in text and "real nki gives no trace" in text, text


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
