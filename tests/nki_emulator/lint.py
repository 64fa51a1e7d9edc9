# SPDX-License-Identifier: Apache-2.0
"""A lint of the Python that NKI's compiler accepts in kernels. The emulator, like nki.simulate, would run any Python.

The compiler compiles a function under @nki.jit and inlines what it calls. Its language is a subset of Python
(nki/get-started/nki-language-guide.rst; nki/migration/index.rst, "NKI has a compiler!"), of which no grammar is published.
Accepted here is what the guide shows and the syntax of nki-library's kernels; the rest is reported.
"""

import ast
import builtins
from pathlib import Path

ACCEPTED = (
    ast.arguments, ast.arg, ast.keyword, ast.alias, ast.Load, ast.Store, ast.Name, ast.Attribute, ast.Constant, ast.JoinedStr,
    ast.FormattedValue, ast.Call, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Expr, ast.Assign, ast.AnnAssign,
    ast.AugAssign, ast.Return, ast.Assert, ast.If, ast.For, ast.While, ast.Continue, ast.Break, ast.Pass, ast.FunctionDef,
    ast.IfExp, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop, ast.With,
    ast.withitem,
)  # fmt: skip
BUILTINS = {
    "abs", "dict", "divmod", "float", "int", "isinstance", "len", "list", "max", "min", "print", "range",
    "slice", "str", "tuple",
}  # fmt: skip
REFUSED_MODULES = {"numpy", "torch", "math", "functools", "itertools", "ml_dtypes", "os", "sys", "dataclasses"}
REASONS = {
    ast.Lambda: "a lambda; define a function",
    ast.Try: "try",
    ast.Raise: "raise; use assert",
    ast.ListComp: "a comprehension; use a loop",
    ast.GeneratorExp: "a generator; use a loop",
    ast.DictComp: "a comprehension; use a loop",
    ast.SetComp: "a comprehension; use a loop",
    ast.Yield: "yield",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.NamedExpr: "an assignment expression",
    ast.Starred: "* unpacking",
    ast.Import: "import inside a kernel",
    ast.ImportFrom: "import inside a kernel",
    ast.ClassDef: "a class inside a kernel",
    ast.Set: "a set",
    ast.Delete: "del",
    ast.MatMult: "@; use nisa.nc_matmul",
}


def lint(path: str | Path) -> list[str]:
    """Findings ``file:line: text`` in the functions under @nki.jit of a kernel file and in those of the file that they call.

    In a file without kernels every function counts: kernels elsewhere may call them.
    """
    path = Path(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    modules = _refused_aliases(tree)
    kernels = {name for name, node in functions.items() if any(_is_jit(one) for one in node.decorator_list)}
    found: list[tuple[int, str]] = []
    for name in sorted(_reachable(functions, kernels or set(functions))):
        node = functions[name]
        found += [(node.lineno, f"{name}: decorator") for one in node.decorator_list if not _is_jit(one)]
        for inner in _inside(node):
            found += [(line, f"{name}: {text}") for line, text in _check(inner, functions, kernels, modules)]
    return [f"{path}:{line}: {text}" for line, text in sorted(set(found))]


def _is_jit(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return (
        isinstance(node, ast.Attribute) and node.attr == "jit" and isinstance(node.value, ast.Name) and node.value.id == "nki"
    )


def _refused_aliases(tree: ast.Module) -> set[str]:
    """Names of this file that stand for Python modules a kernel cannot call."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {(one.asname or one.name).split(".")[0] for one in node.names if one.name.split(".")[0] in REFUSED_MODULES}
    return names


def _reachable(functions: dict[str, ast.FunctionDef], kernels: set[str]) -> set[str]:
    seen, todo = set(), list(kernels)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [one.id for one in _inside(functions[name]) if isinstance(one, ast.Name) and one.id in functions]
    return seen


def _inside(function: ast.FunctionDef):
    """The nodes of a function's body, without annotations, and without what is inside a refused node."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, tuple(REASONS)):
            continue
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            todo += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]


def _check(node: ast.AST, functions: dict[str, ast.FunctionDef], kernels: set[str], modules: set[str]):
    line = getattr(node, "lineno", 0)
    for kind, text in REASONS.items():
        if isinstance(node, kind):
            yield line, text
            return
    if not isinstance(node, ACCEPTED):
        yield line, type(node).__name__
    elif isinstance(node, ast.FunctionDef) and node.decorator_list:
        yield line, "a decorated inner function"
    elif isinstance(node, ast.With):
        names = [ast.unparse(item.context_expr) for item in node.items]
        if names != ["nl.no_reorder()"]:
            yield line, f"with {', '.join(names)}; only nl.no_reorder()"
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, int) and abs(node.value) > 0xFFFFFFFF:
            yield line, f"{node.value}: integers have 32 bits"
        if isinstance(node.value, complex | bytes):
            yield line, f"{node.value!r}: not a value of NKI"
    elif isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            yield line, "a dictionary with other keys than strings"
    elif isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id in modules:
            yield line, f"{node.value.id}.{node.attr}: a Python module; compute it outside the kernel"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        if name in kernels:
            yield line, f"{name}: a kernel under nki.jit is called by another; remove the decorator of the inner one"
        if hasattr(builtins, name) and name not in BUILTINS and name not in functions:
            yield line, f"{name}(): a builtin that nki-library's kernels do not use"
