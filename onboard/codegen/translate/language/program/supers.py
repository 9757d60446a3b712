"""What a class has from PyTorch's and other bases: those that the generated class does not have are
written into it.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from torch import nn

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import PLACES, Args, plain_call
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.forms import POSITIONS, ROWS
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.argument_facts import bind, receiver
from onboard.codegen.translate.language.program.inline import defaults
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, call, name
from onboard.codegen.translate.language.values import NONE, Code, Known, Mapping, Value


def call_super(translator: Program, attr: str, args: Args, frame: Frame) -> Value:
    """Return `super().attr(...)`; the bases that the generated class does not have are written into
    it.
    """
    assert frame.cls is not None
    if attr != "__init__":
        called = plain_call(attribute(call(name("super")), attr), args)
        return looked_up(called, args) if issubclass(frame.cls.cls, nn.Embedding) else called
    mro = frame.cls.cls.__mro__
    rest = mro[mro.index(frame.owner) + 1 :] if frame.owner in mro else mro
    base = next(cls for cls in rest if "__init__" in vars(cls))
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
        kept = {key: item for key, item in arguments.keywords.items() if key not in PLACES}
        arguments = replace(arguments, keywords=kept)
    frame.emit(ast.Expr(plain_call(attribute(call(name("super")), "__init__"), arguments).expr))
    configs = [value for value in args.positional if isinstance(value, Config)]
    if configs and base.__module__ == "transformers.modeling_utils":
        frame.emit(
            ast.Assign([ast.Attribute(name("self"), "config", ast.Store())], configs[0].expr)
        )
        frame.env.values["self.config"] = configs[0]
    return NONE


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
    last = node.body[-1]
    returned = last.value if isinstance(last, ast.Return) else None
    execute(node.body if returned is None else node.body[:-1], inner)
    value = NONE if returned is None else inner.evaluate(returned)
    frame.env.values.update(
        {key: value for key, value in inner.env.values.items() if key.startswith("self.")}
    )
    return value


def looked_up(called: Code, args: Args) -> Code:
    """Return what an embedding gives, known as rows of a table of positions where it is that."""
    match args.positional:
        case [Code(form=str() as form)] if form == POSITIONS:
            return replace(called, form=ROWS)
    return called


def register_buffer(args: Args, frame: Frame) -> Value:
    """Write `self.register_buffer(...)`, whose buffer is an attribute from then on."""
    key = args.positional[0]
    if not (isinstance(key, Known) and isinstance(key.value, str)):
        raise Untranslatable("a buffer with a computed name")
    translator = frame.translator
    frame.emit(ast.Expr(plain_call(attribute(name("self"), "register_buffer"), args).expr))
    nothing = len(args.positional) > 1 and args.positional[1].equals(NONE)
    made = NONE if nothing and translator.specialised else Code(attribute(name("self"), key.value))
    frame.env.values[f"self.{key.value}"] = made
    return NONE
