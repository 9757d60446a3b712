"""What a class has from PyTorch's and other bases: those that the generated class does not have are
written into it.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from torch import nn

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.forms import POSITIONS, ROWS
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.argument_facts import bind, receiver
from onboard.codegen.translate.language.program.base_parameters import method_of
from onboard.codegen.translate.language.program.closures import run_inside
from onboard.codegen.translate.language.program.inline import defaults
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.statements.loops.turns import RAISES
from onboard.codegen.translate.language.trees.skips import without_returns
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import NONE, Code, Known, Mapping, Value


def call_super(
    translator: Program, attr: str, args: Args, frame: Frame, base: type | None = None
) -> Value:
    """Return `super().attr(...)`, or `Base.attr(self, ...)` of a base that is named; the bases that
    the generated class does not have are written into it.
    """
    assert frame.cls is not None
    mro = frame.cls.cls.__mro__
    rest = mro[mro.index(frame.owner) + 1 :] if frame.owner in mro else mro
    base = next(cls for cls in (base.__mro__ if base else rest) if attr in vars(cls))
    if attr != "__init__":
        return _method_of_base(translator, base, attr, args, frame)
    if translator.translates(base) and base.__module__ not in (
        "transformers.modeling_utils",
        "transformers.modeling_layers",
    ):
        found = find_method(base, "__init__")
        assert found is not None
        execute_inside(translator, *found, args, frame)
        return NONE
    arguments = (
        args if base.__module__.startswith("torch.") and base is not nn.Module else Args([], {}, [])
    )
    if translator.specialised:  # who builds a model says where it is, and in which dtype
        arguments = arguments.anywhere()
    frame.emit(ast.Expr(plain_call(attribute(call(name("super")), "__init__"), arguments).expr))
    configs = [value for value in args.positional if isinstance(value, Config)]
    if configs and base.__module__ == "transformers.modeling_utils":
        frame.emit(
            ast.Assign([ast.Attribute(name("self"), "config", ast.Store())], configs[0].expr)
        )
        frame.env.values["self.config"] = configs[0]
    return NONE


def _method_of_base(translator: Program, base: type, attr: str, args: Args, frame: Frame) -> Value:
    """Return what a base's method gives: of repositories' classes it is written where it is called,
    of PyTorch's it stays a call.
    """
    found = method_of(base, attr, translator.specialised)
    if found is None or not (translator.specialised and translator.has_method(base, attr)):
        assert frame.cls is not None
        called = plain_call(attribute(call(name("super")), attr), args)
        return looked_up(called, args) if issubclass(frame.cls.cls, nn.Embedding) else called
    owner, node = found
    source, inside = module_source(owner.__module__), replace(frame, owner=owner)
    return run_inside(node, source, args, inside, receiver(node), method=True)


def execute_inside(
    translator: Program, owner: type, node: ast.FunctionDef, args: Args, frame: Frame
) -> Value:
    """Write what a method does into the `__init__` that calls it; return what it returns at its
    end.
    """
    bound, rest = bind(node, args, method=True)
    inner = Frame(
        translator, module_source(owner.__module__), "init", frame.cls, owner, out=frame.out
    )
    inner.env = Env(
        {key: value for key, value in frame.env.values.items() if key.startswith("self.")}
    )
    inner.env.values |= receiver(node)
    inner.env.values.update(defaults(node, inner) | bound | rest)
    if node.args.kwarg is not None:
        inner.env.values[node.args.kwarg.arg] = Mapping(rest)
    body = without_returns(node.body)
    returned = body[-1].value if body and isinstance(body[-1], ast.Return) else None
    refuse_raise(execute(body if returned is None else body[:-1], inner), frame)
    value = NONE if returned is None else inner.evaluate(returned)
    frame.env.values.update(
        {key: value for key, value in inner.env.values.items() if key.startswith("self.")}
    )
    return value


def refuse_raise(ending: str, frame: Frame) -> None:
    """Raise `Untranslatable` where a constructor of repositories' code raises with what is known of
    this config: the model is not made so.
    """
    if ending == RAISES and frame.translator.specialised:
        assert frame.cls is not None
        raise Untranslatable(f"the constructor of {frame.cls.cls.__name__}, which raises")


def looked_up(called: Code, args: Args) -> Code:
    """Return what an embedding gives, known as rows of a table of positions where it is that."""
    match args.positional:
        case [Code(form=str() as form)] if form == POSITIONS:
            return replace(called, form=ROWS)
    return called


def _as_buffer(item: Value) -> Value:
    """Return what a parameter is made of: it is no parameter as a buffer."""
    match item:
        case Code(expr=ast.Call(func=function, args=[tensor])) if ast.unparse(function) in (
            "nn.Parameter",
            "torch.nn.Parameter",
        ):
            return replace(item, expr=tensor)
    return item


def register_buffer(args: Args, frame: Frame) -> Value:
    """Write `self.register_buffer(...)`, whose buffer is an attribute from then on."""
    key = args.positional[0]
    if not (isinstance(key, Known) and isinstance(key.value, str)):
        raise Untranslatable("a buffer with a computed name")
    translator = frame.translator
    if translator.specialised:
        args = replace(args, positional=[_as_buffer(item) for item in args.positional])
    frame.emit(ast.Expr(plain_call(attribute(name("self"), "register_buffer"), args).expr))
    nothing = len(args.positional) > 1 and args.positional[1].equals(NONE)
    made = NONE if nothing and translator.specialised else Code(attribute(name("self"), key.value))
    frame.env.values[f"self.{key.value}"] = made
    return NONE
