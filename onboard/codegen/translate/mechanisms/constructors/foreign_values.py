"""Parameters whose first values a constructor computes with other libraries than PyTorch (numpy,
scipy): a checkpoint has others for them, and their shape is enough.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import Untranslatable

_KNOWN = {"torch", "transformers", "math", "builtins", "typing", "onboard", "functools"}
"""Packages that constructors are translated with."""


class ForeignValues(Mechanism):
    """`self.table = self.made_with_numpy()`, which is an nn.Parameter."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """A parameter of the same shape, by the sizes that the code reads."""
        if frame.kind != "init" or frame.cls is None or not frame.translator.specialised:
            return None
        match statements:
            case [
                ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=value
                ) as node,
                *rest,
            ]:
                code = [*_run(value, frame)]
                modules = frame.translator.modules_of(frame.cls.cls)
                found = [vars(module)["_parameters"].get(attr) for module in modules]
                if not any(_is_foreign(*each) for each in code) or None in found or not found:
                    return None
                sizes = [_size(dim, found, modules, code, frame) for dim in range(found[0].dim())]
                made = ast.parse(f"self.{attr} = nn.Parameter(torch.empty({', '.join(sizes)}))")
                return [ast.copy_location(made.body[0], node), *rest]
        return None


def _run(value: ast.expr, frame: Frame) -> Iterator[tuple[ast.AST, Mapping[str, Any]]]:
    """Yield an expression and the methods of the module's own that it calls, each with what names
    mean there.
    """
    assert frame.cls is not None
    yield value, frame.source.namespace
    for item in ast.walk(value):
        match item:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attr)):
                found = find_method(frame.cls.cls, attr)
                if found is not None:
                    yield found[1], module_source(found[0].__module__).namespace


def _is_foreign(code: ast.AST, namespace: Mapping[str, Any]) -> bool:
    """Whether code uses a package that no model file may have."""
    found = (namespace.get(item.id) for item in ast.walk(code) if isinstance(item, ast.Name))
    names = (_package(value) for value in found if value is not None)
    own = str(namespace.get("__name__")).split(".")[0]
    return bool({*names} - _KNOWN - {own, ""})


def _package(value: object) -> str:
    name = value.__name__ if isinstance(value, type(sys)) else getattr(value, "__module__", "")
    return str(name or "").split(".")[0]


def _size(
    dim: int,
    found: Sequence[Any],
    modules: Sequence[nn.Module],
    code: Sequence[tuple[ast.AST, Mapping[str, Any]]],
    frame: Frame,
) -> str:
    """Return the only attribute of the module, or field of the config, that the code reads and that
    is a parameter's size in all modules.

    Raises:
        Untranslatable: there is none, or several.
    """
    read = {
        ast.unparse(item)
        for each, _ in code
        for item in ast.walk(each)
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name)
    }

    def value(path: str, module: nn.Module) -> object:
        owner, _, attr = path.partition(".")
        owners = {"self": module, "config": frame.translator.config}
        return getattr(owners[owner], attr, None) if owner in owners else None

    fitting = [
        path
        for path in sorted(read)
        if all(
            value(path, module) == tensor.shape[dim]
            for module, tensor in zip(modules, found, strict=True)
        )
    ]
    if len(fitting) != 1:
        raise Untranslatable(
            f"a parameter that other packages than PyTorch compute, whose size {dim} is"
            f" {' or '.join(fitting) or 'none that the code reads'}"
        )
    return fitting[0]
