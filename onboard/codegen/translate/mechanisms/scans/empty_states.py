"""Tensors of zeros that a forward makes for its layers where it is given none: what is kept of
earlier tokens, of which a text has none at its beginning.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

import torch

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import stored_names
from onboard.codegen.translate.language.values import NONE

_UNCHANGED = ("contiguous", "float", "to")
"""Methods that leave zeros what they are."""


class EmptyStates(Mechanism):
    """`if state is None: state = [torch.zeros(...), ...]`, of a parameter that is None.

    It stays None, and layers take their way without: generated code keeps states in caches. That
    this computes the same is for the proof, where the model's own layers have the zeros.
    """

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """It is not taken."""
        match node:
            case ast.If(
                test=ast.Compare(
                    left=ast.Name(id=state), ops=[ast.Is()], comparators=[ast.Constant(value=None)]
                ),
                orelse=[],
            ) if frame.kind == "forward" and _is_none(state, frame):
                return False if _makes_zeros(node.body, state, frame) else None
        return None


def _is_none(variable: str, frame: Frame) -> bool:
    value = frame.env.values.get(frame.name_of(variable))
    return value is not None and value.equals(NONE)


def _makes_zeros(body: Sequence[ast.stmt], state: str, frame: Frame) -> bool:
    """Whether statements make a list of tensors of zeros, and leave it in a variable; others that
    they assign are sizes and zeros. A tensor alone may be a mask, or numbers of types.
    """
    zeros: set[str] = set()
    filled = False
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value) if variable != state:
                made = {variable} if _is_zeros(value, zeros, frame) else set()
                zeros = zeros - {variable} | made
            case ast.Assign(targets=[ast.Tuple(elts=targets)]) if all(
                isinstance(item, ast.Name) and item.id != state for item in targets
            ):
                zeros -= stored_names(targets)
            case ast.Assign(
                targets=[ast.Name()], value=ast.List(elts=items) | ast.Tuple(elts=items)
            ) if all(_is_zeros(item, zeros, frame) for item in items):
                filled = bool(items)
            case ast.Assign(targets=[ast.Name()], value=ast.ListComp(elt=item)) if _is_zeros(
                item, zeros, frame
            ):
                filled = True
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=variable), attr="append"), args=[value]
                )
            ) if variable == state and _is_zeros(value, zeros, frame):
                filled = True
            case _:
                return False
    return filled


def _is_zeros(value: ast.expr, zeros: Collection[str], frame: Frame) -> bool:
    """Whether an expression is a tensor of zeros; `zeros` are variables that are."""
    match value:
        case ast.Name(id=variable):
            return variable in zeros
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _UNCHANGED:
            return _is_zeros(inner, zeros, frame)
        case ast.Call(func=ast.Attribute(attr="new_zeros")):
            return True
        case ast.Call(func=function):
            made = frame.evaluate(function)
            return isinstance(made, Global) and made.obj in (torch.zeros, torch.zeros_like)
    return False
