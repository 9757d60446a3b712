"""Checklist, part T, what can do harm: what a model file imports, and what it could reach from
there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from onboard.review.checklist import Subject, contract
from onboard.review.python_source import Outcome, Source, dotted, forbid

_ALLOWED_IMPORTS = re.compile(
    r"""(__future__|copy|itertools|math|typing|dataclasses|collections\.abc
    |torch(\.nn(\.functional|\.init)?)?
    |transformers(\.(activations|modeling_rope_utils|models\.\w+\.configuration_\w+))?
    |onboard\.(modeling|ops|plain_config))$""",
    re.VERBOSE,
)
_MODEL_FILE = re.compile(r"(^|\.)(modeling_(?!rope_utils)\w+|models)$|^\.")
_DYNAMIC = {"compile", "delattr", "eval", "exec", "globals", "locals", "setattr", "vars"}
"""Builtins that make code from text, or change what is there by name."""
_REACHING = (
    {
        "builtins",
        "ctypes",
        "importlib",
        "inspect",
        "io",
        "multiprocessing",
        "os",
        "pathlib",
        "pickle",
        "shutil",
    }
    | {"socket", "subprocess", "sys", "tempfile", "threading", "urllib"}
    | {"_C", "classes", "distributed", "hub", "jit", "package", "serialization", "storage", "utils"}
    | {
        "dump",
        "dumps",
        "from_file",
        "from_pretrained",
        "fromfile",
        "load",
        "load_library",
        "loads",
        "memmap",
        "open",
    }
    | {"popen", "read_text", "save", "save_pretrained", "system", "unlink", "urlopen", "write_text"}
)
"""Modules that lead out of a model, and what reads or writes files."""


def _imported(source: Source) -> dict[ast.stmt, list[str]]:
    """Each import statement and the modules that it names."""
    found: dict[ast.stmt, list[str]] = {
        node: [alias.name for alias in node.names] for node in source.all(ast.Import)
    }
    found |= {node: ["." * node.level + (node.module or "")] for node in source.all(ast.ImportFrom)}
    return found


def _self_contained(subject: Subject) -> Outcome:
    """Of transformers' own names only those of configs are in reach: `from transformers import` has
    its models, too.
    """
    others = [
        node
        for node, names in _imported(subject.model).items()
        if any(map(_MODEL_FILE.search, names))
    ]
    return forbid(
        subject.model,
        [*others, *(node for node in subject.model.all(ast.stmt) if _takes_models(node))],
    )


def _takes_models(node: ast.stmt) -> bool:
    match node:
        case ast.Import(names=aliases):
            return any(alias.name.split(".")[0] == "transformers" for alias in aliases)
        case ast.ImportFrom(module=str(module), names=aliases) if (
            module == "transformers" or ".configuration_" in module
        ):
            return not all(alias.name.endswith("Config") for alias in aliases)
    return False


def _allowed_imports(subject: Subject) -> Outcome:
    unknown = [
        node
        for node, names in _imported(subject.model).items()
        if not (
            all(_ALLOWED_IMPORTS.match(name) or _MODEL_FILE.search(name) for name in names)
            or _only_asks(node)
        )
    ]
    return forbid(subject.model, unknown)


def _only_asks(node: ast.stmt) -> bool:
    """Whether an import is of nothing but questions to transformers about what is installed."""
    match node:
        case ast.ImportFrom(module="transformers.utils", names=aliases):
            return all(alias.name.startswith("is_") for alias in aliases)
    return False


def _nothing_reached(subject: Subject) -> Outcome:
    """Whatever name it goes by: as an attribute, imported under another name, or asked for by a
    text.
    """
    model = subject.model
    known = {*_asked_of_configs(model, subject.spec.config_class), *_own_variables(model)}
    return forbid(
        model, [node for node in model.all(ast.AST) if node not in known and _reaches(node)]
    )


def _own_variables(model: Source) -> Iterator[ast.AST]:
    """Yield the names of variables that a function assigns (a router's `load`, say): they are what
    it assigned. Those of builtins stay out.
    """
    for function in model.all(ast.FunctionDef):
        names = list(model.all(ast.Name, function))
        stored = {node.id for node in names if _is_stored(node)} - _DYNAMIC
        yield from (node for node in names if node.id in stored)


def _asked_of_configs(model: Source, config_class: str) -> Iterator[ast.AST]:
    """Yield the calls that ask a parameter of the config's class for an attribute."""
    for function in model.all(ast.FunctionDef):
        given = {arg.arg for arg in function.args.args if _is_of(arg, config_class)}
        stored = {node.id for node in model.all(ast.Name, function) if _is_stored(node)}
        yield from (call for call in model.all(ast.Call, function) if _asks(call, given - stored))


def _is_of(parameter: ast.arg, config_class: str) -> bool:
    return parameter.annotation is not None and dotted(parameter.annotation) == config_class


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _reaches(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="getattr")):
            return not _asks(node, {"self", "config", "self.config"})
        case ast.Name(id=name):
            return name in _DYNAMIC | _REACHING or (name.startswith("__") and name.endswith("__"))
        case ast.Attribute(attr=name):
            return name in {"eval", "exec", *_REACHING} or (
                _is_special(name) and name != "__init__"
            )
        case ast.ImportFrom(names=aliases):  # the module's own name is judged by T03
            return any(part in _REACHING for alias in aliases for part in alias.name.split("."))
    return False


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _asks(call: ast.Call, owners: Collection[str | None]) -> bool:
    """Whether an attribute is asked of the module itself or of a config, by a name that leads
    nowhere else.
    """
    if dotted(call.func) != "getattr" or not call.args:
        return False
    named = [part.value for arg in call.args[1:2] for part in _texts(arg)]
    return dotted(call.args[0]) in owners and not any(
        _is_special(str(name)) or name in _REACHING for name in named
    )


def _texts(node: ast.AST) -> Iterator[ast.Constant]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Constant))


MODEL_SAFETY = [
    contract("T02", "no other model file is imported", _self_contained),
    contract(
        "T03",
        "nothing is imported but torch, the config and onboard's ops and modeling",
        _allowed_imports,
    ),
    contract("T09", "nothing is evaluated, loaded, opened or reached by name", _nothing_reached),
]
