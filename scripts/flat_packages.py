"""A package's files in one folder, as code on the Hub lies: `a/b/c.py` becomes `a_b_c.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable

Read = Callable[[str], str | None]
"""Returns the text of a file by its path in the package; None where there is none."""


def flat_package(
    read: Read, name: str, modules: Iterable[str], installed: Iterable[str] = ()
) -> dict[str, str]:
    """Return the files that modules (`a.b.c`) of a package need, by their new names.

    Args:
        read: of the package.
        name: the package's, by which its files may import one another.
        modules: those to begin with.
        installed: modules that stay imports of the package, with those below them.
    """
    found: dict[str, str] = {}
    kept = tuple(installed)
    wanted = [*modules]
    while wanted:
        module = wanted.pop()
        path = _path(read, module)
        if path is None or f"{_flat(module)}.py" in found:
            continue
        text, more = _flattened(read, name, module, path, kept)
        found[f"{_flat(module)}.py"] = text
        wanted += more
    return found


def _path(read: Read, module: str) -> str | None:
    stem = module.replace(".", "/")
    paths = [f"{stem}.py", f"{stem}/__init__.py"] if stem else ["__init__.py"]
    return next((path for path in paths if read(path) is not None), None)


def _flat(module: str) -> str:
    return module.replace(".", "_") or "package_root"


def _flattened(
    read: Read, name: str, module: str, path: str, kept: tuple[str, ...]
) -> tuple[str, list[str]]:
    """Return a file with imports of its new neighbours, and which modules these are."""
    text = read(path) or ""
    lines, wanted = text.splitlines(), list[str]()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: -node.lineno):
        target = _target(node, name, module, path.endswith("__init__.py"))
        if target is None or any(f"{target}.".startswith(f"{each}.") for each in kept):
            continue
        indent = re.match(r"\s*", lines[node.lineno - 1])
        new, more = _neighbours(read, target, node.names)
        wanted += more
        lines[node.lineno - 1 : node.end_lineno] = [
            f"{indent.group() if indent else ''}{line}" for line in new
        ]
    return "\n".join(lines) + "\n", wanted


def _target(node: ast.ImportFrom, name: str, module: str, is_package: bool) -> str | None:
    """Return the module of the package that a statement imports from; None for another one."""
    own = (node.module or "").split(".") if node.module else []
    if not node.level:
        return ".".join(own[1:]) if own[:1] == [name] else None
    around = module.split(".") if module else []
    up = node.level - is_package
    return ".".join([*(around[:-up] if up else around), *own])


def _neighbours(read: Read, target: str, names: Iterable[ast.alias]) -> tuple[list[str], list[str]]:
    """Return the lines that import names of a module, and the modules that they need."""
    lines, wanted, rest = list[str](), list[str](), list[str]()
    path = _path(read, target)
    text = (read(path) or "") if path else ""
    for alias in names:
        inner = f"{target}.{alias.name}" if target else alias.name
        if _path(read, inner) is not None and not _binds(text, alias.name):
            lines.append(f"from . import {_flat(inner)} as {alias.asname or alias.name}")
            wanted.append(inner)
        else:
            rest.append(ast.unparse(alias))
    if rest:
        lines.append(f"from .{_flat(target)} import {', '.join(rest)}")
        wanted.append(target)
    return lines, wanted


def _binds(text: str, name: str) -> bool:
    """Whether a file gives a name a value of its own, and no module that lies beside it."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                bound = [node.name]
            case ast.Name(ctx=ast.Store()):
                bound = [node.id]
            case ast.ImportFrom(module=str(), names=names):
                bound = [each.asname or each.name for each in names]
            case _:
                bound = []
        if name in bound:
            return True
    return False
