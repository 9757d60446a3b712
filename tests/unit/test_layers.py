"""The shape of the code: imports go downwards only, content files stand alone, files and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "onboard"
CONTENT = ("models", "transforms", "templates", "registry")

# Who may import whom (docs/architecture.md): a module may import what is below it, and its own package.
LAYERS = {
    "cli": 6,
    "workflow": 5,
    "bench": 5,
    "standalone": 5,
    "analysis": 4,
    "codegen": 4,
    "agents": 4,
    "testing": 4,  # what generated tests import: it drives the runtime
    "runtime": 3,
    "graph": 2,
    "ops": 1,
}
# Both read specs, and codegen the small configs that analysis makes.
# Tests of a model that brings code import it as the analysis does.
# The reviewer compares with what the generator makes.
SIDEWAYS = {("codegen", "analysis"), ("agents", "analysis"), ("agents", "codegen"), ("testing", "analysis")}
# The package's public face, which imports names of the runtime when asked for them, and `python -m onboard`.
ENTRANCES = (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
MOST_FILE_LINES, MOST_FUNCTION_LINES = 450, 60


def python_files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py")) if "content" not in path.parts]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, inside functions too; those that only type checkers run are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            assert node.level == 0, f"{shown(path)}:{node.lineno}: relative import"


def package_of(module: str) -> str | None:
    """The layer's name in `onboard.<layer>...`; None for base modules and for what is not onboard's."""
    parts = module.split(".")
    return parts[1] if parts[0] == "onboard" and len(parts) > 1 and parts[1] in LAYERS else None


def is_upward(importer: str | None, imported: str | None) -> bool:
    """Whether a module of layer `importer` (None: a base module) may not import from layer `imported`."""
    if imported is None or importer == imported or (importer, imported) in SIDEWAYS:
        return False
    return importer is None or LAYERS[imported] >= LAYERS[importer]


@pytest.mark.parametrize(
    ("importer", "imported", "upward"),
    [
        ("graph", "ops", False),
        ("graph", "runtime", True),
        ("ops", "graph", True),
        ("analysis", "codegen", True),
        ("codegen", "analysis", False),
        ("cli", "ops", False),
        (None, "graph", True),
        ("graph", None, False),
    ],
)
def test_the_rule_itself(importer: str | None, imported: str | None, upward: bool) -> None:
    assert is_upward(importer, imported) is upward


def test_imports_go_downwards() -> None:
    wrong = [
        f"{shown(path)}:{line}: imports {module}"
        for path in python_files(PACKAGE)
        if path not in ENTRANCES
        for line, module in imported_modules(path)
        if is_upward(package_of(".".join(path.relative_to(ROOT).with_suffix("").parts)), package_of(module))
    ]
    assert wrong == []


def test_content_files_import_nothing_of_the_content() -> None:
    wrong = [
        f"{shown(path)}:{line}: imports {module}"
        for path in python_files(*(ROOT / folder for folder in CONTENT))
        for line, module in imported_modules(path)
        if module.startswith(("onboard.content", *(f"{folder}." for folder in CONTENT)))
    ]
    assert wrong == []


def test_transforms_use_only_the_graph_and_what_is_below() -> None:
    wrong = [
        f"{shown(path)}:{line}: imports {module}"
        for path in python_files(ROOT / "transforms")
        for line, module in imported_modules(path)
        if (layer := package_of(module)) is not None and LAYERS[layer] > LAYERS["graph"]
    ]
    assert wrong == []


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A GPU kernel: it cannot be cut into functions as one likes."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_files_and_functions_are_small() -> None:
    long = []
    for path in python_files(PACKAGE, ROOT / "transforms"):
        text = path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > MOST_FILE_LINES:
            long.append(f"{shown(path)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    long.append(f"{shown(path)}:{node.lineno}: {node.name} has {length} lines")
    assert long == []
