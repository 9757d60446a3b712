"""Mutations of transformers' modeling files: one small mistake each, in a copy that is imported
under another name.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

PACKAGE = "mutated_transformers"
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_CASTS = {"to", "float", "type_as", "contiguous"}
_OTHER_ACTIVATION = {
    "silu": "gelu",
    "gelu": "relu",
    "relu": "gelu",
    "softplus": "relu",
    "sigmoid": "tanh",
    "tanh": "sin",
}
_SMALL = 1e-3


@dataclass(frozen=True)
class Mutation:
    """One mistake: where it is, and the code before and after."""

    operator: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.operator}, line {self.line}: {self.before} -> {self.after}"


Edit = Callable[[ast.AST], ast.AST | None]
"""Returns what takes the node's place, or None where the operator has nothing to change."""


def _constant(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() as value):
            return ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            return ast.Constant(value * 1.5 + 0.25)
    return None


def _operator(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SWAPPED:
            return ast.BinOp(left, _SWAPPED[type(op)](), right)  # type: ignore[arg-type]
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _SWAPPED:
            return ast.AugAssign(target, _SWAPPED[type(op)](), value)  # type: ignore[arg-type]
    return None


def _comparison(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others) if type(op) in _SWAPPED:
            return ast.Compare(left, [_SWAPPED[type(op)]()], others)  # type: ignore[list-item]
    return None


def _term_dropped(node: ast.AST) -> ast.AST | None:
    """`residual + x` -> `x`."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Mult(), right=right) if not isinstance(
            right, ast.Constant
        ):
            return right
    return None


def _sign(node: ast.AST) -> ast.AST | None:
    """`-x2` of `rotate_half` -> `x2`."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            return operand
    return None


def _last_dimension(node: ast.AST) -> ast.AST | None:
    """`dim=-1` -> `dim=-2`."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            return ast.UnaryOp(ast.USub(), ast.Constant(3 - value))
    return None


def _cast_removed(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in _CASTS:
            return owner
    return None


def _transposed(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Call(func=ast.Attribute(attr="transpose", value=owner)):
            return owner
    return None


def _slice_bound(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Slice(lower=None, upper=ast.expr() as upper, step=step):
            return ast.Slice(upper, None, step)
        case ast.Slice(lower=ast.expr() as lower, upper=None, step=step):
            return ast.Slice(None, lower, step)
    return None


def _activation(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Subscript(value=ast.Name(id="ACT2FN")):
            return ast.Subscript(node.value, ast.Constant("relu"), ast.Load())
        case ast.Attribute(value=owner, attr=attr) if attr in _OTHER_ACTIVATION and not _is_self(
            owner
        ):
            return ast.Attribute(owner, _OTHER_ACTIVATION[attr], ast.Load())
    return None


def _scaled(node: ast.AST) -> ast.AST | None:
    """`self.scaling = x` -> `self.scaling = x * 1.1`; likewise for whatever is called a scale or a
    factor.
    """
    match node:
        case ast.Assign(targets=[ast.Attribute() | ast.Name() as target], value=value):
            words = ("scal", "factor", "multiplier", "freq", "theta", "embeds")
            if any(word in ast.unparse(target).lower() for word in words):
                return ast.Assign([target], ast.BinOp(value, ast.Mult(), ast.Constant(1.1)))
    return None


def _epsilon(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Assign(targets=[target], value=value) if "eps" in ast.unparse(target):
            return ast.Assign([target], ast.BinOp(value, ast.Add(), ast.Constant(_SMALL)))
        case ast.keyword(arg=str() as arg, value=value) if "eps" in arg:
            return ast.keyword(arg, ast.BinOp(value, ast.Add(), ast.Constant(_SMALL)))
    return None


def _arguments_swapped(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Call(func=function, args=[first, second, *rest], keywords=keywords):
            return ast.Call(function, [second, first, *rest], keywords)
    return None


def _condition_negated(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.If(test=test, body=body, orelse=orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
    return None


def _step_dropped(node: ast.AST) -> ast.AST | None:
    """`x = norm(x)` -> nothing."""
    match node:
        case (
            ast.Assign(targets=[ast.Name(id=target)], value=value)
            | ast.AugAssign(target=ast.Name(id=target), value=value)
        ):
            names = {item.id for item in ast.walk(value) if isinstance(item, ast.Name)}
            return ast.Pass() if target in names or isinstance(node, ast.AugAssign) else None
    return None


def _other_module(node: ast.AST) -> ast.AST | None:
    """A body in which two modules take each other's place: `self.norm1(x)` <-> `self.norm2(y)`."""
    if not isinstance(node, ast.FunctionDef):
        return None
    calls = [
        item.func
        for item in ast.walk(node)
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute)
    ]
    names = list(dict.fromkeys(item.attr for item in calls if _is_self(item.value)))
    if len(names) < 2:
        return None
    turned = dict(zip(names[:2], names[1::-1], strict=True))
    copy = deepcopy(node)
    for item in ast.walk(copy):
        if isinstance(item, ast.Attribute) and _is_self(item.value) and item.attr in turned:
            item.attr = turned[item.attr]
    return copy


def _order_swapped(node: ast.AST) -> ast.AST | None:
    """A body in which a residual is saved one step later, or a norm comes one step earlier."""
    if not isinstance(node, ast.FunctionDef):
        return None
    steps = [index for index, item in enumerate(node.body) if isinstance(item, ast.Assign)]
    pairs = [
        index
        for index in steps
        if index + 1 in steps and _touches(node.body[index], node.body[index + 1])
    ]
    if not pairs:
        return None
    copy = deepcopy(node)
    at = pairs[len(pairs) // 2]
    copy.body[at], copy.body[at + 1] = copy.body[at + 1], copy.body[at]
    return copy


def _touches(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether the order of two assignments matters."""
    stores, loads = (
        [
            {n.id for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}
            for s in (first, second)
        ]
        for kind in (ast.Store, ast.Load)
    )
    return bool(stores[0] & stores[1] or stores[1] & loads[0]) and bool(loads[0])


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _branch(test: str) -> Edit:
    """A body that halves what it gets where a test of that tensor's shape holds."""

    def edit(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.FunctionDef) or node.name != "forward":
            return None
        name = next(
            (item.arg for item in node.args.args if item.arg in ("hidden_states", "x")), None
        )
        if name is None:
            return None
        copy = deepcopy(node)
        copy.body[:0] = ast.parse(f"if {name}{test}:\n    {name} = {name} * 0.5").body
        return copy

    return edit


BRANCH = "branch on "
OPERATORS: dict[str, Edit] = {
    "constant changed": _constant,
    "operator changed": _operator,
    "comparison changed": _comparison,
    "term dropped": _term_dropped,
    "sign dropped": _sign,
    "dimension changed": _last_dimension,
    "cast removed": _cast_removed,
    "transposition removed": _transposed,
    "slice changed": _slice_bound,
    "activation changed": _activation,
    "scale changed": _scaled,
    "epsilon changed": _epsilon,
    "arguments swapped": _arguments_swapped,
    "condition negated": _condition_negated,
    "step dropped": _step_dropped,
    "modules swapped": _other_module,
    "order changed": _order_swapped,
    f"{BRANCH}length": _branch(".shape[1] > 80"),
    f"{BRANCH}batch": _branch(".shape[0] > 1"),
    f"{BRANCH}one token": _branch(".shape[1] == 1"),
}


class Mutator:
    """Draws mutations of one modeling file, among the classes and functions that a model of it
    runs.

    Args:
        module: the modeling module's name.
        reached: names of the classes and functions to mutate.
        seed: of the draws.
    """

    def __init__(self, module: str, reached: set[str], seed: str) -> None:
        self.module = module
        self.random = random.Random(seed)
        path = importlib.import_module(module).__file__
        assert path is not None
        self.tree = _absolute(ast.parse(Path(path).read_text(encoding="utf-8")), module)
        self.reached = reached
        self.drawn: set[tuple[str, int]] = set()

    def draw(self, operator: str) -> tuple[Mutation, str] | None:
        """Return a random mutation that was not drawn before and the mutated file's text; None when
        there is none.
        """
        places = [node for node in self._nodes() if OPERATORS[operator](node) is not None]
        fresh = [node for node in places if (operator, id(node)) not in self.drawn]
        if not fresh:
            return None
        place = self.random.choice(fresh)
        self.drawn.add((operator, id(place)))
        return self._mutated(operator, place)

    def _nodes(self) -> Iterator[ast.AST]:
        """Yield what may be mutated: bodies of methods and functions, without what only training
        runs.
        """
        for top in self.tree.body:
            if isinstance(top, ast.FunctionDef | ast.ClassDef) and top.name in self.reached:
                for function in [top] if isinstance(top, ast.FunctionDef) else top.body:
                    if isinstance(function, ast.FunctionDef) and not function.name.startswith(
                        ("_init_weights", "__re")
                    ):
                        yield from (
                            node
                            for item in (function, *function.body)
                            for node in _inside(item, function)
                        )

    def _mutated(self, operator: str, place: ast.AST) -> tuple[Mutation, str]:
        new = OPERATORS[operator](place)
        assert new is not None
        memo = {id(place): ast.copy_location(new, place)}
        tree = ast.fix_missing_locations(deepcopy(self.tree, memo))
        mutation = Mutation(operator, getattr(place, "lineno", 0), _shown(place), _shown(new))
        return mutation, ast.unparse(tree)

    def unchanged(self) -> str:
        """Return the text of a copy without a mutation."""
        return ast.unparse(self.tree)


def _inside(item: ast.AST, function: ast.FunctionDef) -> Iterator[ast.AST]:
    return iter([item]) if item is function else ast.walk(item)


def _shown(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef(name=function):
            return f"def {function}"
        case ast.keyword(arg=arg, value=value):
            return f"{arg}={ast.unparse(value)}"
        case ast.If(test=test):
            return f"if {ast.unparse(test)}"
    return " ".join(ast.unparse(node).split())[:70]


def _absolute(tree: ast.Module, module: str) -> ast.Module:
    """Write relative imports out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = module.split(".")[: -node.level]
            node.module, node.level = (
                ".".join([*package, *([node.module] if node.module else [])]),
                0,
            )
    return tree


def importable(text: str, name: str, folder: Path, architecture: str) -> type[nn.Module]:
    """Import a modeling file's text from a folder that is on the path; return its class of that
    name.
    """
    package = folder / PACKAGE
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / f"{name}.py").write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    model_class: type[nn.Module] = getattr(
        importlib.import_module(f"{PACKAGE}.{name}"), architecture
    )
    return model_class


@contextmanager
def installed(config_class: type, model_class: type[nn.Module]) -> Iterator[None]:
    """Have transformers take a class as the causal language model of a config class."""
    with mock.patch.dict(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, {config_class: model_class}):
        yield
