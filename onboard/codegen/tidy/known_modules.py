"""What `__init__` says of PyTorch's modules, where code asks these: a bias that is not there, a
dilation of one.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

_BIASED = ("Linear", "Conv1d")
_BEFORE_DILATION = 5
"""Arguments of `nn.Conv1d` before `dilation`."""


def with_known_modules(body: Sequence[ast.stmt], init: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a method with values in place of attributes of modules that
    `__init__` makes.
    """
    known = _known(init)
    return [_Known(known).visit(deepcopy(statement)) for statement in body]


def _known(init: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the values of expressions like `self.conv.bias`, of modules that are made in one place
    alone.
    """
    made: dict[str, list[ast.expr]] = {}
    for node in (node for statement in init for node in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                made.setdefault(ast.unparse(target), []).append(node.value)
    return {
        f"{place}.{attr}": value
        for place, values in made.items()
        if len(values) == 1 and place.startswith("self.")
        for attr, value in _attributes(values[0]).items()
        if f"{place}.{attr}" not in made
    }


def _attributes(made: ast.expr) -> dict[str, ast.expr]:
    """Return what a call of `nn.Linear` or `nn.Conv1d` says of the module's attributes."""
    match made:
        case ast.Call(
            func=ast.Attribute(value=ast.Name() | ast.Attribute() as owner, attr=kind)
        ) if kind in _BIASED:
            pass
        case _:
            return {}
    given = {item.arg: item.value for item in made.keywords}
    if ast.unparse(owner) not in ("nn", "torch.nn") or None in given:
        return {}
    found: dict[str, ast.expr] = {}
    if isinstance(bias := given.get("bias"), ast.Constant) and bias.value is False:
        found["bias"] = ast.Constant(None)
    if kind == "Conv1d" and "dilation" not in given and len(made.args) <= _BEFORE_DILATION:
        found["dilation[0]"] = ast.Constant(1)
    return found


class _Known(ast.NodeTransformer):
    def __init__(self, known: dict[str, ast.expr]) -> None:
        self.known = known

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self._value(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self._value(node)

    def _value(self, node: ast.Attribute | ast.Subscript) -> ast.expr:
        if (
            isinstance(node.ctx, ast.Load)
            and (value := self.known.get(ast.unparse(node))) is not None
        ):
            return deepcopy(value)
        self.generic_visit(node)
        return node
