"""A class of values and a mechanism of one's own: neither asks for a change of the language."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.in_order import Mechanisms
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.trees.syntax import attribute, call, name
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.output.printer import print_block

TOY = """
import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, flag):
        y = self.twice(-x)
        if flag is None:
            y = x
        return -y, -(-x)

    def twice(self, negated):
        return negated * 2
"""


@dataclass(frozen=True, eq=False)
class Negated(Code):
    """`-expr`, which another minus undoes; functions are given `expr` and know the rest."""

    typed = True

    def code(self) -> ast.expr:
        return call(attribute(self.expr, "neg"))


class Signs(Mechanism):
    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        if not isinstance(op, ast.USub) or not isinstance(operand, Code) or operand.static:
            return None
        return Code(operand.expr) if isinstance(operand, Negated) else Negated(operand.code())

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        if not isinstance(op, ast.Mult) or not isinstance(left, Negated):
            return None
        return Negated(ast.BinOp(left.expr, op, right.code()))


class Deaf(Mechanism):
    """Knows nothing, and must not be in the way."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        return None


def translated(folder: Path, mechanism: Mechanism) -> dict[str, str]:
    path = folder / "toy_signs.py"
    path.write_text(TOY, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("toy_signs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_signs"] = module
    spec.loader.exec_module(module)
    model: Any = module.Toy(None)
    model.config = SimpleNamespace(attribute_map={})
    translator = Translator(model, mechanisms=mechanism)
    (state,) = translator.reached(
        translator.construct(module.Toy, Args([Config(name("config"), model.config)], {}, []))
    )
    translator._method(
        state, "forward", Args([], {"x": Code(name("x")), "flag": Code(name("flag"), True)}, [])
    )
    return {key: print_block(routine.body) for key, routine in state.methods.items()}


def test_a_value_class_of_ones_own_is_joined_passed_and_returned(tmp_path: Path) -> None:
    methods = translated(tmp_path, Mechanisms((Deaf(), Signs())))
    assert methods["twice"] == "return (negated * 2).neg()", (
        "the function knows that it is given what is negated"
    )
    assert methods["forward"].splitlines()[0] == "y = self.twice(x)", (
        "and is given what it is the negation of"
    )
    assert methods["forward"].splitlines()[-1] == "return y.neg(), x", "two signs are none"


def test_without_mechanisms_code_is_plain_python(tmp_path: Path) -> None:
    methods = translated(tmp_path, Mechanism())
    assert methods["twice"] == "return negated * 2"
    assert methods["forward"].splitlines()[0] == "y = self.twice(-x)"
    assert methods["forward"].splitlines()[-1] == "return -y, --x"
