"""What constructors say of values, dtypes and devices that a checkpoint and its runtime decide."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.casts import is_gpu
from onboard.hf.half_parameters import half_dtypes, is_half

_PLAIN = ("empty", "zeros", "ones")
_MADE = (*_PLAIN, "rand", "randn")
_ELEMENTWISE = (
    "log",
    "exp",
    "expm1",
    "sqrt",
    "abs",
    "neg",
    "clamp",
    "uniform_",
    "normal_",
    "fill_",
)
"""Operators that keep the shape, and give floating-point numbers of these."""
_FLOATING = ("log", "exp", "expm1", "sqrt")


def without_initial_values(init: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of an `__init__` whose parameters are made empty where their values are
    computed.
    """
    body = [deepcopy(statement) for statement in init]
    locals_ = _assigned_once(body)
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter" and node.args:
            made = _made(node.args[0], locals_)
            if made is not None and not _is_plain(node.args[0]):
                node.args[0] = made
    return body


def without_half_dtypes(init: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of an `__init__` whose parameters have the model's dtype."""
    body = [deepcopy(statement) for statement in init]
    for node in (node for statement in body for node in ast.walk(statement)):
        for call in half_dtypes(node):
            call.keywords = [item for item in call.keywords if not is_half(item)]
    return body


def without_gpus(init: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of an `__init__` that put nothing on a GPU by its name."""
    return [_WithoutGpus().visit(deepcopy(statement)) for statement in init]


class _WithoutGpus(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.keywords = [
            item for item in node.keywords if item.arg != "device" or not is_gpu(item.value)
        ]
        match node:
            case ast.Call(func=ast.Attribute(value=tensor, attr="to"), args=[first, *others]) if (
                is_gpu(first)
            ):
                node.args = others
                return node if others or node.keywords else tensor
            case ast.Call(func=ast.Attribute(value=tensor, attr="to"), args=[], keywords=[]):
                return tensor
        return node


def _assigned_once(body: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the values of the variables that are assigned once, at the top level."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    stored = [
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return {
        statement.targets[0].id: statement.value
        for statement in body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and stored.count(statement.targets[0].id) == 1
    }


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in [
        f"torch.{name}" for name in _PLAIN
    ]


def _made(node: ast.expr, known: Mapping[str, ast.expr], floating: bool = False) -> ast.expr | None:
    """Return `torch.empty(...)` of the shape and dtype of an expression; None where it does not say
    them plainly.

    `floating`: what is done with it gives floating-point numbers, of the default dtype where it has
        integers.
    """
    match node:
        case ast.Name(id=variable) if variable in known:
            return _made(known[variable], known, floating)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _made(operand, known, floating)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="arange")):
            return _counted(node) if floating else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made)) if made in _MADE:
            return _empty(node.args, node.keywords)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[first, *_]):
            return (
                _made(first, known, floating or attr in _FLOATING) if attr in _ELEMENTWISE else None
            )
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in _ELEMENTWISE:
            return _made(owner, known, floating or attr in _FLOATING)
    return None


def _counted(node: ast.Call) -> ast.expr | None:
    """Return `torch.empty(n)` for `torch.arange(n)` and `torch.arange(1, n + 1)`, in the dtype that
    it says.
    """
    match node.args:
        case [size] | [ast.Constant(value=0), size]:
            return _empty([size], node.keywords)
        case [
            ast.Constant(value=1),
            ast.BinOp(left=size, op=ast.Add(), right=ast.Constant(value=1)),
        ]:
            return _empty([size], node.keywords)
        case [
            ast.Constant(value=1),
            ast.BinOp(left=ast.Constant(value=1), op=ast.Add(), right=size),
        ]:
            return _empty([size], node.keywords)
    return None


def _empty(args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> ast.expr:
    function = ast.Attribute(ast.Name("torch", ast.Load()), "empty", ast.Load())
    return ast.Call(function, deepcopy(list(args)), deepcopy(list(keywords)))
