"""Several mechanisms as one: the first that answers has answered."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism, Program, Sides
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.values import Value

T = TypeVar("T")


def _first(answers: Iterable[T | None]) -> T | None:
    return next((answer for answer in answers if answer is not None), None)


class Mechanisms(Mechanism):
    """Asks each in its turn."""

    def __init__(self, each: Sequence[Mechanism]) -> None:
        self.each = each

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """Return `op operand`."""
        return _first(item.unary(op, operand) for item in self.each)

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Return `left op right`."""
        return _first(item.binary(op, left, right, frame) for item in self.each)

    def compare(self, op: ast.cmpop, left: Value, right: Value) -> Value | None:
        """Return `left op right`."""
        return _first(item.compare(op, left, right) for item in self.each)

    def subscript(self, owner: Value, index: ast.expr, frame: Frame) -> Value | None:
        """Return `owner[index]`, whose index is not evaluated yet."""
        return _first(item.subscript(owner, index, frame) for item in self.each)

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Return `owner[index]`."""
        return _first(item.item(owner, index, node, frame) for item in self.each)

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """Return `owner.attr`."""
        return _first(item.attribute(owner, attr, frame) for item in self.each)

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """Return an attribute that the `__init__` of a class sets."""
        return _first(item.own_attribute(cls, attr, path, frame) for item in self.each)

    def name(self, obj: object, frame: Frame) -> Value | None:
        """Return what a global name means."""
        return _first(item.name(obj, frame) for item in self.each)

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Return `function(*args)`."""
        return _first(item.call(function, expr, args, frame) for item in self.each)

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Return `callee(*args)`."""
        return _first(item.call_value(callee, args, frame) for item in self.each)

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Return `owner.attr(*args)`."""
        return _first(item.call_method(owner, attr, args, frame) for item in self.each)

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Return `self.attr(*args)`."""
        return _first(item.call_own_method(attr, args, frame) for item in self.each)

    def given(self, result: Value, module: Instance) -> Value | None:
        """Return the result of a translated module as its caller sees it."""
        return _first(item.given(result, module) for item in self.each)

    def returned(self, value: Value) -> Value | None:
        """Return what a function gives that returns `value`."""
        return _first(item.returned(value) for item in self.each)

    def stored(self, value: Value) -> Value | None:
        """Return what a variable holds to which `value` is assigned."""
        return _first(item.stored(value) for item in self.each)

    def set_attribute(self, attr: str, value: Value, frame: Frame) -> Value | None:
        """Return what `__init__` assigns to `self.attr`."""
        return _first(item.set_attribute(attr, value, frame) for item in self.each)

    def joined(self, sides: Sides) -> Value | None:
        """Return what a variable holds behind a branch."""
        return _first(item.joined(sides) for item in self.each)

    def loop(self, node: ast.For, frame: Frame) -> Literal[True] | None:
        """Write a loop in another way."""
        return _first(item.loop(node, frame) for item in self.each)

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """Write the first of some statements in another way."""
        return _first(item.instead(statements, frame) for item in self.each)

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """Return which side of a branch is taken."""
        return _first(item.decided(node, frame) for item in self.each)

    def rest(self, statement: ast.stmt, after: Sequence[ast.stmt], frame: Frame) -> ast.stmt | None:
        """Return what stands for the statements after an executed one."""
        return _first(item.rest(statement, after, frame) for item in self.each)

    def forward(self, cls: ClassState, node: ast.FunctionDef, frame: Frame) -> Routine | None:
        """Return the forward of a class that is not translated."""
        return _first(item.forward(cls, node, frame) for item in self.each)

    def init_body(
        self, cls: ClassState, body: list[ast.stmt], program: Program
    ) -> list[ast.stmt] | None:
        """Return what is written for the statements of a class's `__init__`."""
        return _first(item.init_body(cls, body, program) for item in self.each)

    def finish(self, program: Program) -> None:
        """Have each add what it takes for granted."""
        for item in self.each:
            item.finish(program)
