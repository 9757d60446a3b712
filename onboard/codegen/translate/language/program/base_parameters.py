"""Methods that pass what they are given on to their base's: `super().forward(*args, **kwargs)`, and
those that a class of a repository has from PyTorch's.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from functools import cache
from itertools import takewhile
from typing import Any

from torch import nn

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.program.argument_facts import default_nodes
from onboard.codegen.translate.language.trees.memoised import without_memory

_OF_EACH_TOKEN = (nn.Linear, nn.Embedding)
"""Classes of PyTorch whose forward is the same for all tokens, and needs no cache."""


def method_of(cls: type, attr: str, specialised: bool) -> tuple[type, ast.FunctionDef] | None:
    """Return the class whose method a class has, and its definition; in code of repositories with
    the parameters of the base's by name, where it takes any for it. A forward of PyTorch's is
    called.
    """
    if not specialised:
        return find_method(cls, attr)
    return (_of_torch(cls) if attr == "forward" else None) or _spelled_out(cls, attr)


def as_written(cls: type, attr: str, specialised: bool) -> tuple[type, ast.FunctionDef] | None:
    """Return the class whose method a class has, and its definition; in code of repositories one that
    keeps nothing for its next call.
    """
    return _without_memory(cls, attr) if specialised else find_method(cls, attr)


@cache
def _of_torch(cls: Any) -> tuple[type, ast.FunctionDef] | None:
    """Return a forward that calls that of PyTorch's class of which a class only has another
    constructor; None where it is of no such class, or has a forward of its own.
    """
    found = find_method(cls, "forward")
    if found is None or found[0] not in _OF_EACH_TOKEN or cls is found[0]:
        return None
    node = deepcopy(found[1])
    given = [item.arg for item in node.args.args[1:]]
    node.body = ast.parse(f"return super().forward({', '.join(given)})").body
    return cls, ast.fix_missing_locations(node)


@cache
def _without_memory(cls: Any, attr: str) -> tuple[type, ast.FunctionDef] | None:
    return without_memory(find_method(cls, attr))


@cache
def _spelled_out(cls: Any, attr: str) -> tuple[type, ast.FunctionDef] | None:
    found = _without_memory(cls, attr)
    if found is None or found[1].args.vararg is None:
        return found
    rest = cls.__mro__[cls.__mro__.index(found[0]) + 1 :]
    base = next((each for each in rest if attr in vars(each)), None)
    behind = None if base is None else _spelled_out(base, attr)
    made = None if behind is None else _with_parameters_of(behind[1], found[1])
    return found if made is None else (found[0], made)


def _with_parameters_of(base: ast.FunctionDef, method: ast.FunctionDef) -> ast.FunctionDef | None:
    node = deepcopy(method)
    assert node.args.vararg is not None
    others = node.args.vararg.arg
    calls = [item for item in ast.walk(node) if _passes_on(item, node.name, others)]
    read = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == others]
    if len(calls) != 1 or len(read) != 1:
        return None
    (made,) = calls
    assert isinstance(made, ast.Call)
    made.args.pop()
    named = {item.arg for item in made.keywords}
    behind = [item.arg for item in base.args.args][1 + len(made.args) :]
    left = list(takewhile(lambda key: key not in named, behind))
    if set(left) & {item.arg for item in (*node.args.args, *node.args.kwonlyargs)}:
        return None
    made.keywords += [ast.keyword(key, ast.Name(key, ast.Load())) for key in left]
    defaults = default_nodes(base)
    for key in left:
        node.args.args.append(ast.arg(key))
        if key in defaults or node.args.defaults:
            node.args.defaults.append(defaults.get(key, ast.Constant(None)))
    node.args.vararg = None
    return ast.fix_missing_locations(node)


def _passes_on(node: ast.AST, attr: str, others: str) -> bool:
    """Whether a node is `super().attr(..., *others, ...)`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=called),
            args=[*given, ast.Starred(value=ast.Name(id=last))],
        ):
            plain = not any(isinstance(item, ast.Starred) for item in given)
            return plain and called == attr and last == others
    return False
