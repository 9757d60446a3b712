"""New shapes as short as they can be said: by what becomes of the last dimensions, not size by
size.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

_RESHAPES = ("view", "reshape")
_REST = "-1"


def with_short_shapes(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements that say of new shapes what changes in them; `body` stays as it is.

    `x.reshape(x.shape[0], x.shape[1], -1)` is `x.flatten(2)`, `x.view(x.shape[:-1] + (n, d))` is
    `x.unflatten(-1, (n, d))`. Where a tensor had other dimensions than the shape needs, either
    raises.
    """
    short = [
        _Short().visit(statement) for statement in _without_squeezed(_with_shapes_in_place(body))
    ]
    return _without_flattened(short)


def _without_flattened(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements without a new shape of the last dimensions, if these are flattened where it
    is read: `x = x.reshape(*x.shape[:2], n, d); y = f(x.flatten(2))`.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(body):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=variable)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr=attr),
                    args=[ast.Starred(value=leading), *_],
                ),
            ) if owner == variable and attr in _RESHAPES:
                kept = _kept(leading, variable)
                if kept is not None and _is_flattened(variable, kept, body[index + 1 :]):
                    continue
        out.append(statement)
    return out


def _is_flattened(variable: str, kept: int, after: Sequence[ast.stmt]) -> bool:
    """Whether all that is done with a variable is `x.flatten(kept)`, until it is another value."""
    for statement in after:
        reads = _mentions(variable, [statement])
        if reads:
            flat = sum(
                isinstance(node, ast.expr) and ast.unparse(node) == f"{variable}.flatten({kept})"
                for node in ast.walk(statement)
            )
            written = variable in _written(statement) and isinstance(statement, ast.Assign)
            return flat > 0 and written and reads == flat + 1
    return False


def _without_squeezed(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements without a dimension of size one that is taken away where it is read: `x =
    x.view(b, s, 1, d); y = f(x.squeeze(2))`.
    """
    out = list(body)
    for index, statement in enumerate(body):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=variable)],
                value=ast.Call(func=ast.Attribute(attr="view"), args=sizes) as view,
            ) if [ast.unparse(size) for size in sizes].count("1") == 1:
                dim = [ast.unparse(size) for size in sizes].index("1")
                squeezed = _Squeezed(variable, dim)
                after = [squeezed.visit(deepcopy(item)) for item in out[index + 1 :]]
                if squeezed.count == _mentions(variable, after) == 1:
                    new = deepcopy(statement)
                    new.value = ast.Call(view.func, sizes[:dim] + sizes[dim + 1 :], [])
                    out[index:] = [new, *after]
    return out


def _mentions(variable: str, body: Sequence[ast.stmt]) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == variable
        for item in body
        for node in ast.walk(item)
    )


class _Squeezed(ast.NodeTransformer):
    """Take `x.squeeze(dim)` for x, and count how often."""

    def __init__(self, variable: str, dim: int) -> None:
        self.text, self.count = f"{variable}.squeeze({dim})", 0

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node) != self.text:
            return node
        self.count += 1
        assert isinstance(node.func, ast.Attribute)
        return node.func.value


def _with_shapes_in_place(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements with shapes written where they are used, if once and there alone: `s =
    x.shape[:-1] + (n, d); ...; x = x.view(s)`.
    """
    out = [deepcopy(statement) for statement in body]
    for index in reversed(range(len(out))):
        match out[index]:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.expr() as shape):
                used = _use_of(variable, shape, out[index + 1 :])
                if used is not None:
                    _put(used, variable, shape)
                    del out[index]
    return out


def _use_of(variable: str, shape: ast.expr, after: Sequence[ast.stmt]) -> ast.Call | None:
    """Return the only call that reads a shape, of the tensor whose shape it begins with; None where
    that is another tensor by then.
    """
    nodes = [node for statement in after for node in ast.walk(statement)]
    reads = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    if len(reads) != 1:
        return None
    names = {node.id for node in ast.walk(shape) if isinstance(node, ast.Name)} | {variable}
    for statement in after:
        if isinstance(statement, ast.Assign | ast.Return):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and _takes(node, variable):
                    _put(trial := deepcopy(node), variable, shape)
                    return node if _short(trial) is not None else None
        if names & _written(statement) or isinstance(statement, ast.For | ast.While | ast.If):
            return None
    return None


def _takes(node: ast.Call, variable: str) -> bool:
    """Whether a call is `x.view(variable)` or `x.view(*variable)`."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPES):
        return False
    match node.args:
        case [ast.Name(id=key) | ast.Starred(value=ast.Name(id=key))]:
            return key == variable
    return False


def _put(node: ast.Call, variable: str, shape: ast.expr) -> None:
    assert _takes(node, variable)
    node.args = [shape]


def _written(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


@dataclass
class _Sizes:
    """A new shape: what it keeps of the old one (`kept` dimensions from the front; negative: all but
    so many), and the sizes that follow.
    """

    kept: int
    new: list[ast.expr]


class _Short(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return _short(node) or node


def _short(node: ast.Call) -> ast.expr | None:
    """Return a shorter form of `x.view(...)`; None where there is none."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=variable) as tensor, attr=attr), keywords=[]
        ) if attr in _RESHAPES:
            sizes = _sizes(node.args, variable)
        case _:
            return None
    if sizes is None or sizes.kept in (0, 1) or not sizes.new:
        return None
    new = _with_rest(sizes.new)
    if len(new) == 1 and ast.unparse(new[0]) != "1" and sizes.kept != -1:
        return _method(tensor, "flatten", ast.Constant(sizes.kept))
    if sizes.kept == -1 and len(new) > 1:
        return _method(tensor, "unflatten", ast.Constant(-1), ast.Tuple(new, ast.Load()))
    if sizes.kept > 1:
        return _method(tensor, attr, ast.Starred(_leading(tensor, sizes.kept), ast.Load()), *new)
    return None


def _method(tensor: ast.expr, attr: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(tensor, attr, ast.Load()), list(args), [])


def _leading(tensor: ast.expr, count: int) -> ast.expr:
    shape = ast.Attribute(tensor, "shape", ast.Load())
    return ast.Subscript(shape, ast.Slice(None, ast.Constant(count), None), ast.Load())


def _with_rest(new: list[ast.expr]) -> list[ast.expr]:
    """Return sizes of which the last one, if it is computed from others, is what is left."""
    computed = isinstance(new[-1], ast.BinOp) and not any(
        ast.unparse(size) == _REST for size in new
    )
    return [*new[:-1], ast.UnaryOp(ast.USub(), ast.Constant(1))] if computed else new


def _sizes(args: Sequence[ast.expr], variable: str) -> _Sizes | None:
    """Return a shape in terms of the old one of `variable`; None where it begins with other
    sizes.
    """
    match args:
        case [ast.Tuple(elts=items)]:
            return _sizes(items, variable)
        case [ast.BinOp(left=left, op=ast.Add(), right=ast.Tuple(elts=rest))]:
            kept = _kept(left, variable)
            return None if kept is None else _Sizes(kept, rest)
        case [ast.Starred(value=leading), *rest]:
            kept = _kept(leading, variable)
            return None if kept is None else _Sizes(kept, list(rest))
    count = 0
    while count < len(args) and _is_size(args[count], variable, count):
        count += 1
    return _Sizes(count, list(args[count:]))


def _kept(shape: ast.expr, variable: str) -> int | None:
    """Return n of `x.shape[:n]`."""
    match shape:
        case ast.Subscript(value=whole, slice=ast.Slice(lower=None, upper=upper, step=None)) if (
            _is_shape(whole, variable) and upper is not None
        ):
            try:
                return int(ast.literal_eval(upper))
            except ValueError:
                return None
    return None


def _is_shape(node: ast.expr, variable: str) -> bool:
    return ast.unparse(node) in (f"{variable}.shape", f"{variable}.size()")


def _is_size(node: ast.expr, variable: str, dim: int) -> bool:
    return ast.unparse(node) in (f"{variable}.shape[{dim}]", f"{variable}.size({dim})")
