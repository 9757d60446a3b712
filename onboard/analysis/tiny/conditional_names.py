"""Names that a repository's modules bind under a condition: that a package is installed, say."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from onboard.analysis.repository_source import PACKAGE
from onboard.hf.old import packages


def only_if(name: str | None) -> tuple[str, str] | None:
    """Return the test under which alone the repository's files bind a name, and `file.py:12` of it;
    None: there is none.
    """
    for module in _modules():
        for node in _statements(module):
            if isinstance(node, ast.If) and name in _bound(node.body):
                return ast.unparse(node.test), f"{Path(str(module.__file__)).name}:{node.lineno}"
    return None


def bind_absent() -> list[str]:
    """Bind what the repository's modules have only where a package is installed, and have done
    without since it is not: with what stands in for that package, where anything does.

    Returns:
        What was bound; nothing where nothing was left to bind.
    """
    return [fact for module in _modules() for fact in _bind_in(module)]


def _bind_in(module: ModuleType) -> Iterator[str]:
    for node in _statements(module):
        if not isinstance(node, ast.If | ast.Try):
            continue
        lacking = _unbound(node.body, module)
        wanted = sorted(name for name in _imported(node.body) if packages.has_forms(name))
        if lacking and wanted:
            facts = [fact for name in wanted for fact in packages.stand_in(name)]
            _run(node.body, module)
            bound = sorted(lacking - _unbound(node.body, module))
            place = f"{Path(str(module.__file__)).name}:{node.lineno}"
            yield from [*facts, f"{place} has {', '.join(bound)} all the same"] if bound else []


def _unbound(body: list[ast.stmt], module: ModuleType) -> set[str]:
    """Return the names that statements bind and a module has not, or has as None."""
    return {name for name in _bound(body) if vars(module).get(name) is None}


def _run(body: list[ast.stmt], module: ModuleType) -> None:
    """Run statements as the module's own, as far as they go."""
    code = compile(ast.Module(body, type_ignores=[]), str(module.__file__), "exec")
    with contextlib.suppress(Exception):  # whatever they raise, the module did without them
        exec(code, vars(module))


def _modules() -> list[ModuleType]:
    """Return the modules that are made of the repository's files."""
    own = [module for key, module in sys.modules.items() if key.startswith(f"{PACKAGE}.")]
    return [module for module in own if getattr(module, "__file__", None)]


def _statements(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8-sig")).body


def _bound(body: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return stored | {alias.asname or alias.name for node in imports for alias in node.names}


def _imported(body: list[ast.stmt]) -> set[str]:
    """Return the packages that statements import."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [
        str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level
    ]
    return {name.split(".")[0] for name in named}
