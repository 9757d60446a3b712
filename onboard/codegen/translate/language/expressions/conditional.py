"""Conditional expressions."""

from __future__ import annotations

import ast

from torch import nn

from onboard.codegen.translate.language.expressions.decisions import (
    absent_here,
    decided_by_part,
    decided_here,
)
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.handed.listed import one_of
from onboard.codegen.translate.language.object_values import (
    Choice,
    Closure,
    Global,
    Instance,
    LayerMask,
    ModuleList,
)
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Known, Mask, PaddingMask, Value


def conditional(node: ast.IfExp, frame: Frame) -> Value:
    """Return `body if test else orelse`; in code of repositories this config's side of a static test,
    where only one has a translation or makes modules.
    """
    test = attributes.asked(frame.evaluate(node.test), frame)
    decided = test.truth()
    if decided is not None:
        return frame.evaluate(node.body if decided else node.orelse)
    if frame.kind == "forward" and frame.translator.specialised:
        decided = decided_here(test, frame)
        if decided is not None:
            return frame.evaluate(node.body if decided else node.orelse)
    emitted = len(frame.out)
    try:
        body, orelse = frame.evaluate(node.body), frame.evaluate(node.orelse)
    except Untranslatable:
        chosen = decided_here(test, frame) if frame.translator.specialised else None
        if chosen is None:
            raise
        del frame.out[emitted:]
        return frame.evaluate(node.body if chosen else node.orelse)
    if body.equals(orelse):
        return body
    if orelse.equals(NONE) and absent_here(test, body, frame):
        return NONE
    if (mask := joined_masks(body, orelse)) is not None:
        return mask
    if test.is_static and (is_rotary(body) or is_rotary(orelse)):
        return _with_or_without(node, test, body, orelse, frame)
    chosen = _side(test, frame) if _is_choice(body, orelse, frame) else None
    if chosen is not None:
        if len(frame.out) > emitted:  # what the other side needs, too
            del frame.out[emitted:]
            return frame.evaluate(node.body if chosen else node.orelse)
        return body if chosen else orelse
    if isinstance(body, ByName) and body.is_like(orelse):
        return one_of([body, orelse], test, lambda codes: ast.IfExp(test.code(), *codes))
    if (perhaps := _object_or_none(test, body, orelse)) is not None:
        return perhaps
    expr = ast.IfExp(test.code(), body.code(), orelse.code())
    match body, orelse:
        case Instance(made=first), Instance(made=second):
            return Instance(first + second, expr, body.optional or orelse.optional)
        case Global() | Choice(), Global() | Choice() if test.is_static:
            return Choice(test.code(), body, orelse)
        case (Instance(made=made), Known(value=None)) | (Known(value=None), Instance(made=made)):
            return Instance(made, expr, optional=True)
        case (Code(transposed=True), _) | (_, Code(transposed=True)):
            return Code(expr)
    optional = any(each.may_be_none for each in (body, orelse))
    forms = {side.form for side in (body, orelse) if isinstance(side, Code)}
    form = sequence_of_all((body, orelse))
    if form is None and optional and len(forms) == 1:
        form = forms.pop()
    return Code(
        expr, test.is_static and body.is_static and orelse.is_static, optional=optional, form=form
    )


def _object_or_none(test: Value, body: Value, orelse: Value) -> Value | None:
    """Return an object each of whose fields is None where it is; None for other sides."""

    def change(part: Code) -> Value:
        sides = (NONE, part) if body.equals(NONE) else (part, NONE)
        expr = ast.IfExp(test.code(), *(side.code() for side in sides))
        return Code(expr, test.is_static and part.static, optional=True)

    whole, other = (orelse, body) if body.equals(NONE) else (body, orelse)
    return whole.perhaps(change) if isinstance(whole, Output) and other.equals(NONE) else None


def _side(test: Value, frame: Frame) -> bool | None:
    """Return what this config makes of a test, perhaps by a part of it alone: the rest may ask for the
    machine.
    """
    chosen = decided_here(test, frame)
    return decided_by_part(test, frame) if chosen is None else chosen


def _is_choice(body: Value, orelse: Value, frame: Frame) -> bool:
    """Whether code of a repository has one or the other of two modules, functions or lists, or any
    code a module with or without a norm.
    """
    if not frame.translator.specialised:
        modules = isinstance(body, Instance) and isinstance(orelse, Instance)
        return modules and is_identity(body) != is_identity(orelse)
    sides = (body, orelse)
    modules = any(isinstance(side, Instance) for side in sides)
    return modules or all(map(_is_called, sides)) or any(isinstance(i, ModuleList) for i in sides)


def _is_called(value: Value) -> bool:
    """Whether a value is nothing, or there to be called: a function, a class, a module."""
    return isinstance(value, Global | Choice | Closure | Instance) or value.equals(NONE)


def joined_masks(*values: Value) -> Mask | None:
    """Return what is one of several masks, or of a mask and None; None: they are something else."""
    masks = [value for value in values if isinstance(value, Mask)]
    others = [value for value in values if not isinstance(value, Mask)]
    if not masks or not all(value.equals(NONE) for value in others):
        return None
    padding = not others or any(isinstance(mask, PaddingMask) for mask in masks)
    return PaddingMask() if padding else LayerMask(whole=all(mask.whole for mask in masks))


def is_identity(value: Value) -> bool:
    """Whether a value is a module that does nothing."""
    return isinstance(value, Instance) and all(
        issubclass(cls, nn.Identity) for cls in value.classes
    )


def is_rotary(value: Value) -> bool:
    """Whether a value is a module that makes RoPE's tables."""
    return isinstance(value, Instance) and all(
        hasattr(cls, "compute_default_rope_parameters") for cls in value.classes
    )


def _with_or_without(
    node: ast.IfExp, test: Value, body: Value, orelse: Value, frame: Frame
) -> Value:
    """Take this config's side: with and without RoPE are two models."""
    chosen = frame.translator.decide(node.test, test, frame)
    expr = test.code()
    frame.translator.guard(expr if chosen else ast.UnaryOp(ast.Not(), expr), frame)
    return body if chosen else orelse
