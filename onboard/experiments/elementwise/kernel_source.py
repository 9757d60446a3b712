"""Programs printed as Triton kernels, operation by operation, from templates alone.

A kernel works on tiles [ROWS, COLUMNS] of the inputs' common shape, whose dimensions the launcher
has joined where they lie one behind the other in all tensors: the last one is `columns`, all before
it are counted by `row`. Values of float types are float32 that has been rounded to the type. Where
rows are reduced a tile holds whole rows.
"""

from __future__ import annotations

import math

import torch
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from onboard.experiments.elementwise.dialect import COMPARISONS, DTYPES, is_float, number
from onboard.experiments.elementwise.program import output_dtypes, results_of, steps

_HEADER = '''"""A pointwise program as a Triton kernel, generated.

{listing}
"""

import triton
import triton.language as tl

from onboard.ops.triton import scalar_math as m

'''

_NAMES = {
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.float32: "tl.float32",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}

_CALLS = (
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "silu",
    "gelu",
    "gelu_tanh",
    "softplus",
)

_TEMPLATES = {
    **{name: f"m.{name}({{0}})" for name in _CALLS},
    **{
        "abs": "tl.abs({0})",
        "neg": "-{0}",
        "reciprocal": "tl.div_rn(1.0, {0})",
        "relu": "m.maximum({0}, 0)",
    },
    **{"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "m.div({0}, {1})"},
    **{
        "maximum": "m.maximum({0}, {1})",
        "minimum": "m.minimum({0}, {1})",
        "where": "tl.where({0}, {1}, {2})",
    },
    **{"eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}"},
    **{"row_sum": "m.row_sum({0}, inside)", "row_mean": "m.row_sum({0}, inside) / columns"},
    **{"gt": "{0} > {1}", "ge": "{0} >= {1}"},
    **{
        "logical_not": "{0} == 0",
        "logical_and": "({0} != 0) & ({1} != 0)",
        "logical_or": "({0} != 0) | ({1} != 0)",
    },
}


def kernel_source(program: FuncOp, outer: int) -> str:
    """Return a module whose function `kernel` applies the program to tensors with `outer`
    dimensions before the last.

    Its arguments: pointers of outputs and inputs, `rows`, `columns`, the sizes of the outer
    dimensions after the first, for each input its strides in the outer dimensions and along a row,
    then ROWS and COLUMNS.
    """
    inputs = range(len(program.body.block.args))
    outputs = output_dtypes(program)
    body = [
        *_tile(outer),
        *(line for each in inputs for line in _load(program, each, outer)),
        *_computations(program),
    ]
    names = _value_names(program)
    for position, (result, dtype) in enumerate(zip(results_of(program), outputs, strict=True)):
        body.append(
            f"tl.store(out{position} + out_first + column, {names[result]}.to({_NAMES[dtype]}), mask=inside)"
        )
    arguments = [
        *(f"out{each}" for each in range(len(outputs))),
        *(f"in{each}" for each in inputs),
        *("rows", "columns"),
        *(sizes := [f"size{each}" for each in range(1, outer)]),
        *(f"in{each}_stride{dim}" for each in inputs for dim in range(outer)),
        *(f"in{each}_column" for each in inputs),
        *("ROWS: tl.constexpr", "COLUMNS: tl.constexpr"),
    ]
    listing = "\n".join(f"    {line}" for line in str(program).splitlines())
    decorator = f"@triton.jit(do_not_specialize={['rows', *sizes]!r})"
    head = [decorator, f"def kernel({', '.join(arguments)}):"]
    return _HEADER.format(listing=listing) + "\n".join(
        [*head, *(f"    {line}" for line in body), ""]
    )


def _tile(outer: int) -> list[str]:
    """Return the lines that say where a program's tile lies."""
    lines = [
        "blocks = tl.cdiv(columns, COLUMNS)",
        "block = tl.program_id(0)",
        "row = (block // blocks) * ROWS + tl.arange(0, ROWS)[:, None]",
        "first = (block % blocks).to(tl.int64) * COLUMNS",
        "column = tl.arange(0, COLUMNS)[None, :]",
        "inside = (row < rows) & (column < columns - first)",
        "out_first = row.to(tl.int64) * columns + first",
    ]
    rest = "row"
    for dim in range(outer - 1, 0, -1):
        lines += [
            f"index{dim} = ({rest} % size{dim}).to(tl.int64)",
            f"rest{dim} = {rest} // size{dim}",
        ]
        rest = f"rest{dim}"
    return [*lines, f"index0 = {rest}.to(tl.int64)"] if outer else lines


def _load(program: FuncOp, position: int, outer: int) -> list[str]:
    """Return the line that loads an input, none when nothing reads it."""
    argument = program.body.block.args[position]
    if argument.first_use is None:
        return []
    name = f"in{position}"
    starts = [f"index{dim} * {name}_stride{dim}" for dim in range(outer)]
    where = " + ".join([*starts, f"first * {name}_column"])
    widened = ".to(tl.float32)" if is_float(argument.type) else ""
    return [
        f"x{position} = tl.load({name} + ({where}) + column * {name}_column, mask=inside){widened}"
    ]


def _value_names(program: FuncOp) -> dict[SSAValue, str]:
    names: dict[SSAValue, str] = {
        each: f"x{position}" for position, each in enumerate(program.body.block.args)
    }
    return names | {step.results[0]: f"v{position}" for position, step in enumerate(steps(program))}


def _computations(program: FuncOp) -> list[str]:
    names = _value_names(program)
    return [f"{names[step.results[0]]} = {_expression(step, names)}" for step in steps(program)]


def _expression(step: Operation, names: dict[SSAValue, str]) -> str:
    """Return the expression that computes one operation, rounded to its type."""
    name, dtype = step.name.removeprefix("ew."), DTYPES[step.results[0].type]
    if name == "constant":
        return f"tl.full((1, 1), {_literal(step)}, {_register_type(dtype)})"
    if name == "cast":
        return _cast(step, names)
    operands = [names[operand] for operand in step.operands]
    if name == "div" and number(step.operands[1]) is not None:
        return _rounded(f"m.div_by_number({', '.join(operands)})", dtype)
    if not (is_float(step.results[0].type) or name in COMPARISONS or dtype == torch.bool):
        operands = [
            _integer(operand, text, dtype)
            for operand, text in zip(step.operands, operands, strict=True)
        ]
    return _rounded(_TEMPLATES[name].format(*operands), dtype)


def _integer(operand: SSAValue, text: str, dtype: torch.dtype) -> str:
    """Return an operand of an integer operation in the result's type; a condition stays one."""
    return text if DTYPES[operand.type] in (dtype, torch.bool) else f"{text}.to({_NAMES[dtype]})"


def _register_type(dtype: torch.dtype) -> str:
    return _NAMES[torch.float32 if dtype.is_floating_point else dtype]


def _rounded(expression: str, dtype: torch.dtype) -> str:
    """Return a float32 expression rounded to a 16-bit type; others are as they should be."""
    if dtype == torch.bfloat16:
        return f"m.to_bfloat16({expression})"
    if dtype == torch.float16:
        return f"m.to_float16({expression})"
    return expression


def _cast(step: Operation, names: dict[SSAValue, str]) -> str:
    source, dtype = step.operands[0], DTYPES[step.results[0].type]
    if dtype == torch.bool:
        return f"{names[source]} != 0"
    if is_float(source.type):
        return _rounded(names[source], dtype)
    return _rounded(f"{names[source]}.to({_register_type(dtype)})", dtype)


def _literal(step: Operation) -> str:
    value = number(step.results[0])
    assert value is not None
    return repr(value) if math.isfinite(value) else f'float("{value}")'
