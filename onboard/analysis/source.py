"""Hugging Face modeling source: parsed modules, and where a class, a method or a function stands in
them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from onboard.analysis.multimodal import is_under
from onboard.errors import OnboardError

_OF_ANY_CLASS = {
    *("__module__", "__doc__", "__qualname__", "__annotations__"),
    *("__static_attributes__", "__firstlineno__"),
}
_NOT_IN_INFERENCE = {"reset_parameters", "extra_repr"}


@dataclass(frozen=True, eq=False)
class ModuleSource:
    """A parsed Python module and its live namespace."""

    module: ModuleType
    path: Path
    text: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    @property
    def namespace(self) -> dict[str, Any]:
        """The module's globals, in which names of its code are looked up."""
        return vars(self.module)

    def sha256(self) -> str:
        """Return the hash of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def is_apart(self, line: int) -> bool:
        """Whether a blank line comes before a line and the comments above it; none does before a
        line that is of another, longer module.
        """
        lines = self.text.splitlines()
        if line > len(lines):
            return False
        above = line - 2
        while above >= 0 and lines[above].lstrip().startswith("#"):
            above -= 1
        return line > 0 and above >= 0 and not lines[above].strip()

    def location(self, node: ast.AST) -> str:
        """Return `file.py:line` of a node."""
        return f"{self.path.name}:{getattr(node, 'lineno', 0)}"


def module_source(name: str) -> ModuleSource:
    """Import and parse the module called `name`."""
    return _parsed(importlib.import_module(name))


@cache
def _parsed(module: ModuleType) -> ModuleSource:
    """Parse a module, which may have the name of one that was imported before."""
    file = inspect.getsourcefile(module)
    if file is None:
        raise OnboardError(
            f"module {module.__name__} has no Python source",
            hint="Install transformers from a source wheel",
        )
    path = Path(file)
    text = path.read_text(encoding="utf-8-sig")
    source = ModuleSource(module, path, text, ast.parse(text))
    for node in _definitions(source.tree.body):
        if isinstance(node, ast.ClassDef):
            _enter(source.classes, node, module)
        elif isinstance(node, ast.FunctionDef):
            _enter(source.functions, node, module)
    for made in filter(None, map(_named_lambda, source.tree.body)):
        source.functions.setdefault(made.name, made)
    return source


def _named_lambda(statement: ast.stmt) -> ast.FunctionDef | None:
    """Return `name = lambda ...: value` as the function that it is."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.Lambda(args=args, body=body) as node
        ):
            returned = ast.copy_location(ast.Return(body), node)
            made = ast.FunctionDef(name, args, [returned], [], None, None)
            return ast.copy_location(made, node)
    return None


def _enter(table: dict[str, Any], node: ast.ClassDef | ast.FunctionDef, module: ModuleType) -> None:
    """Take a definition in, unless one of its name is there that the module's object is from."""
    known = table.get(node.name)
    if known is None or not _made(known, vars(module).get(node.name)):
        table[node.name] = node


def _made(node: ast.ClassDef | ast.FunctionDef, found: Any) -> bool:
    """Whether it is this definition that a class or function is from: others of its name may stand
    where a package is installed, say.
    """
    first = min(item.lineno for item in (node, *node.decorator_list))
    inside = range(first, (node.end_lineno or first) + 1)
    items = vars(found).values() if inspect.isclass(found) else [found]
    functions = [inspect.unwrap(item) for item in items if inspect.isfunction(item)]
    return any(item.__code__.co_firstlineno in inside for item in functions)


def sources_of(model: nn.Module, eager: Collection[str] = ()) -> list[ModuleSource]:
    """Return the modeling files that a model's code is from, its own first; those of `eager` parts
    do not count.

    A multimodal model makes its text model from another file, which it may change with.
    """
    own = type(model).__module__
    packages = ("transformers.models.", f"{own.rpartition('.')[0]}.")
    parts = (part for path, part in model.named_modules() if not is_under(path, eager))
    names = {cls.__module__ for part in parts for cls in type(part).__mro__}
    others = sorted(name for name in names - {own} if name.startswith(packages))
    return [module_source(name) for name in (own, *others)]


def sources_hash(sources: Sequence[ModuleSource]) -> str:
    """Return the sha256 of one file, or of the files' sha256 one after the other."""
    hashes = [source.sha256() for source in sources]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under conditions too: what is defined where a package is
    not installed, or an import fails.
    """
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = node.handlers if isinstance(node, ast.Try) else []
            caught = [item for handler in handlers for item in handler.body]
            yield from _definitions([*node.body, *node.orelse, *caught])


def class_node(cls: type) -> ast.ClassDef:
    """Return the definition of a module-level class, or of what one is made of that has none."""
    return _defined(cls)[1]


def _defined(cls: type) -> tuple[type, ast.ClassDef]:
    """Return the first class of the MRO with a definition, and that: a stand-in's class may be made
    while it runs.
    """
    for owner in cls.__mro__:
        if node := module_source(owner.__module__).classes.get(owner.__qualname__):
            return owner, node
    raise KeyError(cls.__qualname__)


def plain_class(cls: type) -> type:
    """Return the class of torch that a class is but for its name, first values and how it is
    printed; another one as it is.
    """
    base = cls.__base__
    assert base is not None
    adds = vars(cls).keys() - _OF_ANY_CLASS - _NOT_IN_INFERENCE
    of_torch = base is not nn.Module and getattr(nn, base.__name__, None) is base
    return base if of_torch and not adds and len(cls.__bases__) == 1 else cls


def find_method(cls: type, name: str) -> tuple[type, ast.FunctionDef] | None:
    """Return the class of the MRO that defines method `name` in Python, perhaps under another name, and
    the definition; None if there is none.
    """
    for owner in cls.__mro__:
        if name not in vars(owner):
            continue
        node = (
            module_source(owner.__module__).classes.get(owner.__qualname__)
            if owner.__module__ not in sys.builtin_module_names
            else None
        )
        method = _definition(node, name) if node else None
        found = None if method is None else (owner, method)
        if found is not None or not _only_wraps(owner, name):
            return found
    return None


def _definition(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return the first definition of a method, or of the one that its class gives the name afterwards:
    `forward = run`.
    """
    methods: dict[str, ast.FunctionDef] = {}
    given = name
    for item in node.body:
        match item:
            case ast.FunctionDef(name=key):
                methods.setdefault(key, item)
                given = name if key == name else given
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=other)):
                given = other if target == name else given
    return methods.get(given)


def _only_wraps(cls: type, name: str) -> bool:
    """Whether a class has a method around the one that it inherits, as transformers gives it to
    subclasses of its layers.
    """
    inner = inspect.unwrap(vars(cls)[name]) if inspect.isfunction(vars(cls)[name]) else None
    inherited = (vars(base).get(name) for base in cls.__mro__[1:])
    return any(inspect.isfunction(item) and inspect.unwrap(item) is inner for item in inherited)


def function_node(function: Any) -> ast.FunctionDef | None:
    """Return the definition of a function of a module, or of a class's static method; else None."""
    source = module_source(function.__module__)
    if function.__name__ == "<lambda>":
        line = function.__code__.co_firstlineno
        named = (item for item in source.functions.values() if item.lineno == line)
        return next(named, None)
    owner = source.classes.get(function.__qualname__.rpartition(".")[0])
    if owner is None:
        return source.functions.get(function.__name__)
    methods = [item for item in owner.body if isinstance(item, ast.FunctionDef)]
    static = [item for item in methods if "staticmethod" in map(ast.unparse, item.decorator_list)]
    return next((item for item in static if item.name == function.__name__), None)


def location(cls: type) -> str:
    """Return `file.py:line` of a class."""
    owner, node = _defined(cls)
    return module_source(owner.__module__).location(node)


def gives_its_input(cls: type) -> bool:
    """Whether modules of a class return what they are given: torch's, or places to watch."""
    if issubclass(cls, (nn.Dropout, nn.Identity)):
        return True
    found = find_method(cls, "forward")
    if found is None or cls.__module__.split(".")[0] in ("torch", "transformers"):
        return False
    body = [item for item in found[1].body if not isinstance(item, ast.Expr)]
    match found[1].args.args, body:
        case [_, ast.arg(arg=given)], [ast.Return(value=ast.Name(id=returned))]:
            return given == returned
    return False


def multiplies(cls: type) -> bool:
    """Whether modules of a repository's class only multiply the two matrices that they are given."""
    found = find_method(cls, "forward")
    if found is None or cls.__module__.split(".")[0] in ("torch", "transformers"):
        return False
    body = [item for item in found[1].body if not isinstance(item, ast.Expr)]
    match found[1].args.args, body:
        case [_, ast.arg(arg=left), ast.arg(arg=right)], [
            ast.Return(
                value=ast.BinOp(op=ast.MatMult())
                | ast.Call(func=ast.Attribute(attr="matmul" | "bmm"))
            )
        ]:
            read = {node.id for node in ast.walk(body[0]) if isinstance(node, ast.Name)}
            return read <= {left, right, "torch"}
    return False
