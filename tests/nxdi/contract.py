# SPDX-License-Identifier: Apache-2.0
"""Reads signatures and imports out of Python sources without importing them."""

import ast
from collections.abc import Iterator
from pathlib import Path


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names in order; *args and **kwargs with their stars, optional ones with ``=`` behind."""
    a = function.args
    positional = [one.arg for one in (*a.posonlyargs, *a.args)]
    optional = len(positional) - len(a.defaults)
    names = [name + "=" * (place >= optional) for place, name in enumerate(positional)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [one.arg + "=" * (default is not None) for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return names + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def definitions(file: Path) -> dict[str, list[str] | None]:
    """Everything a module defines at its top, and its classes' methods as Class.method; parameters of functions, else None."""
    found: dict[str, list[str] | None] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
            found |= {f"{node.name}.{one.name}": parameters(one) for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
    return found


def neuron_imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a source file imports from NxD and NxDI."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("neuronx_"):
            yield from ((str(node.module), one.name) for one in node.names)


def subclasses(file: Path) -> Iterator[tuple[str, list[str], dict[str, list[str]]]]:
    """(class, names of its bases, its methods with their parameters) of a source file."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = {one.name: parameters(one) for one in node.body if isinstance(one, ast.FunctionDef)}
            yield node.name, [base.id for base in node.bases if isinstance(base, ast.Name)], methods


def module_file(source: Path, module: str) -> Path:
    """The file of ``module`` below the folder ``source``."""
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
