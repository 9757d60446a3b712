"""A copy of a model whose modules keep functions that read modules, or what Python cannot copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model) -> Model:
    """Return a deep copy. Functions that modules keep (`self.mlpf = lambda x: mlp(x)`), which a deep
    copy shares, read the modules of the copy. What cannot be copied, and nobody changes, is shared.
    """
    functions = list(_with_modules(model))
    memo: dict[int, Any] = {id(each): _with_empty_cells(each) for each in functions}
    memo |= {id(each): each for each in _uncopied(model)}
    made = copy.deepcopy(model, memo)
    for each in functions:
        for old, new in zip(each.__closure__ or (), memo[id(each)].__closure__, strict=True):
            new.cell_contents = memo.get(id(old.cell_contents), old.cell_contents)
    return made


def _with_modules(model: nn.Module) -> Iterator[FunctionType]:
    """Yield the functions that modules keep and that read modules of a scope around them."""
    for module in model.modules():
        for value in vars(module).values():
            cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
            if any(isinstance(_held(cell), nn.Module) for cell in cells):
                yield value


def _uncopied(model: nn.Module) -> Iterator[object]:
    """Yield what modules keep that has no copy: Python's modules, a signature's parameters."""
    for module in model.modules():
        yield from (
            value
            for value in vars(module).values()
            if isinstance(value, ModuleType | MappingProxyType)
        )


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _with_empty_cells(function: FunctionType) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
