"""Names of torch's functions, and what calls of them are in a recording."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onboard.codegen.straight.straight_lines import NotStraight

_PLACES = (
    ("torch", torch),
    ("torch.nn.functional", nn.functional),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.linalg", torch.linalg),
)
OPERATORS = {
    **dict.fromkeys(("add", "__add__", "__radd__"), "+"),
    **dict.fromkeys(("sub", "__sub__", "subtract"), "-"),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), "*"),
    **dict.fromkeys(("div", "__div__", "true_divide", "__truediv__", "divide"), "/"),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), "@"),
    **dict.fromkeys(("pow", "__pow__"), "**"),
    **dict.fromkeys(("eq", "__eq__"), "=="),
    **dict.fromkeys(("ne", "__ne__"), "!="),
    **dict.fromkeys(("lt", "__lt__", "less"), "<"),
    **dict.fromkeys(("le", "__le__"), "<="),
    **dict.fromkeys(("gt", "__gt__", "greater"), ">"),
    **dict.fromkeys(("ge", "__ge__"), ">="),
    **dict.fromkeys(("__and__",), "&"),
    **dict.fromkeys(("__or__",), "|"),
    **dict.fromkeys(("__xor__",), "^"),
    **dict.fromkeys(("__floordiv__", "floor_divide"), "//"),
    **dict.fromkeys(("__mod__", "remainder"), "%"),
}
TURNED = {
    "__rsub__": "-", "__rdiv__": "/", "__rtruediv__": "/", "__rpow__": "**", "__rmatmul__": "@",
    "__rfloordiv__": "//", "__rand__": "&", "__ror__": "|", "__rxor__": "^", "__rmod__": "%",
}  # fmt: skip
UNARY = {"neg": "-", "negative": "-", "__neg__": "-", "__invert__": "~"}
_RANDOM = re.compile(
    r"(rand|bernoulli|multinomial|normal|log_normal|poisson|uniform_|exponential_|cauchy_|geometric_|gumbel)"
)
_VALUES = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "equal", "allclose", "is_nonzero", "__complex__", "__contains__",
}  # fmt: skip
"""What gives the value of a tensor, on which code may branch."""
SAME = {"clone", "detach", "alias", "requires_grad_", "cpu", "detach_"}
"""Methods whose result is the tensor, for one who changes nothing in place."""


def named(function: Callable[..., Any]) -> tuple[str, str]:
    """Return what a call of torch's is, `function` or `method`, and its name.

    Raises:
        NotStraight: it is neither, draws random numbers, or tells what a tensor's values are.
    """
    name = getattr(function, "__name__", "")
    if name in _VALUES:
        raise NotStraight(f"it reads values of a tensor ({name})")
    if _RANDOM.match(name):
        raise NotStraight(f"it draws random numbers ({name})")
    for key in (name, f"__{name}__"):  # `__pow__` is called pow, and is another function
        if _same(getattr(torch.Tensor, key, None), function):
            return "method", name
    for place, module in _PLACES:
        if _same(getattr(module, name, None), function):
            return "function", f"{place}.{name}"
    raise NotStraight(f"a call of {getattr(function, '__qualname__', function)}")


def _same(found: Any, function: Any) -> bool:
    return found is not None and (found is function or found == function)
