"""Where code is evaluated: the function's variables, the class it belongs to, the statements that are left of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from torch import nn

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.env import Env
from onboard.codegen.translate.syntax import name
from onboard.codegen.translate.values import Code, Items, Known, Mapping, Value

if TYPE_CHECKING:
    from onboard.codegen.translate.classes import Translator
    from onboard.codegen.translate.state import ClassState


@dataclass
class Frame:
    """One function under evaluation."""

    translator: Translator
    source: ModuleSource
    kind: Literal["init", "forward", "function"]
    cls: ClassState | None = None
    """The class whose method this is."""
    owner: type | None = None
    """The class of the MRO in which the method is written; `super()` starts behind it."""
    env: Env = field(default_factory=Env)
    out: list[ast.stmt] = field(default_factory=list)
    returns: list[tuple[ast.Return, Value]] = field(default_factory=list)
    caller: ClassState | None = None
    """The class from whose code a helper function is called: it may be handed a method of it."""
    branches: int = 0
    """How many bodies of loops and undecided branches it lies in."""
    loops: list[Env] = field(default_factory=list)
    """The loops that the evaluated statement lies in: the variables before each."""
    layers: list[nn.Module] | None = None
    """The modules of the class that get to the evaluated branch; None: no branch tells."""

    numbered: list[tuple[str, str, str]] = field(default_factory=list)
    """Of each loop over modules and their numbers: the variables of both, and the attribute that holds the modules."""
    items: dict[str, Value] = field(default_factory=dict)
    """Variables of such loops whose modules can only be of some classes in the evaluated branch."""

    @contextmanager
    def loop(self, start: Env) -> Iterator[None]:
        """Evaluate the body of a loop; `start` are the variables before it."""
        self.loops.append(start)
        try:
            yield
        finally:
            self.loops.pop()

    def emit(self, statement: ast.stmt, origin: ast.AST | None = None) -> None:
        """Append a statement to what is left of the function; `origin` is the statement it stands for."""
        if origin is not None:
            ast.copy_location(statement, origin)
        self.out.append(statement)

    @contextmanager
    def branch(self, env: Env) -> Iterator[list[ast.stmt]]:
        """Evaluate a branch: on a copy of the variables, into its own statements."""
        saved = self.env, self.out
        self.env, self.out = env, []
        self.branches += 1
        try:
            yield self.out
        finally:
            self.env, self.out = saved
            self.branches -= 1

    def bind(self, variable: str, value: Value, origin: ast.AST | None = None) -> None:
        """Assign a value to a local variable; run-time values leave an assignment behind."""
        self.protect(variable, origin)
        if isinstance(value, Code) and not value.masked:
            if not (isinstance(value.expr, ast.Name) and value.expr.id == variable):
                self.emit(ast.Assign([name(variable, store=True)], value.expr), origin)
            value = replace(value, expr=name(variable))
        if isinstance(value, Mapping):
            value = Mapping({key: self._once(f"{variable}_{key}", item, origin) for key, item in value.items.items()})
        self.env.values[variable] = value

    def _once(self, variable: str, value: Value, origin: ast.AST | None) -> Value:
        """Give what a module of `self` computes for a dict a name of its own: the dict may be read many times."""
        match value:
            case Code(expr=ast.Call(func=ast.Attribute(value=ast.Name(id="self")))) if variable.isidentifier():
                own = self.fresh(variable)
                self.emit(ast.Assign([name(own, store=True)], value.expr), origin)
                self.env.values[own] = replace(value, expr=name(own))
                return self.env.values[own]
        return value

    def fresh(self, stem: str) -> str:
        """Return a variable name that is not taken."""
        taken = {key for key in self.env.values} | {
            node.id for statement in self.out for node in ast.walk(statement) if isinstance(node, ast.Name)
        }
        return next(item for item in (stem, *(f"{stem}_{index}" for index in range(1, 1000))) if item not in taken)

    def protect(self, variable: str, origin: ast.AST | None) -> None:
        """Save the old value of `variable` where tuples or dicts in other variables still mean it."""
        for key, value in list(self.env.values.items()):
            if key != variable and value.lazy and value.mentions(variable):
                if key.isidentifier() and _is_computed(value, variable):
                    self.emit(ast.Assign([name(key, store=True)], value.code()), origin)
                    self.env.values[key] = Code(name(key))
                    continue
                copy = self.fresh(f"{variable}_before")
                self.emit(ast.Assign([name(copy, store=True)], name(variable)), origin)
                self.env.values[key] = value.renamed(variable, copy)


def _is_computed(value: Value, variable: str) -> bool:
    """Whether a value is a tuple with parts computed from `variable`, as shapes are, and so best kept whole."""
    if not isinstance(value, Items):
        return False
    plain = all(isinstance(item, Known) or (type(item) is Code and not item.transposed) for item in value.items)
    bare = any(isinstance(item, Code) and ast.unparse(item.expr) == variable for item in value.items)
    return plain and not bare
