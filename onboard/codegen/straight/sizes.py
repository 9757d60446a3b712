"""Sizes that follow from those of a forward's inputs: symbols, and what Python says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch

from onboard.codegen.straight.straight_lines import Arithmetic, Given, NotStraight, Size

_NAMES = {
    **dict.fromkeys(("FloorDiv", "CleanDiv"), "//"),
    **dict.fromkeys(("IntTrueDiv", "FloatTrueDiv"), "/"),
    **dict.fromkeys(("Mod", "PythonMod"), "%"),
}


@dataclass(frozen=True)
class Symbolic:
    """A number that depends on the sizes of the text."""

    expr: Any


def plain(number: Any) -> Any:
    """Return a number of a run as it is, or as `Symbolic`."""
    if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
        expr = number.node.expr
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Float):
            return float(expr)
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        return Symbolic(expr)
    if isinstance(number, np.generic):
        return number.item()
    return number


def known_sizes(inputs: Mapping[Given, torch.Tensor]) -> dict[Any, Size]:
    """Return what the sizes of inputs are, each by the first input that has it; symbols first."""
    found: dict[Any, Size] = {}
    for given, tensor in inputs.items():
        for dim, size in enumerate(tensor.shape):
            number = plain(size)
            if isinstance(number, Symbolic):
                found.setdefault(number.expr, Size(given, dim))
    return found


def written(expr: Any, known: Mapping[Any, Size]) -> Any:
    """Return the arithmetic of inputs' sizes that gives a symbolic number.

    Raises:
        NotStraight: it does not follow from them.
    """
    if expr in known:
        return known[expr]
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Float):
        return float(expr)
    name = type(expr).__name__
    if name in _NAMES:
        return Arithmetic(_NAMES[name], tuple(written(item, known) for item in expr.args))
    if isinstance(expr, sympy.Add | sympy.Mul):
        return _joined("+" if isinstance(expr, sympy.Add) else "*", expr, known)
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and expr.exp > 0:
        return Arithmetic("**", (written(expr.base, known), int(expr.exp)))
    raise NotStraight(f"a size that does not follow from its inputs' ({expr})")


def _joined(op: str, expr: Any, known: Mapping[Any, Size]) -> Any:
    parts = sorted(expr.args, key=lambda item: (item.is_number, str(item)))
    made = written(parts[0], known)
    for part in parts[1:]:
        if op == "+" and part.could_extract_minus_sign():
            made = Arithmetic("-", (made, written(-part, known)))
        else:
            made = Arithmetic(op, (made, written(part, known)))
    return made
