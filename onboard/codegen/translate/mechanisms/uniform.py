"""Vectors with one number for all texts of a batch, and what code does with the texts that have a
certain number.

`mask = numbers == n; y = x[mask]; out[mask] = f(y)` is `if number == n: out = f(x)` where all texts
have one number.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from onboard.codegen.translate.language.args import Args, is_static_call, plain_call
from onboard.codegen.translate.language.forms import ONES, UNIFORM
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code, Value


def chosen(statement: ast.stmt, after: Sequence[ast.stmt], frame: Frame) -> ast.If | None:
    """Return the statements after `mask = ...`, all about the texts in a mask of all or none, as
    what to do if all.
    """
    match statement:
        case ast.Assign(targets=[ast.Name(id=mask)]):
            known = frame.env.values.get(mask)
        case _:
            return None
    if not (isinstance(known, Code) and known.form == UNIFORM and after and _works_on(mask, after)):
        return None
    body = [_WithoutIndex(mask).visit(deepcopy(item)) for item in after]
    test = ast.copy_location(ast.Name(mask, ast.Load()), statement)
    return ast.copy_location(ast.If(test, body, []), statement)


def _works_on(mask: str, statements: Sequence[ast.stmt]) -> bool:
    """Whether statements assign variables first and then `out[mask]`, and read the mask as an index
    alone.
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == mask]
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    *before, last = statements
    match last:
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(), slice=ast.Name(id=index))]):
            plain = all(
                isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
                for item in before
            )
            return (
                plain
                and index == mask
                and all(any(use is index for index in indices) for use in uses)
            )
    return False


class _WithoutIndex(ast.NodeTransformer):
    def __init__(self, mask: str) -> None:
        self.mask = mask

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if not (isinstance(node.slice, ast.Name) and node.slice.id == self.mask):
            return node
        if isinstance(node.value, ast.Name):
            return ast.copy_location(ast.Name(node.value.id, node.ctx), node)
        return node.value


class UniformBatches(Mechanism):
    """Vectors with one number for all texts."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """`number * ones` is the number."""
        ones = isinstance(op, ast.Mult) and isinstance(right, Code) and right.form == ONES
        return Code(left.code(), static=True, form=UNIFORM) if ones and left.is_static else None

    def compare(self, op: ast.cmpop, left: Value, right: Value) -> Value | None:
        """Which texts have a number: all or none."""
        uniform = (
            isinstance(left, Code) and left.form == UNIFORM and left.static and right.is_static
        )
        return (
            Code(ast.Compare(left.code(), [op], [right.code()]), static=True, form=UNIFORM)
            if uniform
            else None
        )

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """A vector of ones."""
        if (
            function is torch.ones
            and len(args.positional) == 1
            and type(args.positional[0]) is Code
        ):
            return (
                None
                if is_static_call(function, args)
                else replace(plain_call(expr, args), form=ONES)
            )
        return None

    def rest(self, statement: ast.stmt, after: Sequence[ast.stmt], frame: Frame) -> ast.stmt | None:
        """What is done with the texts that have a number."""
        return chosen(statement, after, frame)
