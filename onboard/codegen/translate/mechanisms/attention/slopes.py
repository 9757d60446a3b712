"""ALiBi's slopes (Press et al. 2022, arXiv:2108.12409), which code computes for a number of heads in
plain Python: known by what comes out, and written as their formula.

Of p heads, a power of 2, the slopes are 2**(-8 k / p) for k = 1 ... p. With more heads than the
nearest power of 2, the rest have every other slope of twice as many.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch

from onboard.analysis.recognise import REFUSED
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import Code, Value

_HEADS = range(1, 129)
"""The numbers of heads for which a function has to give these slopes."""
_SIZE = re.compile(r".+\.(shape\[\d\]|size\(\d\))")
_FORMULA = (
    "[2.0 ** (-8.0 * (k + 1) / p) for k in range(p)]"
    " + [2.0 ** (-4.0 * (2 * k + 1) / p) for k in range({heads} - p)]"
)


class Slopes(Mechanism):
    """`slopes(heads)` of a function that is defined in a repository."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """The formula of what it computes."""
        if not frame.translator.specialised or not inspect.isfunction(function):
            return None
        if len(args.positional) != 1 or args.keywords or args.stars:
            return None
        if not (args.static() or _is_size(args.positional[0], frame)):
            return None
        made = gives_slopes(function)
        if made is None:
            return None
        formula = _written(args.positional[0], frame)
        as_tensor = call(attribute(name("torch"), "tensor"), formula.expr)
        return Code(as_tensor, static=True) if made is torch.Tensor else formula


def _is_size(heads: Value, frame: Frame) -> bool:
    """Whether a value is a tensor's size: that of its heads every model knows."""
    if type(heads) is not Code:
        return False
    written = ast.unparse(WrittenOut(local_values(frame)).visit(deepcopy(heads.expr)))
    return _SIZE.fullmatch(written) is not None


def _written(heads: Value, frame: Frame) -> Code:
    """Return the slopes as code; the nearest power of 2 gets a name of its own."""
    count = ast.unparse(heads.code())
    nearest = frame.fresh("nearest")
    power = ast.parse(f"2 ** math.floor(math.log2({count}))", mode="eval").body
    frame.bind(nearest, Code(power, static=True))
    formula = _FORMULA.format(heads=count)
    tree = ast.parse(formula, mode="eval").body
    return Code(_Named(nearest).visit(tree), static=True)


class _Named(ast.NodeTransformer):
    def __init__(self, nearest: str) -> None:
        self.nearest = nearest

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return name(self.nearest) if node.id == "p" else node


@lru_cache(maxsize=512)
def gives_slopes(function: Any) -> type | None:
    """Return what a function of a repository gives ALiBi's slopes of any number of heads as, a list
    or a tensor; None for another function.
    """
    try:
        given = [function(heads) for heads in _HEADS]
    except REFUSED:  # a function of another kind
        return None
    if all(_close(each, _slopes(heads)) for each, heads in zip(given, _HEADS, strict=True)):
        return torch.Tensor if isinstance(given[0], torch.Tensor) else list
    return None


def _slopes(heads: int) -> list[float]:
    p = 2 ** math.floor(math.log2(heads))
    rest = [2.0 ** (-4.0 * (2 * k + 1) / p) for k in range(heads - p)]
    return [2.0 ** (-8.0 * (k + 1) / p) for k in range(p)] + rest


def _close(given: Any, slopes: list[float]) -> bool:
    within = 1e-9
    if isinstance(given, torch.Tensor) and given.shape == (len(slopes),):
        given, within = given.tolist(), 1e-6
    if not isinstance(given, list | tuple) or len(given) != len(slopes):
        return False
    alone = (isinstance(each, torch.Tensor) and each.numel() == 1 for each in given)
    numbers = [x.item() if single else x for x, single in zip(given, alone, strict=True)]
    return all(isinstance(each, float | int) for each in numbers) and all(
        math.isclose(one, other, rel_tol=within) for one, other in zip(numbers, slopes, strict=True)
    )
