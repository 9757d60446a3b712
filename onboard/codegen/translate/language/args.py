"""The evaluated arguments of a call."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onboard.codegen.translate.language.values import Code, Known, Value

_PLACES = ("device", "dtype")


@dataclass
class Args:
    """Evaluated arguments; `*opaque` parts stay code."""

    positional: list[Value]
    keywords: dict[str, Value]
    stars: list[int]
    """Positions of arguments that are written with a star."""

    def static(self) -> bool:
        """Whether all are static."""
        return all(each.is_static for each in (*self.positional, *self.keywords.values()))

    def known(self) -> bool:
        """Whether all are constants."""
        return all(
            isinstance(value, Known) for value in (*self.positional, *self.keywords.values())
        )

    def anywhere(self) -> Args:
        """Return those of a module's constructor without where it is, and in which dtype."""
        kept = {key: item for key, item in self.keywords.items() if key not in _PLACES}
        return replace(self, keywords=kept)

    def code(self) -> tuple[list[ast.expr], list[ast.keyword]]:
        """Return the arguments as code."""
        positional = [
            ast.Starred(value.code(), ast.Load()) if index in self.stars else value.code()
            for index, value in enumerate(self.positional)
        ]
        return positional, [ast.keyword(key, value.code()) for key, value in self.keywords.items()]


def spread(arguments: Mapping[str, Value]) -> dict[str, Value]:
    """Return arguments of a function, or facts about them, as generated code has them: in the place of
    an object its fields, of a class with some arguments these, `norm_eps` of
    `norm=partial(Norm, eps=1e-6)`.
    """
    given: dict[str, Value] = {}
    for key, value in arguments.items():
        parts = value.apart()
        given |= (
            {key: value}
            if parts is None
            else spread({f"{key}_{own}": each for own, each in parts.items()})
        )
    return given


def plain_call(function: ast.expr, args: Args, static: bool = False) -> Code:
    """Return a call that stays as it is."""
    positional, keywords = args.code()
    return Code(ast.Call(function, positional, keywords), static)


def is_static_call(function: Any, args: Args) -> bool:
    """Whether a call depends on config and constants only: PyTorch's functions make tensors."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return args.static() and not str(module).startswith("torch")
