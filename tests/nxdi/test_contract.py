# SPDX-License-Identifier: Apache-2.0
"""The part of NxD and NxDI that this package stands on, as data: checked against our code here, against theirs where it is."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from contract import definitions, module_file, neuron_imports, subclasses
from sources import HERE, PACKAGES, ROOT

CONTRACT = json.loads((HERE / "contract.json").read_text(encoding="utf-8"))
OURS = sorted((ROOT / "modeling_deepseek_v41" / "nxdi").glob("*.py"))


def test_everything_that_is_imported_is_in_the_contract() -> None:
    imported = {(module, name) for file in OURS for module, name in neuron_imports(file)}
    unknown = {(module, name) for module, name in imported if name not in CONTRACT["imports"].get(module, {})}
    assert imported and not unknown


def test_only_the_application_s_folder_imports_nxdi() -> None:
    others = set((ROOT / "modeling_deepseek_v41").rglob("*.py")) - set(OURS)
    assert not [file for file in others if list(neuron_imports(file))]


def test_overriding_methods_take_what_their_originals_take() -> None:
    ours = {name: methods for file in OURS for name, _, methods in subclasses(file)}
    for cls, methods in CONTRACT["overrides"].items():
        for name, entry in methods.items():
            assert name in ours[cls], f"{cls}.{name} overrides {entry['of']} no more; correct contract.json"
            assert _takes(ours[cls][name], entry["parameters"]), f"{cls}.{name}{ours[cls][name]}: {entry}"


def _takes(own: list[str], original: list[str]) -> bool:
    """Whether ``own`` has the parameters of ``original`` in their order, up to where it takes any number."""
    plain = [name.rstrip("=") for name in own if not name.startswith("*")]
    wanted = [name.rstrip("=") for name in original if not name.startswith("*")]
    rest = wanted[len(plain) :]
    return plain[: len(wanted)] == wanted[: len(plain)] and (not rest or any(name.startswith("*") for name in own))


def _file(module: str) -> Path:
    package = module.split(".")[0]
    spec = importlib.util.find_spec(package)
    source = Path(str(spec.origin)).parents[1] if spec and spec.origin else Path(os.environ[PACKAGES[package]])
    return module_file(source, module)


@pytest.mark.nxdi
def test_the_installed_packages_are_what_the_contract_says() -> None:
    wrong = []
    for module, names in CONTRACT["imports"].items():
        known = definitions(_file(module))
        for name, expected in names.items():
            if name not in known and not _file(f"{module}.{name}").is_file():
                wrong.append(f"{module}.{name}: gone")
            elif expected is not None and known[name] != expected:
                wrong.append(f"{module}.{name}: {known[name]}, expected {expected}")
    members = {
        f"{entry['of']}.{name}": entry["parameters"] for m in CONTRACT["overrides"].values() for name, entry in m.items()
    }
    members |= {f"{cls}.{name}": listed for cls, names in CONTRACT["calls"].items() for name, listed in names.items()}
    for path, expected in members.items():
        module, cls, name = path.rsplit(".", 2)
        found = definitions(_file(module)).get(f"{cls}.{name}")
        if found != expected:
            wrong.append(f"{path}: {found}, expected {expected}")
    assert not wrong, "\n".join(wrong)
