"""Classes of modules that are given some arguments before they make any, `partial(Norm, eps=1e-6)`, and
what a constructor knows of classes that it is handed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeGuard

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args, plain_call, spread
from onboard.codegen.translate.language.object_values import Global, is_class
from onboard.codegen.translate.language.trees.syntax import Untranslatable, same_code
from onboard.codegen.translate.language.values import Unread, Value


@dataclass(frozen=True, eq=False)
class Partial(Value):
    """A class of modules with some arguments of its constructor."""

    called: Global
    given: Args

    def code(self) -> ast.expr:
        """Raise: generated code names the class, and all arguments, where it makes a module."""
        called = ast.unparse(self.called.expr)
        raise Untranslatable(f"{called} with some of its arguments as a run-time value")

    def same_as(self, other: Partial) -> bool:
        """Whether both make the same module of the same further arguments."""
        one, two = (plain_call(each.called.expr, each.given).expr for each in (self, other))
        return self.called.same_as(other.called) and same_code(one, two)

    def fact(self) -> Value:
        """Return the class, with what is known of its arguments."""
        return self._mapped(lambda _, value: value.fact())

    def same_fact(self, other: Value) -> bool:
        """Whether the same is known of another one."""
        own = self.arguments
        return self.is_like(other) and all(
            own[key].same_fact(value) for key, value in other.arguments.items()
        )

    def joined(self, other: Value) -> Value:
        """Return what holds for both of two partials of one class."""
        if not self.is_like(other):
            return SeveralClasses("a class of modules that is handed here, and another one there")
        others = other.arguments
        return self._mapped(
            lambda key, value: value if value.same_fact(others[key]) else value.joined(others[key])
        )

    def as_parameter(self, parameter: str) -> Value:
        """Return it in a constructor, which has its arguments as parameters of their own (`spread`)."""
        return self._mapped(lambda key, value: value.as_parameter(f"{parameter}_{key}"))

    def is_like(self, other: Value) -> TypeGuard[Partial]:
        """Whether another value is the same class with the same arguments given."""
        return (
            isinstance(other, Partial)
            and self.called.same_as(other.called)
            and self.arguments.keys() == other.arguments.keys()
        )

    def apart(self) -> dict[str, Value]:
        """Return its arguments."""
        return self.arguments

    @property
    def arguments(self) -> dict[str, Value]:
        """Its arguments, the positional ones by their number."""
        return {str(at): value for at, value in enumerate(self.given.positional)} | (
            self.given.keywords
        )

    def _mapped(self, change: Callable[[str, Value], Value]) -> Partial:
        positional = [change(str(at), value) for at, value in enumerate(self.given.positional)]
        keywords = {key: change(key, value) for key, value in self.given.keywords.items()}
        return replace(self, given=replace(self.given, positional=positional, keywords=keywords))

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    def whole(self, more: Args) -> Args:
        """Return all arguments of a call that gives it more."""
        positional = [*self.given.positional, *more.positional]
        stars = [index + len(self.given.positional) for index in more.stars]
        return Args(positional, self.given.keywords | more.keywords, stars)


class SeveralClasses(Unread):
    """A parameter of a constructor that is handed several classes, of which one at least has a
    translation of its own.
    """

    def same_fact(self, other: Value) -> bool:
        """Whether another one is handed several, too."""
        return isinstance(other, SeveralClasses)

    def joined(self, other: Value) -> Value:
        """Return itself."""
        return self


def joined_classes(one: Value, other: Value) -> Value | None:
    """Return what holds for two uses of a parameter that is handed classes of modules; None where
    generated code may be handed what it is.
    """
    for first, second in ((one, other), (other, one)):
        if isinstance(first, Partial | SeveralClasses):
            return first.joined(second)
        if isinstance(first, Global) and is_class(first) and not _is_of_torch(first):
            return SeveralClasses(f"{first.obj.__name__} or another class as a run-time value")
    return None


def _is_of_torch(cls: Global) -> bool:
    return str(cls.obj.__module__).startswith("torch.")


def class_of(value: Value | None) -> type | None:
    """Return the class of modules that a value makes, with all arguments or some; None of others."""
    cls = value.called if isinstance(value, Partial) else value
    return cls.obj if isinstance(cls, Global) and is_class(cls) else None


def parameter_of(
    key: str, facts: Mapping[str, Value], node: ast.FunctionDef
) -> tuple[ast.FunctionDef, str]:
    """Return the constructor that has a parameter, and its name there: that of a partial's class, for
    an argument that it gives, else the constructor `node` with these facts.
    """
    for parameter, fact in facts.items():
        if not isinstance(fact, Partial) or not key.startswith(f"{parameter}_"):
            continue
        own = key.removeprefix(f"{parameter}_")
        found = find_method(fact.called.obj, "__init__")
        if found is not None and key in spread({parameter: fact}):
            names = [item.arg for item in found[1].args.args[1:]]
            own = names[int(own)] if own.isdigit() else own
            return parameter_of(own, fact.arguments, found[1])
    return node, key


def partial_class(args: Args) -> Partial | None:
    """Return what `functools.partial(*args)` is of a class of modules; None of anything else."""
    called, rest = args.positional[0], Args(args.positional[1:], args.keywords, [])
    if args.stars or not args.static():
        return None
    if isinstance(called, Partial):
        return Partial(called.called, called.whole(rest))
    return Partial(called, rest) if isinstance(called, Global) and is_class(called) else None
