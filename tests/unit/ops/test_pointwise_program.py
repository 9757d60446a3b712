"""Programs of elementwise operators: their text, what they mean, how they are simplified, and their
kernels.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from xdsl.dialects.builtin import f32, i1
from xdsl.ir import Attribute, Block

import onboard.experiments.elementwise.triton_pointwise
import onboard.ops  # noqa: F401
from onboard.errors import OnboardError
from onboard.experiments.elementwise import dialect
from onboard.experiments.elementwise.canonicalize import canonicalize, widen
from onboard.experiments.elementwise.kernel_source import kernel_source
from onboard.experiments.elementwise.program import make_program, parse_program, steps
from tests.unit.ops.test_triton_compiles import assert_compiled, kernels  # noqa: F401

ops = torch.ops.onboard

ROUND_TRIP = """func.func @pointwise(%0: bf16, %1: f32) -> (f32, i1) {
  %2 = ew.cast %0 : (bf16) -> f32
  %3 = ew.cast %2 : (f32) -> bf16
  %4 = ew.cast %3 : (bf16) -> f32
  %5 = ew.constant 3.000000e-01 : f32 : f32
  %6 = ew.constant 2.000000e+00 : f32 : f32
  %7 = ew.mul %5, %6 : (f32, f32) -> f32
  %8 = ew.constant 1.000000e+00 : f32 : f32
  %9 = ew.mul %1, %8 : (f32, f32) -> f32
  %10 = ew.neg %9 : (f32) -> f32
  %11 = ew.neg %10 : (f32) -> f32
  %12 = ew.add %4, %11 : (f32, f32) -> f32
  %13 = ew.add %4, %1 : (f32, f32) -> f32
  %14 = ew.mul %12, %13 : (f32, f32) -> f32
  %15 = ew.gt %14, %7 : (f32, f32) -> i1
  func.return %14, %15 : f32, i1
}"""


def every_operation(kind: Attribute) -> str:
    """Return a program that has each operation of the dialect on values of one type."""
    block = Block(arg_types=[kind, kind])
    results = []
    for name in dialect.OPERATIONS:
        for_floats = {"div", *dialect.UNARY, *dialect.ROWS} - {"abs", "neg", "relu"}
        if not dialect.is_float(kind) and name in for_floats:
            continue
        condition = dialect.operation("ne", list(block.args), i1)
        block.add_op(condition)
        truth = name in (*dialect.COMPARISONS, *dialect.LOGIC, "logical_not")
        operands = (
            [condition.results[0], *block.args] if name == "where" else block.args[: arity(name)]
        )
        step = dialect.operation(
            name, list(operands), i1 if truth else f32 if name == "cast" else kind
        )
        block.add_op(step)
        results.append(step.results[0])
    return str(make_program(block, results))


def arity(name: str) -> int:
    return 2 if name in dialect.BINARY else 1


def test_text_and_back() -> None:
    for kind in dialect.TYPES.values():
        text = every_operation(kind)
        assert str(parse_program(text)) == text


def test_numbers_survive_as_text() -> None:
    values = [float("inf"), float("-inf"), 1e-45, 3.4028234e38, *torch.randn(50).tolist()]
    block = Block(arg_types=[f32])
    constants = [dialect.constant(value, f32) for value in values]
    block.add_ops(constants)
    results = [each.results[0] for each in constants]
    read = steps(parse_program(str(make_program(block, results))))
    assert [dialect.number(each.results[0]) for each in read] == torch.tensor(values).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os",
        "func.func @pointwise(%0: f32) -> f32 { func.return %0 : f32 }".replace("f32", "f64"),
        'func.func @pointwise(%0: f32) -> f32 { %1 = "ew.shell"(%0) : (f32) -> f32 func.return %1 : f32 }',
        "func.func @pointwise(%0: f32) -> f32 { %1 = ew.exp %0 : (f32) -> f64 func.return %1 : f64 }",
        "func.func @pointwise(%0: f32) -> f32 { func.call @pointwise(%0) : (f32) -> f32 func.return %0 : f32 }",
        "builtin.module {}",
        "func.func private @pointwise(f32) -> f32",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(OnboardError, match="not a pointwise program"):
        ops.torch_pointwise([torch.ones(3)], text)


def test_simplified_programs_compute_the_same() -> None:
    program = parse_program(ROUND_TRIP).clone()
    canonicalize(program)
    # One widening cast, the folded product, one sum (of two), its square, the comparison.
    assert [step.name for step in steps(program)] == [
        "ew.cast",
        "ew.constant",
        "ew.add",
        "ew.mul",
        "ew.gt",
    ]
    inputs = [torch.randn(64).bfloat16(), torch.randn(64)]
    for simple, plain in zip(
        ops.torch_pointwise(inputs, str(program)),
        ops.torch_pointwise(inputs, ROUND_TRIP),
        strict=True,
    ):
        assert torch.equal(simple, plain)


def test_a_cast_that_loses_something_stays() -> None:
    text = """func.func @pointwise(%0: f32) -> f32 {
  %1 = ew.cast %0 : (f32) -> bf16
  %2 = ew.cast %1 : (bf16) -> f32
  func.return %2 : f32
}"""
    program = parse_program(text).clone()
    canonicalize(program)
    assert str(program) == text
    widen(program)
    assert steps(program) == []


MEANING = {
    **{name: getattr(torch, name) for name in dialect.OPERATIONS if hasattr(torch, name)},
    **{
        "relu": F.relu,
        "silu": F.silu,
        "gelu": F.gelu,
        "softplus": F.softplus,
        "cast": torch.Tensor.float,
    },
    "row_sum": lambda x: x.sum(-1, keepdim=True),
    "row_mean": lambda x: x.mean(-1, keepdim=True),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_operations_mean_what_torch_computes(dtype: torch.dtype) -> None:
    kind = dialect.TYPES[dtype]
    inputs = [(torch.rand(257) * 8 + 0.5).to(dtype) for _ in range(2)]
    text = every_operation(kind)
    names = [step.name.removeprefix("ew.") for step in steps(parse_program(text))[1::2]]
    for name, actual in zip(names, ops.torch_pointwise(inputs, text), strict=True):
        operands = [inputs[0] != inputs[1], *inputs] if name == "where" else inputs[: arity(name)]
        assert torch.equal(actual, MEANING[name](*operands).expand_as(actual)), name


def test_the_op_is_as_pytorch_wants_it() -> None:
    inputs = [torch.randn(2, 3, 8).bfloat16(), torch.randn(3, 1)]
    torch.library.opcheck(ops.torch_pointwise.default, (inputs, ROUND_TRIP))


def test_generated_code_has_names_from_the_kernel_language_alone() -> None:
    for kind in dialect.TYPES.values():
        for outer in range(4):
            tree = ast.parse(kernel_source(parse_program(every_operation(kind)), outer))
            assert {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} <= _assigned(
                tree
            ) | {"float"}
            roots = {
                ast.unparse(node).split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
            }
            assert all(
                root in ("triton", "tl", "m") or "(" in root or root in _assigned(tree)
                for root in roots
            )


def _assigned(tree: ast.Module) -> set[str]:
    names = {
        each.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for each in node.targets
    }
    return (
        names
        | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        | {"triton", "tl", "m"}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_generated_kernels_compile(kernels: list[Any], dtype: torch.dtype) -> None:  # noqa: F811
    inputs = [torch.ones(4, 3, 64, dtype=dtype).transpose(0, 1), torch.ones(64, dtype=dtype)]
    ops.triton_pointwise(inputs, every_operation(dialect.TYPES[dtype]))
    assert_compiled(kernels, {"kernel"})
