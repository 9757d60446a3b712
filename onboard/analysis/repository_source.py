"""What the code of a model's repository says, read without running it."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.hub import known_type
from onboard.untrusted.bounds import CODE_BYTES, CODE_FILES, read_file

PACKAGE = "repository_code"
"""What the repository's files are imported as: `repository_code.modeling_x`."""
WATCHED = {
    *(
        "os",
        "sys",
        "subprocess",
        "socket",
        "shutil",
        "ctypes",
        "pickle",
        "marshal",
        "importlib",
        "builtins",
        "runpy",
    ),
    *(
        "urllib",
        "http",
        "requests",
        "ftplib",
        "asyncio",
        "multiprocessing",
        "threading",
        "signal",
        "tempfile",
        "glob",
    ),
    *(
        "pathlib",
        "base64",
        "codecs",
        "zipfile",
        "tarfile",
        "huggingface_hub",
        "pip",
        "setuptools",
        "webbrowser",
    ),
}
"""Modules with which code reaches beyond tensors."""
_AT_IMPORT = "runs at import"
_CALLS = {
    "eval",
    "exec",
    "compile",
    "open",
    "__import__",
    "getattr",
    "setattr",
    "globals",
    "load",
    "system",
}
_LOADED, _PERHAPS, _CALLED = "loaded", "perhaps", "called"
"""When an import runs: whenever its file is loaded; if a condition holds, or to see whether it
works; when a function is called.
"""
_QUIET = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.Expr,
    ast.If,
    ast.Try,
)


@dataclass
class CodeSurvey:
    """The Python files that a model's `auto_map` leads to."""

    classes: dict[str, str]
    """`AutoConfig` -> "file.Class" and the like."""
    files: dict[str, str] = field(default_factory=dict)
    """Name -> sha256."""
    lines: int = 0
    imports: list[str] = field(default_factory=list)
    """Packages outside the repository."""
    absent: dict[str, str] = field(default_factory=dict)
    """Files that are not there, and are imported in functions alone -> `file.py:12`."""
    remarkable: list[str] = field(default_factory=list)
    """`file.py:12: import subprocess` and the like: what reaches beyond tensors, and what runs at
    import.
    """

    def as_json(self) -> dict[str, Any]:
        """Return the survey as JSON-able data."""
        return asdict(self)

    def __str__(self) -> str:
        imported = _some(self.imports) or "nothing"
        found = f"{_some(self.files)}: {self.lines} lines, imports {imported}"
        if not self.remarkable:
            return found
        kinds = Counter(_kind(item.split(": ", 1)[1]) for item in self.remarkable)
        counted = ", ".join(f"{count} x {kind}" for kind, count in _first_import_time(kinds))
        shown = sorted(self.remarkable, key=lambda item: not item.endswith(_AT_IMPORT))[:5]
        return f"{found}; it has {counted}; look at {'; '.join(map(_short, shown))}"


def _some(names: Collection[str], most: int = 12) -> str:
    """Return names, of which neither many nor long ones can bury what is said after them."""
    rest = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*map(_short, list(names)[:most]), *rest])


def _short(words: str, most: int = 40) -> str:
    return words if len(words) <= most else f"...{words[3 - most :]}"


def _kind(words: str) -> str:
    return re.sub(r"(?:import|from) (\w+).*", r"import \1", words)


def _first_import_time(kinds: Counter[str]) -> list[tuple[str, int]]:
    return sorted(kinds.most_common(), key=lambda item: item[0] != _AT_IMPORT)


def is_imported_from_it(module: str) -> bool:
    """Whether a module, by its name, is one of the repository's files."""
    return module.split(".")[0] == PACKAGE


def survey_code(folder: Path, config: Mapping[str, Any]) -> CodeSurvey:
    """Parse the files that `auto_map` names and those that they import from the repository.

    Raises:
        OnboardError: a file is missing or is no Python, or the code lies in another repository and has
            no copy here.
    """
    survey = CodeSurvey(class_names(config, folder))
    waiting = [
        f"{reference.rpartition('.')[0].replace('.', '/')}.py"
        for reference in survey.classes.values()
    ]
    while waiting:
        name = waiting.pop(0)
        if name not in survey.files:
            CODE_FILES.check(len(survey.files) + 1, folder)
            waiting += _read(folder, name, survey)
    survey.imports = sorted(set(survey.imports))
    survey.absent = {name: at for name, at in survey.absent.items() if at}
    return survey


def class_names(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the config's `auto_map` for the two classes that are needed, its names checked; for
    a model type that transformers knows, the config class may be that of transformers. Of code of
    another repository, as finetuned models name it, the copy in the folder is meant.
    """
    auto_map = config.get("auto_map")
    found = {}
    for key in ("AutoConfig", "AutoModelForCausalLM"):
        reference = auto_map.get(key) if isinstance(auto_map, dict) else None
        if reference is None and key == "AutoConfig" and known_type(str(config.get("model_type"))):
            continue
        if not isinstance(reference, str):
            raise OnboardError(
                f"the model brings code, and its auto_map names no {key}",
                hint="It cannot be onboarded",
            )
        owner, _, own = reference.rpartition("--")
        file = own.rpartition(".")[0].replace(".", "/")
        if owner and file.isprintable() and not (folder / f"{file}.py").is_file():
            raise OnboardError(
                f"{key} lies in another repository ({reference})",
                hint=f"Put the Python files of {owner} beside the model's config.json",
            )
        reference = own
        if "." not in reference or not all(part.isidentifier() for part in reference.split(".")):
            raise OnboardError(
                f"auto_map has {reference!r}, which is no module and class", hint="Do not trust it"
            )
        found[key] = reference
    return found


def _read(folder: Path, name: str, survey: CodeSurvey) -> list[str]:
    """Add one file to the survey; return the names of the repository's files that it imports."""
    path = folder / name
    try:
        data = read_file(path, CODE_BYTES)
        data.decode("utf-8")  # as it is copied
        tree = ast.parse(data)
    except FileNotFoundError as error:
        raise lacking(name) from error
    except OSError as error:  # a name that is too long, say
        raise OnboardError(
            f"the model's code {_short(name)} cannot be read ({error.strerror})",
            hint="Do not trust it",
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise OnboardError(
            f"{name} of the model's repository is not Python in UTF-8 ({error or type(error).__name__})",
            hint="Do not trust it",
        ) from error
    survey.files[name] = hashlib.sha256(data).hexdigest()
    survey.lines += data.count(b"\n") + 1
    survey.remarkable += [f"{name}:{line}: {text}" for line, text in _remarkable(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            survey.imports += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            survey.imports.append((node.module or "").split(".")[0])
    return _neighbours(folder, name, tree, survey)


def _neighbours(folder: Path, name: str, tree: ast.Module, survey: CodeSurvey) -> list[str]:
    """Return the repository's files that a file imports: those that are there, and those that it
    cannot be loaded without. What only functions import is noted where it is not there.
    """
    found = []
    for node, place in _relative_imports(tree, _LOADED):
        for file in _inside(node, name):
            if place == _LOADED or (folder / file).is_file():
                found.append(file)
            else:
                last = survey.absent.get(file, f"{name}:{node.lineno}")
                survey.absent[file] = last if place == _CALLED else ""
    return found


def _relative_imports(tree: ast.AST, place: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Yield the imports of neighbours inside a node that runs at `place`, and when they run."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node, place
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _relative_imports(node, _CALLED)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and place == _LOADED):
            yield from _relative_imports(node, _PERHAPS)
        else:
            yield from _relative_imports(node, place)


def lacking(name: str) -> OnboardError:
    """Return the error that says which of the repository's files is not there."""
    return OnboardError(f"the model's code lacks {_short(name)}", hint="Fetch the repository anew")


def _inside(node: ast.ImportFrom, name: str) -> list[str]:
    folder = name.split("/")[: -node.level]
    modules = [node.module] if node.module else [alias.name for alias in node.names]
    return ["/".join([*folder, *module.split(".")]) + ".py" for module in modules]


def _remarkable(tree: ast.Module) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                (node.lineno, f"import {alias.name}")
                for alias in node.names
                if _is_watched(alias.name)
            ]
        elif (
            isinstance(node, ast.ImportFrom) and node.level == 0 and _is_watched(node.module or "")
        ):
            found.append((node.lineno, f"from {node.module} import"))
        elif (
            isinstance(node, ast.Call)
            and _called(node) in _CALLS
            and not _is_attribute_by_name(node)
        ):
            found.append((node.lineno, f"{_called(node)}(...)"))
    found += [
        (node.lineno, _AT_IMPORT) for node in tree.body if not _is_quiet(node) or _reaches(node)
    ]
    return sorted(found)


def _reaches(node: ast.stmt) -> bool:
    """Whether a statement that is no definition calls something of a watched module."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return False
    calls = (item.func for item in ast.walk(node) if isinstance(item, ast.Call))
    roots = (name for call in calls for name in ast.walk(call) if isinstance(name, ast.Name))
    return any(_is_watched(name.id) for name in roots)


def _is_watched(module: str) -> bool:
    return module.split(".")[0] in WATCHED


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _is_attribute_by_name(node: ast.Call) -> bool:
    """Whether a call is `getattr(x, "name")` and the like: no more than an attribute."""
    return (
        _called(node) in ("getattr", "setattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    )


def _is_quiet(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, _QUIET)
