"""Which Triton kernels an operator can launch, read from this package's source: a profile knows
kernels by the names of their functions, and a GPU is not needed to say whose they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import onboard

_PACKAGE = Path(onboard.__file__).resolve().parent
_FOLDER = _PACKAGE / "ops"


@dataclass
class _Module:
    """The functions of a module, and what its names stand for elsewhere."""

    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name here -> module and name there; "" for a module as a whole."""


@cache
def kernels_of(op: str) -> frozenset[str]:
    """Return the names of the kernels that a call of `torch.ops.onboard.<op>` may launch."""
    found, seen = set(), set()
    stack = [(module, op) for module, each in _modules().items() if _is_op(each, op)]
    while stack:
        place = stack.pop()
        module, name = place
        function = _modules().get(module, _Module()).functions.get(name)
        if place in seen or function is None:
            continue
        seen.add(place)
        if _is_kernel(function):
            found.add(name)
        stack.extend(_named(module, function))
    return frozenset(found)


def _is_op(module: _Module, op: str) -> bool:
    function = module.functions.get(op)
    return function is not None and "register_op" in _decorators(function)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return "triton.jit" in _decorators(function) or "jit" in _decorators(function)


def _decorators(function: ast.FunctionDef) -> set[str]:
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return {ast.unparse(each) for each in calls}


def _named(module: str, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield what the code of a function may call: names of its module, of others, and attributes of
    modules.
    """
    known = _modules()[module]
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield known.imported.get(node.id, (module, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place, name = known.imported.get(node.value.id, ("", ""))
            if place and not name:
                yield place, node.attr
            elif place:
                yield f"{place}.{name}", node.attr


@cache
def _modules() -> dict[str, _Module]:
    return {_name(path): _read(path) for path in sorted(_FOLDER.rglob("*.py"))}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)


def _read(path: Path) -> _Module:
    module = _Module()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            module.functions.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onboard"):
            for each in node.names:
                module.imported[each.asname or each.name] = (node.module or "", each.name)
    return module
