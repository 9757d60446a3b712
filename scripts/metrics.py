"""The size and order of the code, measured: `python scripts/metrics.py` prints a table.

Everything is counted from the source text with `ast`; nothing of the package is imported. A
function's lines include its signature, docstring and nested functions. Generated files
(`models/`, `tests/equivalence/`) are rows of their own.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_low

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "onboard"
WIDE, LONG_FILE, LONG_FUNCTION = 100, 400, 40
ROOMS = ("graph", "codegen/translate", "codegen/tidy", "ops", "analysis", "cache", "runtime")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LISTS: tuple[type[ast.expr], ...] = (ast.List, ast.Tuple, ast.Set)


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder, without the content that a wheel links into it."""
    return sorted(path for path in folder.rglob("*.py") if "content" not in path.parts)


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def shown(path: Path) -> str:
    """Return a path relative to the repository's root."""
    return path.relative_to(ROOT).as_posix()


# Sizes


def size_row(name: str, paths: Sequence[Path]) -> list[str]:
    """Return the table's row for some files: numbers, and median, 90 percent and maximum of
    sizes.
    """
    texts = [path.read_text(encoding="utf-8").splitlines() for path in paths]
    lines = [line for text in texts for line in text]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        for node in ast.walk(parsed(path))
        if isinstance(node, FUNCTIONS)
    ]
    folders = Counter(path.parent for path in paths).values()
    files = [len(text) for text in texts]
    return [
        name,
        str(len(paths)),
        f"{len(lines):,}",
        spread(files),
        str(sum(each > LONG_FILE for each in files)),
        spread(functions),
        str(sum(each > LONG_FUNCTION for each in functions)),
        f"{median_low(folders)}/{max(folders)}",
        str(sum(len(line) > WIDE for line in lines)),
    ]


def spread(values: Sequence[int]) -> str:
    """Return median, 90 percent and maximum of some numbers."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{median_low(ordered)}/{ordered[int(0.9 * (len(ordered) - 1))]}/{ordered[-1]}"


# Names


def twins(folder: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the file names that occur more than once below a folder, and where; `__init__.py` is
    none.
    """
    found: dict[str, list[str]] = {}
    for path in python_files(folder):
        if path.name != "__init__.py":
            found.setdefault(path.name, []).append(shown(path))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


# Imports


def import_graph(folder: Path = PACKAGE) -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports at run time, inside functions too."""
    names = {module_name(path): path for path in python_files(folder)}
    graph = {}
    for name, path in names.items():
        found = {each for each in imported(parsed(path)) if each in names}
        # A name from a package of which the module is a part needs no more of that package.
        graph[name] = {each for each in found if not f"{name}.".startswith(f"{each}.")}
    return graph


def module_name(path: Path) -> str:
    """Return the dotted name under which a file of the repository is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield what may be a module among a file's imports; those for type checkers are left out."""
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree's nodes, without the bodies of `if TYPE_CHECKING:`."""
    yield node
    typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for child in node.orelse if typing else ast.iter_child_nodes(node):  # type: ignore[attr-defined]
        yield from run_time_nodes(child)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the circles of imports: modules that reach one another, sorted."""
    reached = {name: reachable(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in there if name in reached[other]))
        for name, there in reached.items()
    }
    return [list(group) for group in sorted(groups) if group]


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that one imports, directly or by others."""
    seen: set[str] = set()
    coming = list(graph[start])
    while coming:
        if (name := coming.pop()) not in seen:
            seen.add(name)
            coming.extend(graph[name])
    return seen


# Ops


def op_lists(*kinds: type[ast.expr]) -> list[str]:
    """Return the places where a literal of some kinds names two ops or more, outside their
    registrations.
    """
    paths = [*python_files(PACKAGE), *python_files(ROOT / "transforms")]
    trees = {path: parsed(path) for path in paths}
    ops = {name for tree in trees.values() for name in registered(tree)}
    return [
        f"{shown(path)}:{node.lineno}"
        for path, tree in trees.items()
        for node in outside_registrations(tree)
        if isinstance(node, kinds) and len(ops_in(node) & ops) > 1
    ]


def registered(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the ops that a file registers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(is_registration, node.decorator_list)):
            yield node.name


def is_registration(node: ast.AST) -> bool:
    """Whether a node is a call of `register_op`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_op")


def outside_registrations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree's nodes, without the calls of `register_op`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_registration(child):
            yield from outside_registrations(child)


def ops_in(node: ast.AST) -> set[str]:
    """Return what may name an op among a literal's own entries: strings, names, attributes."""
    entries = [*getattr(node, "keys", []), *getattr(node, "values", []), *getattr(node, "elts", [])]
    words = {getattr(each, "value", None) for each in entries if isinstance(each, ast.Constant)}
    words |= {each.id for each in entries if isinstance(each, ast.Name)}
    words |= {
        ast.unparse(each).split(".")[-1] for each in entries if isinstance(each, ast.Attribute)
    }
    return {word for word in words if isinstance(word, str)}


def tables() -> Iterator[str]:
    """Yield the lines of the report, Markdown."""
    head = ["code", "files", "lines", "file lines med/p90/max", f"files >{LONG_FILE}"]
    head += ["function lines med/p90/max", f"functions >{LONG_FUNCTION}", "files a folder med/max"]
    head += [f"lines over {WIDE} columns"]
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    folders = [PACKAGE, *(PACKAGE / room for room in ROOMS), ROOT / "transforms"]
    folders += [ROOT / "models", ROOT / "tests" / "equivalence"]
    for folder in folders:
        yield f"| {' | '.join(size_row(shown(folder), python_files(folder)))} |"
    tests = [each for each in python_files(ROOT / "tests") if "equivalence" not in each.parts]
    yield f"| {' | '.join(size_row('tests, written', tests))} |"
    yield ""
    for what, found in (
        ("circles of imports", [" -> ".join(each) for each in circles(import_graph())]),
        ("lists of ops outside registrations", op_lists(*LISTS)),
        ("tables with an entry for each of some ops", op_lists(ast.Dict)),
        (
            "file names that occur more than once",
            [f"{k}: {', '.join(v)}" for k, v in twins().items()],
        ),
    ):
        yield f"{what}: {len(found)}"
        yield from (f"  {each}" for each in found)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in tables())
