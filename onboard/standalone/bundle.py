"""A package made of parts of this one: the definitions that are wanted and those that they need,
nothing else.

Folders and modules are called as they are here, so that what was taken is easily compared with
where it is from.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from onboard.codegen.format import format_package
from onboard.standalone.statements import PACKAGE, Edit, Module, Statement, is_own


class Bundle:
    """Modules to be written, each reduced to what is needed of it."""

    def __init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._kept: dict[str, set[Statement]] = defaultdict(set)
        self._paths: dict[str, str] = {}

    def add(self, path: str, text: str, *, name: str = "") -> None:
        """Add a module as a whole under `path`; its imports of this package are followed.

        `name` is the module's own, where others import from it.
        """
        module = Module(name or f"{PACKAGE}.{path.removesuffix('.py').replace('/', '.')}", text)
        self._modules[module.name] = module
        self._paths[module.name] = path
        for statement in module.statements:
            self._keep(module, statement)

    def need(self, module: str, name: str) -> None:
        """Add a definition of a module of this package, and what it needs."""
        source = self._module(module)
        statements = source.binding(name)
        assert statements, f"{module} has no {name}"
        for statement in statements:
            if statement not in self._kept[module]:
                self._keep(source, statement, only=name)

    def files(self) -> dict[str, str]:
        """Return the package's files by path, formatted."""
        self._keep_actions()
        files = format_package(
            {self._path(name): self._text(module) for name, module in self._modules.items()}
        )
        folders = {parent.as_posix() for path in files for parent in Path(path).parents} - {"."}
        return files | {
            f"{folder}/__init__.py": ""
            for folder in folders
            if f"{folder}/__init__.py" not in files
        }

    def _keep(self, module: Module, statement: Statement, only: str | None = None) -> None:
        """Keep a statement; of an import of this package's, `only` this name."""
        if statement.is_import:
            for node in statement.own_imports:
                self._need_imported(module, node, only)
            return
        self._kept[module.name].add(statement)
        for node in statement.own_imports:
            self._need_imported(module, node, None)
        for name in statement.reads - statement.binds:
            if module.binding(name):
                self.need(module.name, name)

    def _need_imported(self, module: Module, node: ast.ImportFrom, only: str | None) -> None:
        assert node.module is not None
        for alias in node.names:
            if only in (None, alias.asname or alias.name):
                self.need(node.module, alias.name)

    def _keep_actions(self) -> None:
        """Keep what is done with definitions that are kept."""
        for name, module in list(self._modules.items()):
            for statement in module.statements:
                kept = {bound for each in self._kept[name] for bound in each.binds}
                if statement.is_action and statement.reads & kept:
                    self._keep(module, statement)

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            found = importlib.util.find_spec(name)
            assert found is not None, name
            assert found.origin is not None, name
            is_package = found.submodule_search_locations is not None
            self._modules[name] = Module(
                name, Path(found.origin).read_text(encoding="utf-8"), is_package=is_package
            )
        return self._modules[name]

    def _path(self, name: str) -> str:
        if name in self._paths:
            return self._paths[name]
        path = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
        return f"{path}/__init__.py" if self._modules[name].package == name else f"{path}.py"

    def _text(self, module: Module) -> str:
        """Return a module's new source; the formatter removes imports that nothing uses."""
        parts = [module.docstring] if module.docstring else []
        parts += [
            text for statement in module.statements if (text := self._statement(module, statement))
        ]
        return "\n\n".join(parts) + "\n"

    def _statement(self, module: Module, statement: Statement) -> str:
        edits = [self._import(module, node) for node in statement.own_imports]
        if statement.is_import or statement in self._kept[module.name]:
            is_docstring = statement is module.statements[0] and module.docstring
            return "" if is_docstring else module.cut(statement, edits)
        return ""

    def _import(self, module: Module, node: ast.ImportFrom) -> Edit:
        """Return the edit that makes an import relative, and leaves out names that are not in the
        package.
        """
        assert node.module is not None
        names = [alias for alias in node.names if self._is_kept(node.module, alias.name)]
        start, end = module.span(node)
        if not names:
            return start, end, "pass" if node.col_offset else ""
        listed = ", ".join(ast.unparse(alias) for alias in names)
        return start, end, f"from {self._relative(module, node.module)} import {listed}"

    def _is_kept(self, module: str, name: str) -> bool:
        return any(name in statement.binds for statement in self._kept.get(module, ()))

    def _relative(self, module: Module, target: str) -> str:
        """Return how `module` names `target`, by the places that both have in the package."""
        here = self._path(module.name).split("/")[:-1]
        there = self._path(target).removesuffix(".py").removesuffix("/__init__").split("/")
        shared = 0
        while shared < min(len(here), len(there) - 1) and here[shared] == there[shared]:
            shared += 1
        return "." * (len(here) - shared + 1) + ".".join(there[shared:])


def foreign_packages(files: dict[str, str]) -> set[str]:
    """Return the packages that Python files import, by the first part of their names; the files'
    own are relative.
    """
    return {
        name.partition(".")[0] for text in files.values() for name in _imported(ast.parse(text))
    }


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            assert not is_own(node.module), f"{node.module} is not in the package"
            yield node.module
