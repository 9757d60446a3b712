"""Where code is evaluated: the function's variables, the class it belongs to, the statements that
are left of it.

What evaluation asks of others goes through the frame: `Program` is the translation of the whole
model, `Mechanism` what modeling code has besides plain Python.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import nn

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.env import Env, Turn, is_computed
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.holes import Result, fill
from onboard.codegen.translate.language.object_values import Closure, Instance, PlainObject
from onboard.codegen.translate.language.sequences import at_run_time
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import NONE, Code, Items, Mapping, Value

GIVEN = "given."
"""Begins the names under which a function's arguments lie, whatever becomes of its parameters."""
Sides = Sequence[tuple[Value, list[ast.stmt]]]


@dataclass
class Frame:
    """One function under evaluation."""

    translator: Program
    source: ModuleSource
    kind: Literal["init", "forward", "function"]
    cls: ClassState | None = None
    """The class whose method this is."""
    owner: type | None = None
    """The class of the MRO in which the method is written; `super()` starts behind it."""
    env: Env = field(default_factory=Env)
    out: list[ast.stmt] = field(default_factory=list)
    returns: list[tuple[ast.Return, Value]] = field(default_factory=list)
    left: dict[ast.Return, dict[str, Value]] = field(default_factory=dict)
    """What has become of the arguments where it returns."""
    changed: dict[tuple[str, ...], None] = field(default_factory=dict)
    """The parts of its arguments that it puts something into, in order."""
    caller: ClassState | None = None
    """The class from whose code a helper function is called: it may be handed a method of it."""
    outer: list[list[ast.stmt]] = field(default_factory=list)
    """What is left of the bodies around the branch that is evaluated; `behind` comes next there."""
    behind: Sequence[ast.stmt] = ()
    remembers: bool = False
    """The evaluated statements are those of a first call, which leaves tables for later ones."""
    branches: int = 0
    """How many bodies of loops and undecided branches it lies in."""
    loops: list[Env] = field(default_factory=list)
    """The loops that the evaluated statement lies in: the variables before each."""
    turns: list[Turn] = field(default_factory=list)
    """Those of the function itself, with those that are run turn by turn."""
    layers: list[nn.Module] | None = None
    """The modules of the class that get to the evaluated branch; None: no branch tells."""
    names: dict[str, str] = field(default_factory=dict)
    """Other names of the source's variables, in a body that stands in the place of a call."""
    numbered: list[tuple[str, str, str]] = field(default_factory=list)
    """Of each loop over modules and their numbers: the variables of both, and the attribute that
    holds the modules.
    """
    items: dict[str, Value] = field(default_factory=dict)
    """Variables of such loops whose modules can only be of some classes in the evaluated branch."""

    def name_of(self, variable: str) -> str:
        """Return what a variable of the source is called here."""
        return self.names.get(variable, variable)

    def reading(self, text: str) -> ast.expr:
        """Return an expression of the source, with what its variables are called here."""
        expr = ast.parse(text, mode="eval").body
        for node in ast.walk(expr):
            if isinstance(node, ast.Name):
                node.id = self.name_of(node.id)
        return expr

    @property
    def mechanisms(self) -> Mechanism:
        """What is asked before anything is taken for plain Python."""
        return self.translator.mechanisms

    def evaluate(self, node: ast.expr) -> Value:
        """Return what is known of an expression's value; statements that it needs first are
        emitted.
        """
        return self.translator.evaluate(node, self)

    def code(self, node: ast.expr) -> ast.expr:
        """Return the code that is left of an expression."""
        return self.settle(self.evaluate(node)).code()

    def settle(self, value: Value) -> Value:
        """Give a call's result with several parts a name, so that its parts can be told apart."""
        if not isinstance(value, Result):
            return value
        variable = self.fresh("outputs")
        return self.bind_result(
            value, [f"{variable}_{index}" for index in range(value.holes)], None
        )

    def bind_result(self, result: Result, names: Sequence[str], origin: ast.AST | None) -> Value:
        """Emit `a, b = call(...)` and return the call's value in terms of the names."""
        targets: list[ast.expr] = [name(item, store=True) for item in names]
        target = targets[0] if len(names) == 1 else ast.Tuple(targets, ast.Store())
        for item in names:
            self.env.values.setdefault(item, NONE)
        self.emit(ast.Assign([target], result.expr), origin)
        return fill(
            result.shape, [Code(name(item), transposed=result.transposed) for item in names]
        )

    def emit(self, statement: ast.stmt, origin: ast.AST | None = None) -> None:
        """Append a statement to what is left of the function; `origin` is the statement it stands
        for.
        """
        if origin is not None:
            ast.copy_location(statement, origin)
        self.out.append(statement)

    @contextmanager
    def branch(self, env: Env) -> Iterator[list[ast.stmt]]:
        """Evaluate a branch: on a copy of the variables, into its own statements."""
        saved = self.env, self.out
        self.outer = [*self.outer, self.out]
        self.env, self.out = env, []
        self.branches += 1
        try:
            yield self.out
        finally:
            self.env, self.out = saved
            self.outer = self.outer[:-1]
            self.branches -= 1

    def bind(self, variable: str, value: Value, origin: ast.AST | None = None) -> None:
        """Assign a value to a local variable; run-time values leave an assignment behind."""
        stays = isinstance(value, Code) and ast.unparse(value.expr) == variable
        specialised = self.translator.specialised
        tuples = self.env.tuples_with(value, variable) if specialised else {}
        if not stays:
            self.protect(variable, origin, tuples)
        if isinstance(value, Code) and not value.masked:
            if not stays:
                self.emit(ast.Assign([name(variable, store=True)], value.expr), origin)
            value = replace(value, expr=name(variable))
        if isinstance(value, Instance) and self._is_made_once(value):
            self.emit(ast.Assign([name(variable, store=True)], value.expr), origin)
            value = replace(value, expr=name(variable))
        if isinstance(value, Items) and specialised:
            value = value.mapped(self.settle)  # a loop may read them many times
        if isinstance(value, Mapping):
            value = Mapping(
                {
                    key: self._once(f"{variable}_{key}", item, origin)
                    for key, item in value.items.items()
                }
            )
        self.env.values |= {**tuples, variable: value}

    def _is_made_once(self, module: Instance) -> bool:
        """Whether a constructor makes a module that others of it may share, outside of any loop, or
        takes one from an iterator.
        """
        if any(isinstance(node, ast.Name) and node.id == "next" for node in ast.walk(module.expr)):
            return True
        made = isinstance(module.expr, ast.Call) and self.kind == "init" and not self.loops
        return made and self.translator.specialised

    def _once(self, variable: str, value: Value, origin: ast.AST | None) -> Value:
        """Give what a module of `self` computes for a dict a name of its own: the dict may be read
        many times.
        """
        match value:
            case Code(expr=ast.Call(func=ast.Attribute(value=ast.Name(id="self")))) if (
                variable.isidentifier()
            ):
                own = self.fresh(variable)
                self.emit(ast.Assign([name(own, store=True)], value.expr), origin)
                self.env.values[own] = replace(value, expr=name(own))
                return self.env.values[own]
        return value

    def fresh(self, stem: str) -> str:
        """Return a variable name that is not taken."""
        taken = {key for key in self.env.values} | {
            node.id
            for statement in self.out
            for node in ast.walk(statement)
            if isinstance(node, ast.Name)
        }
        return next(
            item
            for item in (stem, *(f"{stem}_{index}" for index in range(1, 1000)))
            if item not in taken
        )

    def protect(self, variable: str, origin: ast.AST | None, but: Collection[str] = ()) -> None:
        """Save the old value of `variable` where tuples or dicts of others, `but` some, mean it."""
        for key, value in list(self.env.values.items()):
            if key not in (variable, *but) and value.lazy and value.mentions(variable):
                if key.isidentifier() and is_computed(value, variable):
                    kept = at_run_time(value) if self.translator.specialised else None
                    kept = kept or Code(value.code())
                    self.emit(ast.Assign([name(key, store=True)], kept.expr), origin)
                    self.env.values[key] = replace(kept, expr=name(key))
                    continue
                copy = self.fresh(f"{variable}_before")
                self.emit(ast.Assign([name(copy, store=True)], name(variable)), origin)
                self.env.values[key] = value.renamed(variable, copy)


class Mechanism:
    """What modeling code may have besides plain Python: attention's scores, masks, convolutions,
    ...

    The language asks its mechanisms, in their order, before it takes anything for plain Python: the
    first that does not answer None has answered. Each says what it knows by overriding what it
    needs; here nothing is known.
    """

    def unary(self, op: ast.unaryop, operand: Value) -> Value | None:
        """Return `op operand`."""
        return None

    def binary(self, op: ast.operator, left: Value, right: Value, frame: Frame) -> Value | None:
        """Return `left op right`."""
        return None

    def compare(self, op: ast.cmpop, left: Value, right: Value) -> Value | None:
        """Return `left op right`."""
        return None

    def subscript(self, owner: Value, index: ast.expr, frame: Frame) -> Value | None:
        """Return `owner[index]`, whose index is not evaluated yet."""
        return None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """Return `owner[index]`; `node` is the code."""
        return None

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """Return `owner.attr`."""
        return None

    def own_attribute(
        self, cls: ClassState, attr: str, path: ast.expr, frame: Frame
    ) -> Value | None:
        """Return an attribute that the `__init__` of a class sets, read from `path`."""
        return None

    def name(self, obj: object, frame: Frame) -> Value | None:
        """Return what a global name means."""
        return None

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Return `function(*args)` of a function or class of the module's namespace; `expr` names
        it.
        """
        return None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Return `callee(*args)` of anything else."""
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """Return `owner.attr(*args)`."""
        return None

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value | None:
        """Return `self.attr(*args)`."""
        return None

    def given(self, result: Value, module: Instance) -> Value | None:
        """Return the result of calling a translated module as its caller sees it."""
        return None

    def returned(self, value: Value) -> Value | None:
        """Return what a function gives that returns `value`."""
        return None

    def stored(self, value: Value) -> Value | None:
        """Return what a variable holds to which `value` is assigned."""
        return None

    def set_attribute(self, attr: str, value: Value, frame: Frame) -> Value | None:
        """Return what `__init__` assigns to `self.attr`."""
        return None

    def joined(self, sides: Sides) -> Value | None:
        """Return what a variable holds behind a branch: one value or the other, and the statements
        that lead there.
        """
        return None

    def loop(self, node: ast.For, frame: Frame) -> Literal[True] | None:
        """Write a loop in another way; True where that is done."""
        return None

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """Write the first of some statements in another way; return those that are left."""
        return None

    def decided(self, node: ast.If, frame: Frame) -> bool | None:
        """Return which side of a branch is taken for a reason of the mechanism's."""
        return None

    def rest(self, statement: ast.stmt, after: Sequence[ast.stmt], frame: Frame) -> ast.stmt | None:
        """Return what stands for the statements after an executed one, to the end of the body."""
        return None

    def forward(self, cls: ClassState, node: ast.FunctionDef, frame: Frame) -> Routine | None:
        """Return the forward of a class that is not translated."""
        return None

    def init_body(
        self, cls: ClassState, body: list[ast.stmt], program: Program
    ) -> list[ast.stmt] | None:
        """Return what is written for the statements of a class's `__init__`."""
        return None

    def finish(self, program: Program) -> None:
        """Add what the whole translation has to take for granted; raise `Untranslatable` where that
        does not hold.
        """


class Program(Protocol):
    """What evaluation asks of the translation of a whole model, of which a function is a part."""

    model: nn.Module
    """A tiny instance; it decides branches of which only one side has a translation."""
    config: Any
    findings: Findings
    mechanisms: Mechanism
    """All of them, as one."""
    states: dict[type, ClassState]
    functions: dict[str, Routine]
    globals: dict[str, tuple[Any, ModuleSource]]
    argument_facts: dict[tuple[str, str], dict[str, Value]]
    wanted: set[tuple[object, tuple[str, ...]]]
    """What functions return of the arguments that they change, since somebody reads it."""
    windowed: set[ClassState]
    """Classes with code that makes masks with a window."""
    own_norms: set[str]
    """Names of PyTorch's norms that the file needs its own subclass of."""
    knows_masks: bool
    """Functions that make masks are not translated: masks are known as such."""
    changed: dict[str, Value]
    """What the model's constructor makes of attributes of the config before it makes anything."""
    specialised: bool
    """Branches on the config are decided, and guarded, as this config has them."""
    decides_switches: bool = False
    """Truth values, texts and None of this config are constants to what they are handed."""
    hands_switches: bool = False
    """Something is handed what may be one."""
    pairs_positions: bool
    """Distances were found between counted positions, which tell nothing of the batch."""
    implementation: str
    """How attention runs, by the config: code that asks its table for a name of none that it knows
    gets the canonical op. Where that leads nowhere, that of small models."""
    writes_positions: bool
    """Counted positions stay `torch.arange`, as they are written."""
    positions: str | None
    """The form of the positions that the model is given, where it counts these as well."""

    @property
    def counts_positions(self) -> bool:
        """Whether transformers' model counts positions: what it counts is `position_ids` here."""

    def want(self, function: object, path: tuple[str, ...]) -> None:
        """Have a function return a part of an argument that it changes."""

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """Return what is known of an expression's value; emit what it needs first."""

    def decide(self, node: ast.expr, test: Value, frame: Frame) -> bool:
        """Return a static condition's value in this config, one for all modules of the class."""

    def guard(self, condition: ast.expr, frame: Frame) -> None:
        """Have `__init__` assert what this translation takes for granted."""

    def modules_of(self, cls: type) -> list[nn.Module]:
        """Return the modules of a class in the small model."""

    def remember_global(self, identifier: str, obj: Any, source: ModuleSource) -> None:
        """Note that residual code may mention a global name."""

    def translates(self, cls: type) -> bool:
        """Whether a module class is translated from its source (and not PyTorch's own)."""

    def is_helper(self, obj: Any) -> bool:
        """Whether a function is translated from its source."""

    def has_method(self, cls: type, attr: str) -> bool:
        """Whether a class has a method that is translated from its source."""

    def reached(self, module: Instance) -> list[ClassState]:
        """Return the states of a module's classes; how it is made becomes facts of theirs."""

    def construct(self, cls: type, args: Args) -> Instance:
        """Return the module that `cls(*args)` makes."""

    def call_module(
        self, module: Instance, args: Args, frame: Frame, attr: str = "forward"
    ) -> Value:
        """Return the result of calling a submodule, or one of its methods."""

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value:
        """Return `self.attr(...)`."""

    def call_super(self, attr: str, args: Args, frame: Frame, base: type | None = None) -> Value:
        """Return `super().attr(...)`, or `Base.attr(self, ...)` of a base that is named."""

    def call_autograd(self, cls: type, args: Args, frame: Frame) -> Value:
        """Return `cls.apply(...)`."""

    def call_function(self, function: Any, args: Args, frame: Frame) -> Value:
        """Return a helper's result."""

    def call_source(
        self, node: ast.FunctionDef, source: ModuleSource, args: Args, frame: Frame
    ) -> Value:
        """Return the result of a helper whose definition is given."""

    def make_object(self, made: PlainObject, attr: str, frame: Frame) -> PlainObject:
        """Write what the constructor of an object does into that of the module that keeps it."""

    def call_object(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value:
        """Return what a method of an object gives."""

    def call_closure(self, closure: Closure, args: Args, frame: Frame) -> Value:
        """Return what a function gives that is defined inside another one."""
