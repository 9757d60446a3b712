"""Classes under translation and their translated functions."""

from __future__ import annotations

import ast
from collections.abc import Container
from dataclasses import dataclass, field

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.handed.left_in_arguments import Left, Path
from onboard.codegen.translate.language.holes import Hole
from onboard.codegen.translate.language.values import NONE, Value


@dataclass(frozen=True)
class Change:
    """A part of an argument that a function changes."""

    path: Path
    left: Left | None
    """What it is for callers where nobody reads it; None: the function returns it."""


@dataclass
class Routine:
    """A translated function: the parameters that are left, its body and its result."""

    node: ast.FunctionDef
    source: ModuleSource
    parameters: list[str] = field(default_factory=list)
    body: list[ast.stmt] = field(default_factory=list)
    shape: Value = NONE
    holes: int = 0
    static: bool = False
    """It returns one value that depends on config and constants only."""
    argument_facts: dict[str, Value] = field(default_factory=dict)
    """What all uses of the function have in common, with which it was translated; of an object its
    fields.
    """
    given: Value | None = None
    """The result, when the function only returns some of its parameters."""
    optional: set[str] = field(default_factory=set)
    """Parameters that may be None."""
    plain: bool = False
    """It is as the repository has it: nothing of it was evaluated."""
    changes: list[Change] = field(default_factory=list)

    @property
    def handed_back(self) -> list[Path]:
        """The parts of its arguments that it returns beside its result, in order."""
        return [change.path for change in self.changes if change.left is None]

    def take(self, keys: set[str], facts: dict[str, Value]) -> None:
        """Take other parameters, too, in the order of the signature; note which may be None."""
        order = [item.arg for item in (*self.node.args.args, *self.node.args.kwonlyargs)]
        if keys:
            wanted = {*self.parameters, *keys}
            known = dict.fromkeys((*self.argument_facts, *order, *self.parameters, *sorted(keys)))
            self.parameters = [key for key in known if key in wanted]
        counted = {"position_ids"}  # a call that has none passes those of the caller
        self.optional = {
            key for key in self.parameters if key in facts and facts[key].may_be_none
        } - counted
        if keys:  # those that other classes' calls have come first
            self.parameters.sort(key=lambda key: key in self.optional - keys)

    def omitting(self, given: Container[str]) -> list[str]:
        """Return the parameters that a call passes: not the last ones that it has nothing for and
        that may be None.
        """
        passed = list(self.parameters)
        while passed and passed[-1] in self.optional and passed[-1] not in given:
            passed.pop()
        return passed

    @property
    def keeps_one(self) -> bool:
        """Whether it makes one tensor of one, as nn.Identity does, so that either may be called."""
        first = self.node.args.args[1].arg if len(self.node.args.args) > 1 else None
        return self.parameters == [first] and isinstance(self.shape, Hole)


@dataclass(eq=False)
class ClassState:
    """A class under translation."""

    cls: type
    attributes: dict[str, Value] = field(default_factory=dict)
    init: Routine | None = None
    methods: dict[str, Routine] = field(default_factory=dict)
    guards: list[ast.expr] = field(default_factory=list)
    weights_only: list[str] = field(default_factory=list)
    """Modules and parameters that nothing reads: they hold weights that checkpoints have."""
    sometimes: set[str] = field(default_factory=set)
    """Attributes that `__init__` sets under a condition only."""
    inherits_init: bool = False
    """Its `__init__` is PyTorch's."""
    fills_window: bool = False
    """Its code puts the window of attention's mask into a mask of its own."""
    read_outside: set[str] = field(default_factory=set)
    """Attributes that other classes read."""

    def has(self, attr: str) -> bool:
        """Whether `self.attr` exists."""
        return attr in self.attributes or hasattr(self.cls, attr)


class Restart(Exception):
    """Facts grew: what was translated with the old ones is void."""
