"""Elementwise operators of a graph as a program in the dialect `ew`: which ones there are, and how
each is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from xdsl.dialects.builtin import f32
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, SSAValue

from onboard.experiments.elementwise.dialect import COMPARISONS, DTYPES, TYPES, constant, operation
from onboard.experiments.elementwise.program import make_program
from onboard.experiments.elementwise.regions import Region
from onboard.graph.fx import arguments, is_op
from onboard.ops import has_triton

aten, prims = torch.ops.aten, torch.ops.prims

LONGEST_ROW = 8192
"""Elements that one program of a kernel holds, at most."""

Arguments = Mapping[str, Any]
"""The arguments of an operator by their names."""


def region_program(region: Region) -> tuple[FuncOp, list[fx.Node]]:
    """Return the program that computes a region's outputs, in their order, and the nodes that it is
    applied to.
    """
    builder = Builder()
    for node in region.nodes:
        rule = _RULES.get(_target(node)) or _ROW_RULES[_target(node)]
        builder.values[node] = rule.lower(builder, node, arguments(node))
    program = make_program(builder.block, [builder.values[node] for node in region.outputs])
    return program, builder.inputs


def is_fusible(node: fx.Node) -> bool:
    """Whether a node is an elementwise operator on tensors of one device that a program can say
    exactly.
    """
    if node.op != "call_function" or (rule := _RULES.get(_target(node))) is None:
        return False
    values = arguments(node)
    operands = [each for each in node.all_input_nodes if _number_in(each) is None]
    tensors = [_value(each) for each in [node, *operands]]
    if not operands or not all(
        isinstance(value, Tensor) and value.dtype in TYPES for value in tensors
    ):
        return False
    return len({value.device for value in tensors}) == 1 and rule.accepts(node, values)


def is_fusible_reduction(node: fx.Node) -> bool:
    """Whether a node reduces rows that a program can hold: of a known length, kept as a dimension,
    in one dtype.
    """
    if node.op != "call_function" or (rule := _ROW_RULES.get(_target(node))) is None:
        return False
    tensors = [_value(each) for each in [node, *node.all_input_nodes]]
    if (
        not all(isinstance(value, Tensor) and value.dtype in TYPES for value in tensors)
        or not tensors[1].dim()
    ):
        return False
    size = tensors[1].shape[-1]
    is_row = isinstance(size, int) and 1 < size <= LONGEST_ROW and tensors[1].is_floating_point()
    return (
        is_row
        and len({value.device for value in tensors}) == 1
        and rule.accepts(node, arguments(node))
    )


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, without namespace and overload."""
    return (
        str(node.target.overloadpacket).rpartition(".")[2]
        if isinstance(node.target, OpOverload)
        else ""
    )


@dataclass
class Builder:
    """A program that is being written."""

    block: Block = field(default_factory=Block)
    inputs: list[fx.Node] = field(default_factory=list)
    values: dict[fx.Node, SSAValue] = field(default_factory=dict)

    def op(self, name: str, kind: Attribute, *operands: SSAValue) -> SSAValue:
        """Append an operation."""
        step = operation(name, list(operands), kind)
        self.block.add_op(step)
        return step.results[0]

    def number(self, value: float, kind: Attribute) -> SSAValue:
        """Append a constant."""
        step = constant(value, kind)
        self.block.add_op(step)
        return step.results[0]

    def operand(self, argument: Any, dtype: torch.dtype) -> SSAValue:
        """Return an operand of an operator that computes in `dtype`.

        A number is not rounded to a 16-bit dtype, as in PyTorch. A tensor of another kind, or of a
        wider float (one of no dimensions does not promote), is.
        """
        if not isinstance(argument, fx.Node):
            return self.number(argument, f32 if dtype.is_floating_point else TYPES[dtype])
        value = self._read(argument)
        source = DTYPES[value.type]
        kept = source == dtype or (source.is_floating_point and dtype == torch.float32)
        return value if kept else self.op("cast", TYPES[dtype], value)

    def _read(self, node: fx.Node) -> SSAValue:
        """Return a node's value: computed here, a number, or an input."""
        if node not in self.values:
            if (number := _number_in(node)) is not None:
                return self.number(number, TYPES[_dtype(node)])
            self.values[node] = self.block.insert_arg(TYPES[_dtype(node)], len(self.inputs))
            self.inputs.append(node)
        return self.values[node]


Lower = Callable[[Builder, fx.Node, Arguments], SSAValue]
Accepts = Callable[[fx.Node, Arguments], bool]


@dataclass(frozen=True)
class _Rule:
    lower: Lower
    accepts: Accepts


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def _dtype(node: fx.Node) -> torch.dtype:
    dtype = _value(node).dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def _target(node: fx.Node) -> Any:
    return node.target


def _number_in(node: fx.Node) -> float | None:
    """Return the number that a tensor without dimensions is made of, None for any other node."""
    if not is_op(node, aten.full.default, aten.scalar_tensor.default):
        return None
    values = arguments(node)
    number = values.get("fill_value", values.get("s"))
    known = isinstance(_value(node), Tensor) and _dtype(node) in TYPES and not values.get("size")
    return number if known and isinstance(number, int | float) else None


def _are_plain(*operands: Any) -> bool:
    """Whether operands are tensors and literal numbers, no sizes that vary."""
    return all(isinstance(_value(each), Tensor | int | float) for each in operands)


def _common_dtype(*operands: Any) -> torch.dtype:
    return torch.result_type(*(_value(each) for each in operands))


def _named(name: str, *names: str) -> _Rule:
    """An operator that is the operation `name` of its arguments `names`, in the dtype of its
    result.
    """

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        dtype = _dtype(node)
        return builder.op(
            name, TYPES[dtype], *(builder.operand(values[each], dtype) for each in names)
        )

    def accepts(node: fx.Node, values: Arguments) -> bool:
        plain = _are_plain(*(values[each] for each in names)) and values.get("alpha", 1) == 1
        return plain and _dtype(node) != torch.bool and values.get("rounding_mode") is None

    return _Rule(lower, accepts)


def _compared(name: str) -> _Rule:
    """A comparison: in the operands' common dtype, to which a number is rounded."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        dtype = _common_dtype(values["self"], values["other"])
        return builder.op(
            name,
            TYPES[torch.bool],
            *(_exact(builder, values[key], dtype) for key in ("self", "other")),
        )

    def accepts(node: fx.Node, values: Arguments) -> bool:
        operands = values["self"], values["other"]
        if not _are_plain(*operands) or _common_dtype(*operands) not in TYPES:
            return False
        numbers = [each for each in operands if not isinstance(each, fx.Node)]
        # Devices differ in whether x == 0.1 rounds the number.
        rounds = any(
            torch.tensor(each, dtype=_common_dtype(*operands)).item() != each for each in numbers
        )
        return name not in ("eq", "ne") or not rounds

    return _Rule(lower, accepts)


def _exact(builder: Builder, argument: Any, dtype: torch.dtype) -> SSAValue:
    """Return an operand in `dtype`, numbers too."""
    return (
        builder.operand(argument, dtype)
        if isinstance(argument, fx.Node)
        else builder.number(argument, TYPES[dtype])
    )


def _logical(name: str, *names: str) -> _Rule:
    """An operator on conditions."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        return builder.op(
            name, TYPES[torch.bool], *(builder.operand(values[each], torch.bool) for each in names)
        )

    def accepts(node: fx.Node, values: Arguments) -> bool:
        return _dtype(node) == torch.bool and all(
            isinstance(_value(values[each]), Tensor) for each in names
        )

    return _Rule(lower, accepts)


def _cast() -> _Rule:
    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        source = values.get("self", values.get("a"))
        assert isinstance(source, fx.Node)
        return builder.op("cast", TYPES[_dtype(node)], builder.operand(source, _dtype(source)))

    def accepts(node: fx.Node, values: Arguments) -> bool:
        source, wanted = _dtype(node.all_input_nodes[0]), _dtype(node)
        return not source.is_floating_point or wanted.is_floating_point or wanted == torch.bool

    return _Rule(lower, accepts)


def _power() -> _Rule:
    """x ** number, for numbers whose power PyTorch computes in another way."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        kind, x = TYPES[_dtype(node)], builder.operand(values["self"], _dtype(node))
        if (name := _ROOTS.get(values["exponent"])) is not None:
            return builder.op(name, kind, x)
        square = builder.op("mul", kind, x, x)
        return square if values["exponent"] == 2 else builder.op("mul", kind, square, x)

    def accepts(node: fx.Node, values: Arguments) -> bool:
        exponent, dtype = values["exponent"], _dtype(node)
        known = exponent in (2, 3) or (exponent in _ROOTS and dtype.is_floating_point)
        return known and dtype == _dtype(node.all_input_nodes[0])

    return _Rule(lower, accepts)


_ROOTS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _square() -> _Rule:
    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        x = builder.operand(values["self"], _dtype(node))
        return builder.op("mul", TYPES[_dtype(node)], x, x)

    return _Rule(lower, lambda node, values: _dtype(node) != torch.bool)


def _clamp() -> _Rule:
    """The larger of x and `min`, then the smaller of that and `max`, as far as they are given."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        dtype = _dtype(node)
        x = builder.operand(values["self"], dtype)
        for key, name in (("min", "maximum"), ("max", "minimum")):
            if values.get(key) is not None:
                x = builder.op(name, TYPES[dtype], x, builder.operand(values[key], dtype))
        return x

    def accepts(node: fx.Node, values: Arguments) -> bool:
        limits = [values[key] for key in ("min", "max") if values.get(key) is not None]
        return _dtype(node) != torch.bool and bool(limits) and _are_plain(*limits)

    return _Rule(lower, accepts)


def _choice(condition: str, chosen: str, other: str) -> _Rule:
    """One of two arguments by a condition, in the dtype of the result."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        dtype = _dtype(node)
        operands = (_exact(builder, values[each], dtype) for each in (chosen, other))
        return builder.op(
            "where", TYPES[dtype], builder.operand(values[condition], torch.bool), *operands
        )

    def accepts(node: fx.Node, values: Arguments) -> bool:
        holds = _value(values[condition])
        is_condition = isinstance(holds, Tensor) and holds.dtype == torch.bool
        return (
            is_condition
            and _dtype(node) != torch.bool
            and _are_plain(values[chosen], values[other])
        )

    return _Rule(lower, accepts)


def _gelu() -> _Rule:
    plain, tanh = _named("gelu", "self"), _named("gelu_tanh", "self")

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        return (tanh if values["approximate"] == "tanh" else plain).lower(builder, node, values)

    return _Rule(lower, plain.accepts)


def _softplus() -> _Rule:
    rule = _named("softplus", "self")
    return _Rule(rule.lower, lambda node, values: (values["beta"], values["threshold"]) == (1, 20))


_UNARY = (
    *("abs", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal"),
    *("sin", "cos", "tanh", "sigmoid", "erf", "relu", "silu"),
)
_BINARY = ("add", "sub", "mul", "div")
_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)

_RULES: dict[Any, _Rule] = {
    **{getattr(aten, name).default: _named(name, "self") for name in _UNARY},
    **{getattr(aten, name).Tensor: _named(name, "self", "other") for name in _BINARY},
    **{getattr(aten, name).Scalar: _named(name, "self", "other") for name in _BINARY},
    **{
        aten.rsub.Scalar: _named("sub", "other", "self"),
        aten.rsub.Tensor: _named("sub", "other", "self"),
    },
    **{
        getattr(aten, name).default: _named(name, "self", "other")
        for name in ("maximum", "minimum")
    },
    **{getattr(aten, name).Tensor: _compared(name) for name in COMPARISONS},
    **{getattr(aten, name).Scalar: _compared(name) for name in COMPARISONS},
    **dict.fromkeys(
        (aten.logical_not.default, aten.bitwise_not.default), _logical("logical_not", "self")
    ),
    **dict.fromkeys(
        (aten.logical_and.default, aten.bitwise_and.Tensor),
        _logical("logical_and", "self", "other"),
    ),
    **dict.fromkeys(
        (aten.logical_or.default, aten.bitwise_or.Tensor), _logical("logical_or", "self", "other")
    ),
    **dict.fromkeys(
        (aten.to.dtype, aten.to.device, aten._to_copy.default, aten.type_as.default), _cast()
    ),
    prims.convert_element_type.default: _cast(),
    aten.pow.Tensor_Scalar: _power(),
    aten.square.default: _square(),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default), _clamp()),
    **dict.fromkeys(_WHERE, _choice("condition", "self", "other")),
    **dict.fromkeys(
        (aten.masked_fill.Scalar, aten.masked_fill.Tensor), _choice("mask", "value", "self")
    ),
    aten.gelu.default: _gelu(),
    aten.softplus.default: _softplus(),
}
"""Operator -> how it is said, and when it can be said exactly."""


def _reduction(name: str) -> _Rule:
    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        dtype = _dtype(node)
        return builder.op(name, TYPES[dtype], builder.operand(values["self"], dtype))

    def accepts(node: fx.Node, values: Arguments) -> bool:
        last = _value(values["self"]).dim() - 1
        return values["keepdim"] is True and list(values["dim"] or []) in ([-1], [last])

    return _Rule(lower, accepts)


def _rmsnorm() -> _Rule:
    """`torch_rmsnorm`, step by step."""

    def lower(builder: Builder, node: fx.Node, values: Arguments) -> SSAValue:
        x, kind = builder.operand(values["input"], torch.float32), TYPES[_dtype(values["input"])]
        mean = builder.op("row_mean", f32, builder.op("mul", f32, x, x))
        shifted = builder.op("add", f32, mean, builder.number(values["eps"], f32))
        normed = builder.op("mul", f32, x, builder.op("rsqrt", f32, shifted))
        weight = builder.operand(values["weight"], _dtype(node))
        return builder.op("mul", TYPES[_dtype(node)], builder.op("cast", kind, normed), weight)

    return _Rule(lower, lambda node, values: isinstance(values["eps"], float))


_ROW_RULES: dict[Any, _Rule] = {
    aten.mean.dim: _reduction("row_mean"),
    aten.sum.dim_IntList: _reduction("row_sum"),
    torch.ops.onboard.torch_rmsnorm.default: _rmsnorm(),
}
if has_triton():
    _ROW_RULES[torch.ops.onboard.triton_rmsnorm.default] = _rmsnorm()
