"""Wrappers: modules whose constructor is given another module, which their forward calls (`PreNorm(dim,
fn)`), or a class that it makes a module of (`Block(dim, norm_layer)`). A class that is
given several classes becomes one class for each of these, for what the wrapper hands on differs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, reduce, wraps
from itertools import takewhile
from typing import Any

from torch import nn

from onboard.analysis.source import find_method

_Kind = tuple[tuple[str, type], ...]
"""Parameters of a constructor, with the class of the module that each is given."""
_OWN: dict[type, dict[_Kind, type]] = {}
"""Classes of wrappers -> their own classes, by what they are given."""


def class_given(cls: type, is_given: Callable[[str, type], bool]) -> type:
    """Return the class of modules that `cls(...)` makes: one of its own, or `cls`.

    Args:
        cls: the class that the code names.
        is_given: whether a parameter of its constructor is a module of a class, or that class.
    """
    for kind, own in _OWN.get(cls, {}).items():
        if all(is_given(parameter, part) for parameter, part in kind):
            return own
    return cls


def telling_wrappers_apart(constructor: Any, package: str) -> Any:
    """Return the constructor of a model that gives the wrappers in it classes of their own."""

    @wraps(constructor)
    def constructed(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        _tell_apart(self, package)

    return constructed


def _tell_apart(model: nn.Module, package: str) -> None:
    """Change the classes of wrappers, of those inside others first."""
    while found := dict(_several(model, package)):
        cls = next((cls for cls, kinds in found.items() if not _inside(kinds, found)), [*found][0])
        for module, kind in found[cls]:
            module.__class__ = _OWN.setdefault(cls, {}).setdefault(kind, _made(cls, kind))


def _several(
    model: nn.Module, package: str
) -> Iterator[tuple[type, list[tuple[nn.Module, _Kind]]]]:
    """Yield the classes of a package that are given modules of several classes, with their modules."""
    modules: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        if type(module).__module__.split(".")[0] == package:
            modules.setdefault(type(module), []).append(module)
    for cls, own in modules.items():
        if len({tuple(map(type, module.modules())) for module in own}) == 1:
            continue
        kinds = [(module, _kind(module)) for module in own]
        names = {tuple(parameter for parameter, _ in kind) for _, kind in kinds}
        if len(names) == 1 and len({kind for _, kind in kinds}) > 1:
            yield cls, kinds


def _inside(kinds: list[tuple[nn.Module, _Kind]], found: Mapping[type, Any]) -> bool:
    return any(part in found for _, kind in kinds for _, part in kind)


def _kind(module: nn.Module) -> _Kind:
    cls: type = type(module)
    held = {name: _class_of(_part(module, path)) for path, name in _kept(cls).items()}
    return tuple((name, part) for name, part in held.items() if part is not None)


def _class_of(part: Any) -> type | None:
    """Return the class of a module, or the class of modules that is kept itself."""
    made = part.func if isinstance(part, partial) else part
    if isinstance(made, type):
        return made if issubclass(made, nn.Module) else None
    return type(part) if isinstance(part, nn.Module) else None


def _part(module: nn.Module, path: str) -> Any:
    """Return what lies at a path of attributes and places of lists; None: nothing."""
    start: Any = module
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), start)


@cache
def _kept(cls: type) -> dict[str, str]:
    """Return the paths at which a constructor keeps its parameters as they are, or what a call of
    them gives, alone or in lists of modules.
    """
    found = find_method(cls, "__init__")
    if found is None or found[0].__module__.split(".")[0] == "torch":
        return {}
    taken = {item.arg for item in (*found[1].args.args, *found[1].args.kwonlyargs)}
    kept: dict[str, str] = {}
    for statement in found[1].body:
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)]):
                own = _places(statement.value, attr)
                kept |= {path: name for path, name in own if name in taken}
    return kept


def _places(value: ast.expr, path: str) -> Iterator[tuple[str, str]]:
    """Yield the names that an expression is or calls, each with its path in what the expression
    makes: of a list that is made by a loop, the first place stands for all.
    """
    match value:
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            yield path, name
        case ast.Call(func=ast.Attribute(attr="ModuleList"), args=[items]):
            yield from _places(items, path)
        case ast.List(elts=items) | ast.Call(func=ast.Attribute(attr="Sequential"), args=items):
            alone = takewhile(lambda item: not isinstance(item, ast.Starred), items)
            for place, item in enumerate(alone):
                yield from _places(item, f"{path}.{place}")
        case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
            yield from _places(item, f"{path}.0")


def _made(cls: type, kind: _Kind) -> type:
    """Return a class of a name that its file has not, with all that `cls` has."""
    name = cls.__name__ + "".join(part.__name__ for _, part in kind)
    while hasattr(sys.modules[cls.__module__], name):
        name += "Wrapper"
    return type(name, (cls,), {"__module__": cls.__module__})
