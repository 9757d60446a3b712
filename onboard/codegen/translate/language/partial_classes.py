"""Classes of modules that are given some arguments before they make any, `partial(Norm, eps=1e-6)`."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from torch import nn

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import Untranslatable, same_code
from onboard.codegen.translate.language.values import Value


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

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    def whole(self, more: Args) -> Args:
        """Return all arguments of a call that gives it more."""
        positional = [*self.given.positional, *more.positional]
        stars = [index + len(self.given.positional) for index in more.stars]
        return Args(positional, self.given.keywords | more.keywords, stars)


def partial_class(args: Args) -> Partial | None:
    """Return what `functools.partial(*args)` is of a class of modules; None of anything else."""
    called, rest = args.positional[0], Args(args.positional[1:], args.keywords, [])
    if args.stars or not args.static():
        return None
    if isinstance(called, Partial):
        return Partial(called.called, called.whole(rest))
    match called:
        case Global(obj=type() as cls) if issubclass(cls, nn.Module):
            return Partial(called, rest)
    return None
