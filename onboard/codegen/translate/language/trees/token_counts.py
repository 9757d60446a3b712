"""How many tokens a tensor has, told from how it was made: queries and keys of a text are as many."""

from __future__ import annotations

import ast
from collections.abc import Sequence

_RANK = 4
_ROPES = "torch.ops.onboard.torch_rope"


def as_many(one: ast.expr, other: ast.expr, before: Sequence[ast.stmt]) -> bool:
    """Whether two sizes of tensors [batch, heads, sequence, dim], or [batch, sequence, heads, dim],
    are one number, by the statements that lead there.
    """
    sizes = [_resolved(expr, before) for expr in (one, other)]
    first, second = sizes
    return first is not None and second is not None and ast.dump(first) == ast.dump(second)


def _resolved(expr: ast.expr, before: Sequence[ast.stmt]) -> ast.expr | None:
    match expr:
        case ast.Name(id=variable):
            place, value = _assigned(variable, before)
            if isinstance(value, ast.Subscript | ast.Call) and isinstance(place, int):
                return _resolved(value, before[:place])
            return expr
        case ast.Subscript(value=ast.Attribute(value=tensor, attr="shape"), slice=index):
            number = _number(index)
        case ast.Call(func=ast.Attribute(value=tensor, attr="size"), args=[index]):
            number = _number(index)
        case _:
            return None
    return None if number is None else _size(tensor, number % _RANK, before)


def _size(tensor: ast.expr, dim: int, before: Sequence[ast.stmt]) -> ast.expr | None:
    """Return the size of a dimension of a tensor; None where that is not told."""
    match tensor:
        case ast.Name(id=variable):
            place, value = _assigned(variable, before)
            return None if value is None or place is None else _size(value, dim, before[:place])
        case ast.Call(func=ast.Attribute(value=inner, attr="transpose"), args=[one, other]):
            swapped = {_number(one): _number(other), _number(other): _number(one)}
            return _size(inner, swapped.get(dim, dim) or 0, before)
        case ast.Call(
            func=ast.Attribute(value=inner, attr="repeat_interleave"),
            keywords=[ast.keyword(arg="dim", value=ast.Constant(value=along))],
        ) if along != dim:
            return _size(inner, dim, before)
        case ast.Call(func=ast.Attribute(attr="view" | "reshape"), args=sizes) if (
            len(sizes) == _RANK
        ):
            return sizes[dim]
    return None


def _assigned(variable: str, before: Sequence[ast.stmt]) -> tuple[int | None, ast.expr | None]:
    """Return where a variable was assigned last, and to what: rotated queries and keys are of the
    sizes that they had.
    """
    for place in reversed(range(len(before))):
        match before[place]:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == variable:
                return place, value
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                names = [item.id if isinstance(item, ast.Name) else "" for item in targets]
                if variable not in names:
                    continue
                rotated = isinstance(value, ast.Call) and ast.unparse(value.func).startswith(_ROPES)
                given = value.args[names.index(variable)] if rotated else None  # type: ignore[attr-defined]
                return place, given
            case statement if any(
                isinstance(node, ast.Name)
                and node.id == variable
                and isinstance(node.ctx, ast.Store)
                for node in ast.walk(statement)
            ):
                return place, None
    return None, None


def _number(index: ast.expr) -> int | None:
    match index:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    return None
