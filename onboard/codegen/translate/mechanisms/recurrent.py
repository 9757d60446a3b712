"""The canonical ops of recurrent mixers: convolutions and scans that transformers writes as helper
functions.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection
from copy import deepcopy
from typing import Any

from onboard.analysis.recognise.mixers import call_forms
from onboard.analysis.recognise.scans.scan_modules import SETTING, module_forms
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import assigned
from onboard.codegen.translate.language.expressions.objects import attribute_of
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Config, Instance
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Value, untransposed
from onboard.ops.written_forms import CallForm

_ZEROS = ("torch.zeros", "torch.zeros_like")


def form_of(obj: Any, frame: Frame) -> CallForm | None:
    """Return how a helper function is called that the analysis found to be a canonical op of
    recurrent mixers.
    """
    found = frame.translator.findings.scans.get(obj.__name__) if inspect.isfunction(obj) else None
    return None if found is None else call_forms()[found.op][found.way]


def scan(function: Any, form: CallForm, args: Args) -> Value:
    """Return the canonical form of a call of a helper function that the analysis found to be
    `form`.

    Raises:
        Untranslatable: the call asks for something that the canonical op does not have.
    """
    return _written(function, form, bound(function, args))


def scan_module(cls: Any, args: Args, frame: Frame) -> Value:
    """Return the canonical form of a call of a module without weights; its setting is read from the
    config.
    """
    found = frame.translator.findings.scan_modules[cls.__name__]
    form = module_forms()[found.op]
    own = attribute_of(frame.cls, "config", name("self"), frame) if frame.cls is not None else NONE
    if not isinstance(own, Config):
        raise Untranslatable(f"a {cls.__name__} of a module that does not keep its config")
    setting = Code(attribute(own.expr, found.eps), static=True)
    values = bound(cls.forward, Args([NONE, *args.positional], args.keywords, args.stars))
    del values["self"]
    return _written(cls, form, {**values, SETTING: setting})


def _written(function: Any, form: CallForm, values: dict[str, Value]) -> Value:
    """Return the canonical form of a call whose arguments are known."""
    _check(function, form, values)
    if unsaid := form.parameters - values.keys():
        raise Untranslatable(f"{function.__name__} without its argument {min(unsaid)}")
    code = {key: argument(values[key], key in form.turned) for key in form.parameters}
    called = _Simplify().visit(substituted(form.expression, code))
    out = Code(called, transposed=bool(form.turned))
    return Items((out, NONE)) if form.with_state else out


def bound(function: Any, args: Args) -> dict[str, Value]:
    """Return the arguments of a call by the function's parameters, with its defaults."""
    signature = inspect.signature(function)
    if args.stars:
        raise Untranslatable(f"a call of {function.__name__} with *args")
    values: dict[str, Value] = {
        key: Known(item.default)
        for key, item in signature.parameters.items()
        if item.default is not item.empty
    }
    names = [
        key for key, item in signature.parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD
    ]
    # `**kwargs` are for kernels
    known = [*names, *(key for key, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY)]
    keywords = {key: value for key, value in args.keywords.items() if key in known}
    return values | dict(zip(names, args.positional, strict=False)) | keywords


def without_zeros(given: dict[str, Value], states: Collection[str], frame: Frame) -> Args:
    """Return arguments, by name, with None for those of `states` that are tensors of zeros, and
    nothing else before: a text begins with them.
    """
    made = assigned(frame)
    empty = {
        key: NONE
        for key, value in given.items()
        if key in states and isinstance(value, Code) and _is_zeros(value.expr, made)
    }
    return Args([], given | empty, [])


def _is_zeros(expr: ast.expr, made: dict[str, list[ast.expr | None]]) -> bool:
    match expr:
        case ast.Name(id=variable):
            values = made.get(variable, [])
            return len(values) == 1 and values[0] is not None and _is_zeros(values[0], made)
        case ast.Call(func=ast.Attribute(value=inner, attr="float" | "to" | "contiguous")):
            return _is_zeros(inner, made)
        case ast.Call(func=function):
            return ast.unparse(function) in _ZEROS or ast.unparse(function).endswith(".new_zeros")
    return False


def _check(function: Any, form: CallForm, values: dict[str, Value]) -> None:
    for key, value in values.items():
        if key in form.parameters or key in form.ignored:
            continue
        if not value.equals(Known(form.fixed.get(key))):
            raise Untranslatable(f"{function.__name__} with its argument {key}")


def argument(value: Value, turned: bool) -> ast.expr:
    """Return an argument; a turned one has its sequence before its channels in the canonical op."""
    if not turned or value.equals(NONE):
        return value.code()
    if isinstance(value, Code) and value.transposed:
        return untransposed(value).expr
    return Code(value.code(), transposed=True).code()


def substituted(expression: str, code: dict[str, ast.expr]) -> ast.expr:
    """Return an expression with code in the place of its variables."""
    found: ast.expr = _Substitute(code).visit(ast.parse(expression, mode="eval").body)
    return found


class _Substitute(ast.NodeTransformer):
    def __init__(self, code: dict[str, ast.expr]) -> None:
        self.code = code

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self.code[node.id]) if node.id in self.code else node


class _Simplify(ast.NodeTransformer):
    """`x.squeeze(1).unsqueeze(1)` is x; first and last sizes are the same without dimension 1."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=inner, attr="unsqueeze"), args=[ast.Constant(value=1)]
            ):
                return _squeezed(inner) or node
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(value=ast.Attribute(value=inner, attr="shape")) if (
                owner := _squeezed(inner)
            ) is not None:
                return ast.Subscript(
                    ast.Attribute(owner, "shape", ast.Load()), node.slice, ast.Load()
                )
        return node


def _squeezed(node: ast.expr) -> ast.expr | None:
    """Return x of `x.squeeze(1)`."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=inner, attr="squeeze"), args=[ast.Constant(value=1)]
        ):
            return inner
    return None


class RecurrentMixers(Mechanism):
    """Convolutions and scans."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Functions that the analysis found to be canonical ops."""
        form = form_of(function, frame)
        if form is None:
            return None
        return scan(function, form, without_zeros(bound(function, args), form.empty, frame))

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Modules that are."""
        match callee:
            case Instance(classes=(cls,)) if cls.__name__ in frame.translator.findings.scan_modules:
                return scan_module(cls, args, frame)
        return None
