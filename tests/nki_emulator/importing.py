# SPDX-License-Identifier: Apache-2.0
"""The emulator under the name ``nki``, for kernel modules that import it, where the real package is absent."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

from .kernel import Kernel, jit, real_nki, simulate

SOURCES = {
    "nki.language": f"{__package__}.language",
    "nki.isa": f"{__package__}.isa",
    "nki.isa.constants": f"{__package__}.enums",
}


class EmulatorFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds nki, nki.language and nki.isa last, so that an installed package is found first."""

    def find_spec(self, fullname, path=None, target=None):
        """A spec for the emulated modules, None for all others."""
        if fullname == "nki" or fullname in SOURCES:
            return importlib.machinery.ModuleSpec(
                fullname, self, origin="nki_emulator", is_package=fullname in ("nki", "nki.isa")
            )
        return None

    def create_module(self, spec):
        """A plain module, filled by exec_module."""
        return types.ModuleType(spec.name)

    def exec_module(self, module) -> None:
        """Give the module the emulator's names."""
        if module.__name__ == "nki":
            module.__dict__.update(__emulated__=True, jit=jit, simulate=simulate, Kernel=Kernel, dtype=str)
            return
        source = importlib.import_module(SOURCES[module.__name__])
        public = [*getattr(source, "__all__", [name for name in vars(source) if not name.startswith("_")]), "__getattr__"]
        module.__dict__.update({name: vars(source)[name] for name in public if name in vars(source)})


def provide_nki() -> bool:
    """Make ``import nki`` work: True where the emulator provides it, False where the real package is installed.

    Raises ImportError where another package called nki is installed, one without nki.isa.
    """
    if real_nki():
        return False
    if (found := importlib.machinery.PathFinder.find_spec("nki")) is not None:
        raise ImportError(f"nki at {found.origin or found.submodule_search_locations} has no nki.isa: pip uninstall nki")
    if not any(isinstance(finder, EmulatorFinder) for finder in sys.meta_path):
        sys.meta_path.append(EmulatorFinder())
    return True


def load_kernel(path: str | Path) -> types.ModuleType:
    """Import a kernel file by path, with ``nki`` provided."""
    provide_nki()
    path = Path(path).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
