"""The dialect `ew`: PyTorch's elementwise operators on scalars, and sums over the last dimension.

Types are bf16, f16, f32, i32, i64 and i1 (bool). An operation with a float result converts its
operands to f32, computes in f32 and rounds once to its result's type, which is what PyTorch's
kernels do with 16-bit tensors. Integer results are computed in the result's type; comparisons in
f32, or in the operands' type where both are integers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    Float16Type,
    Float32Type,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    bf16,
    f16,
    f32,
    i1,
    i32,
    i64,
)
from xdsl.ir import Attribute, Dialect, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

TYPES: dict[torch.dtype, Attribute] = {
    torch.bfloat16: bf16,
    torch.float16: f16,
    torch.float32: f32,
    torch.int32: i32,
    torch.int64: i64,
    torch.bool: i1,
}
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}

ROWS = ("row_sum", "row_mean")
"""The sum and the mean of the operand over the last dimension of the tensors that a program is
applied to, in f32.
"""

UNARY = (
    *(
        "abs",
        "neg",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "erf",
    ),
    *("relu", "silu", "gelu", "gelu_tanh", "softplus", "logical_not"),
)
ARITHMETIC = ("add", "sub", "mul", "div", "maximum", "minimum")
LOGIC = ("logical_and", "logical_or")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY = (*ARITHMETIC, *LOGIC, *COMPARISONS)

_Scalar = BFloat16Type | Float16Type | Float32Type | IntegerType
_FORMAT = "operands attr-dict `:` functional-type(operands, results)"


class UnaryOp(IRDLOperation):
    """A function of one scalar."""

    operand = operand_def(_Scalar)
    result = result_def(_Scalar)
    traits = traits_def(Pure())
    assembly_format = _FORMAT


class BinaryOp(IRDLOperation):
    """A function of two scalars."""

    left = operand_def(_Scalar)
    right = operand_def(_Scalar)
    result = result_def(_Scalar)
    traits = traits_def(Pure())
    assembly_format = _FORMAT


@irdl_op_definition
class CastOp(UnaryOp):
    """The operand in the result's type: rounded to the nearest, or whether it differs from 0 for
    i1.
    """

    name = "ew.cast"


@irdl_op_definition
class WhereOp(IRDLOperation):
    """The second operand where the condition holds, else the third."""

    name = "ew.where"
    condition = operand_def(i1)
    left = operand_def(_Scalar)
    right = operand_def(_Scalar)
    result = result_def(_Scalar)
    traits = traits_def(Pure())
    assembly_format = _FORMAT


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """A number."""

    name = "ew.constant"
    value = prop_def()
    result = result_def(_Scalar)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($result)"


def _named(name: str, base: type[IRDLOperation]) -> type[IRDLOperation]:
    title = "".join(part.title() for part in name.split("_")) + "Op"
    fields = {"name": f"ew.{name}", "__module__": __name__, "__doc__": f"PyTorch's {name}."}
    return irdl_op_definition(type(title, (base,), fields))


OPERATIONS: dict[str, type[IRDLOperation]] = {
    **{name: _named(name, UnaryOp) for name in (*UNARY, *ROWS)},
    **{name: _named(name, BinaryOp) for name in BINARY},
    "cast": CastOp,
    "where": WhereOp,
}
"""Operation name, without the dialect's -> its class; constants apart."""

EW = Dialect("ew", [*OPERATIONS.values(), ConstantOp], [])


def operation(name: str, operands: list[SSAValue], kind: Attribute) -> IRDLOperation:
    """Make the operation `name` with a result of type `kind`."""
    return OPERATIONS[name].create(operands=operands, result_types=[kind])


def constant(value: float, kind: Attribute) -> ConstantOp:
    """Make a constant: `value` rounded to `kind`."""
    attribute: Attribute
    if isinstance(kind, IntegerType):
        attribute = IntegerAttr(int(value), kind)
    else:
        assert isinstance(kind, AnyFloat)
        attribute = FloatAttr(value, kind)
    return ConstantOp.create(properties={"value": attribute}, result_types=[kind])


def number(value: SSAValue) -> int | float | None:
    """Return the number that a constant stands for, None for any other value."""
    if not isinstance(value.owner, ConstantOp):
        return None
    held = value.owner.value
    assert isinstance(held, IntegerAttr | FloatAttr)
    return held.value.data


def reduces_rows(steps: Iterable[Operation]) -> bool:
    """Whether some of the operations need whole rows."""
    return any(step.name.removeprefix("ew.") in ROWS for step in steps)


def is_float(kind: Attribute) -> bool:
    """Whether a type is one of the floats."""
    return isinstance(kind, BFloat16Type | Float16Type | Float32Type)
