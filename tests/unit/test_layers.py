"""The shape of the code: imports go downwards only, content files stand alone, files and functions
stay small.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "onboard"
CONTENT = ("models", "transforms", "templates", "registry")

# Who may import whom (docs/architecture.md): a module may import what is on a lower floor, and its
# own room's modules. Rooms in one tuple are one, seen from here: a model that starts in
# transformers' own code is checked by its runtime.
FLOORS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("cli",),),
    (("explain",),),
    (("pull_request",),),
    (("workflow",), ("bench",), ("standalone",), ("serve",), ("evaluation",)),
    (("agents",),),
    (("verify",), ("review",), ("testing",)),
    (("codegen",),),
    (("codegen.translate.output",),),
    (("codegen.tidy",),),
    (("codegen.translate.mechanisms",),),
    (("codegen.translate.language",),),
    (("analysis",),),
    (("runtime", "verify.self_check", "verify.ways"), ("verify.rounding",)),
    (("experiments",),),
    (("graph",),),
    (("cache",),),
    (("ops",), ("hf",), ("quantised",)),
    (
        ("verify.error", "verify.seeds", "verify.tolerances"),
        (
            *("workflow.remote.sandbox", "workflow.remote.walls", "workflow.processes.orphans"),
            *("workflow.remote.code_session", "workflow.remote.channel", "workflow.remote.frames"),
            *("workflow.remote.replies", "workflow.remote.handed"),
        ),
    ),
)
Room = tuple[int, tuple[str, ...]]
ROOMS: dict[str, Room] = {
    name: (height, room)
    for height, floor in enumerate(reversed(FLOORS))
    for room in floor
    for name in room
}
# The package's public face, which imports names of the runtime when asked for them, and `python -m
# onboard`.
ENTRANCES = (PACKAGE / "__init__.py", PACKAGE / "__main__.py")
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_FILES = 450, 60, 16
# File names that occur twice, where the twin is natural (docs/architecture.md).
TWINS = {
    "a command and what it runs": {"export", "plan", "registry", "run", "sweep", "tune"},
    "a phase and what it calls": {"analyze"},
    "one mechanism in several packages": {"codebooks", "experts", "indexer", "rescaled"},
}


def python_files(*folders: Path) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if "content" not in path.parts
    ]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, inside functions too; those that only type checkers run
    are left out.
    """
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


def room_of(module: str) -> Room | None:
    """The floor and the room of `onboard.<room>...`; None for base modules and for what is not
    onboard's.
    """
    first, *parts = module.split(".")
    if first != "onboard":
        return None
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROOMS[prefix] for prefix in prefixes if prefix in ROOMS), None)


def is_upward(importer: Room | None, imported: Room | None) -> bool:
    """Whether a module of room `importer` (None: a base module) may not import from room
    `imported`.
    """
    if imported is None or importer == imported:
        return False
    return importer is None or imported[0] >= importer[0]


@pytest.mark.parametrize(
    ("importer", "imported", "upward"),
    [
        ("onboard.graph.fx", "onboard.ops.norm.norm", False),
        (
            "onboard.codegen.translate.language.frame",
            "onboard.codegen.translate.mechanisms.scans.loops",
            True,
        ),
        (
            "onboard.codegen.translate.mechanisms.attention.scores",
            "onboard.codegen.translate.language.frame",
            False,
        ),
        ("onboard.graph.fx", "onboard.runtime.engine", True),
        ("onboard.ops.norm.norm", "onboard.graph.fx", True),
        ("onboard.analysis.spec", "onboard.codegen.format", True),
        ("onboard.analysis.spec", "onboard.verify.error.rmse_ratio", False),
        ("onboard.analysis.spec", "onboard.verify.blocks", True),
        ("onboard.runtime.build", "onboard.verify.self_check", False),
        ("onboard.codegen.format", "onboard.analysis.spec", False),
        ("onboard.bench.work", "onboard.workflow.lock", True),
        ("onboard.cli.main", "onboard.ops", False),
        ("onboard.errors", "onboard.graph.fx", True),
        ("onboard.graph.fx", "onboard.errors", False),
        ("onboard.graph.fx", "torch.fx", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, upward: bool) -> None:
    assert is_upward(room_of(importer), room_of(imported)) is upward


def test_imports_go_downwards() -> None:
    wrong = [
        f"{shown(path)}:{line}: imports {module}"
        for path in python_files(PACKAGE)
        if path not in ENTRANCES
        for line, module in imported_modules(path)
        if is_upward(room_of(name_of(path)), room_of(module))
    ]
    assert wrong == []


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_imports_go_in_circles() -> None:
    paths = {name_of(path): path for path in python_files(PACKAGE)}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        found = {
            each
            for _, module in imported_modules(path)
            for each in (module, module.rpartition(".")[0])
        }
        # A name that a module has of its own is no import of the package around it.
        graph[name] = {
            each
            for each in found
            if each in paths and each != name and not name.startswith(f"{each}.")
        }
    with_circles = TopologicalSorter(graph)
    with_circles.prepare()


def test_rooms_are_small() -> None:
    wide = {
        shown(folder): count
        for folder in (PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir()))
        if (count := len(list(folder.glob("*.py")))) > MOST_FILES
    }
    assert wide == {}


def test_a_file_name_says_what_is_in_it_without_its_folder() -> None:
    names = Counter(path.stem for path in python_files(PACKAGE) if path.stem != "__init__")
    assert {name: count for name, count in names.items() if count > 1} == dict.fromkeys(
        set().union(*TWINS.values()), 2
    )


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
        if (room := room_of(module)) is not None
        and room[0] > ROOMS["graph"][0]
        and room != ROOMS["experiments"]
    ]
    assert wrong == []


def test_experiments_are_used_by_transforms_that_are_off_alone() -> None:
    """So that what no measurement speaks for can be taken away, and no run pays for it that does
    not ask for it.
    """
    users = {
        path
        for path in python_files(PACKAGE, ROOT / "transforms")
        if PACKAGE / "experiments" not in path.parents
        and "onboard.experiments" in path.read_text(encoding="utf-8")
    }
    pipeline = yaml.safe_load((ROOT / "transforms" / "default.yaml").read_text(encoding="utf-8"))
    assert users
    assert {path for path in users if PACKAGE in path.parents} == set()
    assert [path.stem for path in users if pipeline[path.stem].get("enabled", True)] == []


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
