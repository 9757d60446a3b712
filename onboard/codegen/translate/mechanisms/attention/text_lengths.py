"""Numbers that a forward computes of the text's length, as dynamic NTK does: `max(f(length), 1)`.

With a cache there are texts of several lengths at a time, and keys that were turned when a text was
shorter; so there is no such number. Up to a length that the config says it is the constant, though,
and longer texts are refused.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import WrittenOut, local_values
from onboard.codegen.translate.language.expressions.evaluate import binary
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import (
    TOO_LONG,
    Untranslatable,
    name,
    same_code,
)
from onboard.codegen.translate.language.values import NONE, Code, Known, Value

_OF_LENGTHS = (math.log, math.log2, math.ceil, math.floor)
_NUMBERS = (*_OF_LENGTHS, int, float, round)
_OF_NUMBERS = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
"""Operators whose result is no number of rows."""
_LONGEST = 1 << 20
"""Lengths up to which a number is tried."""


@dataclass(frozen=True, eq=False)
class OfLength(Code):
    """A number that is computed of the text's length."""

    unread: ClassVar[str] = (
        "a number that depends on the text's length, as dynamic NTK has it: a cache holds "
        "texts of several lengths"
    )


@dataclass(frozen=True, eq=False)
class AtLeast(Code):
    """`max(length, least)`: how many rows a table has, or what frequencies are computed of.

    As a number of rows it is what is written, for texts of any length. Where more is computed of
    it, it is `least`, and longer texts are refused.
    """

    least: Value = NONE
    typed: ClassVar[bool] = True

    def same_as(self, other: Any) -> bool:
        """Whether both are the same number."""
        return super().same_as(other) and bool(self.least.equals(other.least))

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same."""
        return isinstance(other, AtLeast) and self.least.equals(other.least)

    def settled(self, frame: Frame) -> Value:
        """Return `least`, and refuse texts for which it is another number."""
        _refuse_longer(self.length, self.least.code(), frame)
        return self.least

    @property
    def length(self) -> ast.expr:
        """What is no more than `least` where the larger of both is."""
        match self.expr:
            case ast.Call(func=ast.Name(id="max"), args=[length, _]):
                return length
        return self.expr


class TextLengths(Mechanism):
    """Arithmetic with such numbers, and what ends it."""

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Another such number."""
        sides = (left, right)
        if isinstance(left, AtLeast) and right.is_static and isinstance(op, _OF_NUMBERS):
            return binary(op, left.settled(frame), right, frame)
        if not any(isinstance(side, OfLength) for side in sides):
            return None
        if not all(isinstance(side, OfLength) or side.is_static for side in sides):
            return None
        return OfLength(ast.BinOp(_bare(left), op, _bare(right)))

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Logarithms of a length, and the larger of such a number and a constant."""
        if not frame.translator.specialised or frame.kind != "forward" or args.keywords:
            return None
        given = args.positional
        if function is max:
            return _largest(expr, given, frame)
        begins = function in _OF_LENGTHS and not args.static()
        goes_on = function in _NUMBERS and any(isinstance(item, OfLength) for item in given)
        if not (begins or goes_on):
            return None
        return OfLength(ast.Call(expr, [_bare(item) for item in given], []))


def _bare(value: Value) -> ast.expr:
    return value.expr if isinstance(value, OfLength) else value.code()


def _largest(expr: ast.expr, given: list[Value], frame: Frame) -> Value | None:
    """Return the constant of `max(number, constant)` of a number that is computed of the text's
    length, and of the length itself a number that may have to be the constant.
    """
    match given:
        case [OfLength() as number, Known() as constant] | [
            Known() as constant,
            OfLength() as number,
        ]:
            formula = _Formula(number, frame)
            _refuse_longer(formula.length, formula.limit(constant.value), frame)
            return constant
        case [Code(static=False) as length, least] | [least, Code(static=False) as length] if (
            least.is_static and type(length) is Code and length.form is None
        ):
            return AtLeast(ast.Call(expr, [length.expr, least.code()], []), least=least)
    return None


def _refuse_longer(length: ast.expr, limit: ast.expr, frame: Frame) -> None:
    """Refuse texts of more tokens than a number that the config says."""
    test = ast.Compare(deepcopy(length), [ast.LtE()], [deepcopy(limit)])
    said = ast.Constant(f"{TOO_LONG}, which change what positions mean")
    if not _is_asserted(test, frame):
        frame.emit(ast.Assert(test, said))


def _is_asserted(test: ast.expr, frame: Frame) -> bool:
    """Whether the statements before this one assert it, of variables that are as they were then."""
    names = {item.id for item in ast.walk(test) if isinstance(item, ast.Name)}
    for statement in reversed(frame.out):
        if isinstance(statement, ast.Assert) and same_code(statement.test, test):
            return True
        stored = (item for item in ast.walk(statement) if isinstance(item, ast.Name))
        if any(item.id in names for item in stored if isinstance(item.ctx, ast.Store)):
            return False
    return False


class _Formula:
    """A number as a function of the text's length, for the modules of the small model."""

    def __init__(self, number: OfLength, frame: Frame) -> None:
        self.expr = _written_out(number.expr, frame)
        self.lengths, self.leaves = _parts(self.expr, frame)
        if not self.lengths or len({ast.dump(item) for item in self.lengths}) != 1:
            raise Untranslatable(OfLength.unread)
        self.length = self.lengths[0]
        assert frame.cls is not None
        module = frame.translator.modules_of(frame.cls.cls)[0]
        self.names = {**frame.source.namespace, "self": module, "config": frame.translator.config}

    def limit(self, constant: float) -> ast.expr:
        """Return what the config says up to which length the number is no more than a constant.

        Raises:
            Untranslatable: nothing in it does.
        """
        most = self._most(constant, self._function(None))
        for leaf in self.leaves:
            if eval(ast.unparse(leaf), self.names) != most:
                continue
            tried = self._function(leaf)
            if all(self._most(constant, partial(tried, other)) == other for other in (7, 2 * most)):
                return deepcopy(leaf)
        raise Untranslatable(OfLength.unread)

    def _most(self, constant: float, number: Callable[[int], float]) -> int:
        """Return the largest length up to which the number is no more."""
        for length in range(1, _LONGEST):
            if number(length) > constant:
                return length - 1
        raise Untranslatable(OfLength.unread)

    def _function(self, leaf: ast.expr | None) -> Callable[..., float]:
        """Return the number as a function of the length, and before that of a number in it."""
        body = _Replaced(self.length, "length").visit(deepcopy(self.expr))
        if leaf is not None:
            body = _Replaced(leaf, "leaf").visit(body)
        arguments = "length" if leaf is None else "leaf, length"
        made: Callable[..., float] = eval(f"lambda {arguments}: {ast.unparse(body)}", self.names)
        return made


def _written_out(expr: ast.expr, frame: Frame) -> ast.expr:
    """Return a number with the values of variables that are such numbers, too."""
    values = local_values(frame)
    own = {
        key: value
        for key, value in values.items()
        if isinstance(frame.env.values.get(key), OfLength)
    }
    return WrittenOut(own).visit(deepcopy(expr))  # type: ignore[no-any-return]


def _parts(expr: ast.expr, frame: Frame) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the parts of arithmetic that are known at run time, and those that the config says."""
    match expr:
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.UnaryOp(operand=operand):
            parts = [operand]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math")), args=parts):
            pass
        case ast.Call(func=ast.Name(id="int" | "float" | "round"), args=parts):
            pass
        case ast.Constant():
            return [], [expr]
        case _:
            static = frame.evaluate(expr).is_static
            return ([], [expr]) if static else ([expr], [])
    found = [_parts(part, frame) for part in parts]
    return [x for lengths, _ in found for x in lengths], [x for _, own in found for x in own]


class _Replaced(ast.NodeTransformer):
    """Writes a variable in the place of an expression."""

    def __init__(self, expr: ast.expr, variable: str) -> None:
        self.expr, self.variable = expr, variable

    def visit(self, node: ast.AST) -> Any:
        """Replace it, or look inside."""
        if isinstance(node, ast.expr) and same_code(node, self.expr):
            return name(self.variable)
        return self.generic_visit(node)
