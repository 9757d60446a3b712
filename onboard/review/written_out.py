"""Attention and norms that a model file writes out, behind helper functions too, whatever they are
called there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from onboard.review.python_source import Source, definitions, dotted, nodes_inside

_SOFTMAX = {"softmax", "log_softmax", "softmin", "Softmax", "logsumexp"}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "addbmm", "mm", "addmm", "einsum", "tensordot", "inner"}
_WHOLE = {
    "MultiheadAttention",
    "RMSNorm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "multi_head_attention_forward",
    "native_layer_norm",
    "rms_norm",
    "scaled_dot_product_attention",
}
"""What torch has whole, and a canonical op is there for."""
_SPREAD = {"var", "std", "var_mean", "std_mean", "norm", "vector_norm", "normalize"}
"""Sums of squares by their names."""


@dataclass(frozen=True)
class Spot:
    """Where something is written out, and the definitions that it takes."""

    node: ast.AST
    names: frozenset[str]


def written_out(source: Source) -> list[Spot]:
    """Return where attention or a norm is computed by other means than an op.

    Attention is a softmax together with two products of activations (a product with a parameter is
    a linear layer), a norm squares that are averaged and an inverse root, in one definition and the
    helpers that it calls by name.
    """
    file = _File(source)
    spots: dict[ast.AST, Spot] = {}
    for name in file.bodies:
        reach = file.reach(name)
        for node in file.found(reach):
            known = spots.get(node)
            if known is None or len(known.names) > len(reach):
                spots[node] = Spot(node, frozenset(reach))
    return sorted(spots.values(), key=lambda spot: spot.node.lineno)  # type: ignore[attr-defined]


class _File:
    """The definitions of a file and what each reaches."""

    def __init__(self, source: Source) -> None:
        self.bodies = definitions(source)
        self._own = {name.rpartition(".")[2] for name in self.bodies} | source.classes().keys()

    def reach(self, name: str) -> list[str]:
        """Return a definition and the helpers that it calls, and these call: functions, and methods
        of its class.
        """
        found, owner = [name], name.partition(".")[0]
        for current in found:
            called = {
                dotted(node.func)
                for node in nodes_inside(self.bodies[current])
                if isinstance(node, ast.Call)
            }
            helpers = {
                f"{owner}.{call.removeprefix('self.')}"
                for call in called
                if call.startswith("self.")
            }
            found += sorted((helpers | called) & self.bodies.keys() - {"", *found})
        return found

    def found(self, reach: list[str]) -> list[ast.AST]:
        """Return the nodes by which definitions write something out together."""
        parts = [_Body(self.bodies[name], self._own) for name in reach]
        spots = [node for part in parts[:1] for node in part.whole]
        if sum(len(part.products) for part in parts) >= 2:
            spots += [node for part in parts for node in part.softmaxes]
        if any(part.squares for part in parts) and any(part.means for part in parts):
            spots += [node for part in parts for node in part.inverse_roots]
        return spots


class _Body:
    """What one definition computes."""

    def __init__(self, body: ast.AST, own: set[str]) -> None:
        self._nodes = nodes_inside(body)
        self._own = own

    def _calls(self, *names: str) -> Iterator[ast.Call]:
        for node in self._nodes:
            if isinstance(node, ast.Call) and not _is_own(node) and _last(node) in names:
                yield node

    def _operators(self, *kinds: type[ast.operator]) -> Iterator[ast.BinOp]:
        return (
            node
            for node in self._nodes
            if isinstance(node, ast.BinOp) and isinstance(node.op, kinds)
        )

    @cached_property
    def whole(self) -> list[ast.AST]:
        """Calls of what torch has whole; a module or a class of the file that has such a name is
        none.
        """
        return [call for call in self._calls(*_WHOLE) if dotted(call.func) not in self._own]

    @cached_property
    def softmaxes(self) -> list[ast.AST]:
        divided = [
            *self._operators(ast.Div),
            *self._calls("div", "div_", "true_divide", "reciprocal"),
        ]
        exponentials = [*self._calls("exp", "exp_", "exp2")]
        return [
            *self._calls(*_SOFTMAX),
            *(exponentials if divided and [*self._calls("sum", "cumsum")] else []),
        ]

    @cached_property
    def products(self) -> list[ast.AST]:
        """Products of activations; summed elementwise products are ones, too."""
        summed = [
            call
            for call in self._calls("sum")
            for part in ast.walk(call)
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)
        ]
        made: list[ast.AST] = [*self._calls(*_PRODUCTS), *self._operators(ast.MatMult), *summed]
        return [node for node in made if not any(_is_parameter(part) for part in _operands(node))]

    @cached_property
    def squares(self) -> bool:
        powers = [power for power in self._powers() if power[1] == 2]
        itself = [
            node
            for node in self._operators(ast.Mult)
            if ast.dump(node.left) == ast.dump(node.right)
        ]
        twice = [call for call in self._calls("mul", "multiply", "dot", "vdot", "inner", "einsum")]
        return bool(powers or itself or twice or [*self._calls("square", "square_", *_SPREAD)])

    @cached_property
    def means(self) -> bool:
        return bool(
            [*self._calls("mean", "sum", "nanmean", "einsum", "dot", "vdot", "inner", *_SPREAD)]
        )

    @cached_property
    def inverse_roots(self) -> list[ast.AST]:
        """Inverse roots, as one operator, as a division by a root, and by way of logarithms."""
        found: list[ast.AST] = [*self._calls("rsqrt", "rsqrt_")]
        found += [node for node, power in self._powers() if power == -0.5]
        roots: list[ast.AST] = [*self._calls("sqrt", "sqrt_", "std")]
        roots += [node for node, power in self._powers() if power == 0.5]
        roots += self._calls("norm", "vector_norm") if roots else []
        divided = [
            *self._operators(ast.Div),
            *self._calls("div", "div_", "true_divide", "reciprocal", "pow"),
        ]
        logs = [*self._calls("log", "log2")]
        return [*found, *(roots if divided else []), *(self._calls("exp", "exp2") if logs else [])]

    def _powers(self) -> Iterator[tuple[ast.AST, float]]:
        """Powers of what is computed, and their constant exponents; those of sizes and settings
        make scales.
        """
        operators = [node for node in self._operators(ast.Pow) if not _is_parameter(node.left)]
        pairs: list[tuple[ast.AST, ast.AST]] = [(node, node.right) for node in operators]
        pairs += [
            (call, call.args[-1]) for call in self._calls("pow", "pow_", "float_power") if call.args
        ]
        return (
            (node, value) for node, exponent in pairs if (value := _number(exponent)) is not None
        )


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)


def _is_own(call: ast.Call) -> bool:
    """Whether what is called is a module or a method of the object itself: `self.norm(...)`."""
    return re.fullmatch(r"self\.\w+", dotted(call.func)) is not None


def _operands(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    assert isinstance(node, ast.Call)
    return [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]


def _is_parameter(node: ast.AST) -> bool:
    """Whether an operand is a parameter, as it is or seen otherwise (`self.weight.T`)."""
    return any(
        isinstance(part, ast.Attribute)
        and (dotted(part).startswith("self.") or part.attr == "weight")
        for part in ast.walk(node)
    ) and not any(isinstance(part, ast.Call) and _is_own(part) for part in ast.walk(node))


def _number(node: ast.AST) -> float | None:
    """The value of a number or of arithmetic with numbers; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and (value := _number(node.operand)) is not None
    ):
        return -value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = _number(node.left), _number(node.right)
        return left / right if left is not None and right else None
    return None
