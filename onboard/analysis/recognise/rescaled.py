"""Weights that a transformers model divides in place, once, before its first step of inference.

RWKV does so, that float16 does not overflow: later layers work on smaller hidden states. Generated
files have the checkpoint's weights and divide what the layers give, which is the same: the divisors
are powers of two.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onboard.analysis.source import find_method
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt
from onboard.errors import OnboardError
from onboard.hf.copied_model import copied


@dataclass(frozen=True)
class Rescaled:
    """What `self.<attr>` of a class gives is divided."""

    cls: type
    attr: str
    divisor: str | None
    """An expression of `self`, which knows its layer's index, and `config`; None: there is none in
    this config.
    """
    test: str
    """What holds of `config` then."""


@dataclass(frozen=True)
class Settled:
    """What a model has done once it has run."""

    linears: tuple[Rescaled, ...] = ()
    switches: tuple[tuple[type, str, bool], ...] = ()
    """Class, attribute and value of what `__init__` sets and the first forward sets otherwise."""


@torch.no_grad()
def settled(model: nn.Module) -> Settled:
    """Return what the first forward of a transformers model changes for good: as its source has it,
    checked on a copy.

    Nothing, unless the source divides weights in place, and does so in float32, too; then all that
    changes has to be accounted for.
    """
    divisions = [item for module in model.modules() for item in _divisions(module)]
    if not divisions:
        return Settled()
    after = copied(model)
    after(**from_zero(prompt(0, seed=4)), use_cache=False)
    same = all(map(torch.equal, model.parameters(), after.parameters()))
    if same and any(divisor != 1 for item in divisions for divisor in item.divisors(model)):
        return Settled()  # it divides in half precision alone
    _check(model, after, divisions)
    return Settled(
        tuple(item.on_owners(model) for item in divisions), tuple(_switches(model, after))
    )


@dataclass(frozen=True)
class _Division:
    """`for index, block in enumerate(blocks): block.path.weight.div_(divisor)`, where `test`
    holds.
    """

    blocks: nn.ModuleList
    path: str
    divisor: str
    test: str

    def holds(self, model: nn.Module) -> bool:
        return bool(eval(self.test, {"config": model.config}))

    def divisors(self, model: nn.Module) -> list[float]:
        """Return the divisor of each block in this config."""
        names = {"config": model.config, "int": int}
        return [
            eval(self.divisor, {**names, "index": i}) if self.holds(model) else 1
            for i in range(len(self.blocks))
        ]

    def weights(self) -> list[torch.Tensor]:
        return [block.get_parameter(f"{self.path}.weight") for block in self.blocks]

    def on_owners(self, model: nn.Module) -> Rescaled:
        """Return the division as the modules that have the layers can do it."""
        parent, _, attr = self.path.rpartition(".")
        owners = [block.get_submodule(parent) for block in self.blocks]
        numbers = [key for key, value in vars(owners[0]).items() if type(value) is int]
        own = [
            key
            for key in numbers
            if [vars(owner)[key] for owner in owners] == list(range(len(owners)))
        ]
        if not own or len({type(owner) for owner in owners}) != 1:
            raise OnboardError(
                f"{type(owners[0]).__name__} does not know which layer it is in, and {attr} is divided by it"
            )
        divisor = ast.unparse(
            _Renamed({"index": f"self.{own[0]}"}).visit(ast.parse(self.divisor, mode="eval"))
        )
        is_divided = self.holds(model)
        return Rescaled(
            type(owners[0]),
            attr,
            divisor if is_divided else None,
            self.test if is_divided else f"not ({self.test})",
        )


def _check(model: nn.Module, after: nn.Module, divisions: list[_Division]) -> None:
    """Refuse a model whose first forward changes weights in another way."""
    pairs = [
        (weight, by)
        for item in divisions
        for weight, by in zip(item.weights(), item.divisors(model), strict=True)
    ]
    divisors = {id(weight): by for weight, by in pairs}
    state = after.state_dict()
    for name, tensor in model.named_parameters():
        if name in state and not torch.equal(state[name] * divisors.get(id(tensor), 1), tensor):
            raise OnboardError(
                f"a forward of {type(model).__name__} changes {name}",
                hint="Report this architecture",
            )


def _switches(model: nn.Module, after: nn.Module) -> Iterator[tuple[type, str, bool]]:
    for one, other in zip(model.modules(), after.modules(), strict=True):
        for key, value in vars(one).items():
            if type(value) is bool and vars(other)[key] is not value:
                yield type(one), key, vars(other)[key]


def _divisions(module: nn.Module) -> Iterator[_Division]:
    """Yield the divisions of weights in the methods of a module."""
    for key, value in vars(type(module)).items():
        found = find_method(type(module), key) if callable(value) else None
        for test, loop in _loops(found[1].body, "True") if found is not None else ():
            match loop:
                case ast.For(
                    target=ast.Tuple(elts=[ast.Name(id=index), ast.Name(id=block)]),
                    iter=ast.Call(func=ast.Name(id="enumerate"), args=[ast.Attribute(attr=blocks)]),
                ):
                    for path, divisor in _divided(loop, block):
                        text = _renamed(divisor, {"self.config": "config", index: "index"})
                        yield _Division(getattr(module, blocks), path, text, test)


def _loops(statements: list[ast.stmt], test: str) -> Iterator[tuple[str, ast.For]]:
    """Yield the loops of a method, each with the condition that it stands under."""
    for node in statements:
        if isinstance(node, ast.For):
            yield test, node
        elif isinstance(node, ast.If):
            yield from _loops(node.body, _renamed(node.test, {"self.config": "config"}))
        elif isinstance(node, ast.With):
            yield from _loops(node.body, test)


def _divided(loop: ast.For, block: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield path and divisor of each `block.path.weight.div_(divisor)`."""
    for node in ast.walk(loop):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=path, attr="weight"), attr="div_"),
                args=[divisor],
            ):
                owner, _, rest = ast.unparse(path).partition(".")
                if owner == block:
                    yield rest, divisor


def _renamed(node: ast.expr, names: dict[str, str]) -> str:
    return ast.unparse(_Renamed(names).visit(copy.deepcopy(node)))


class _Renamed(ast.NodeTransformer):
    """Give names and attributes other names."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:
        """Replace a node that is to have another name."""
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and (new := self.names.get(ast.unparse(node))) is not None
        ):
            return ast.parse(new, mode="eval").body
        return self.generic_visit(node)
