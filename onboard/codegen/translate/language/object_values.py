"""Values that are objects of the program: functions, classes, the config, modules and their
methods.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from onboard.analysis.source import ModuleSource
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    same_code,
)
from onboard.codegen.translate.language.values import Code, Known, Mask, Unread, Value, either


@dataclass(frozen=True, eq=False)
class Global(Value):
    """An object that the module's namespace names: a function, a class, a module."""

    obj: Any
    expr: ast.expr

    def code(self) -> ast.expr:
        """Return its name."""
        return self.expr

    def same_as(self, other: Global) -> bool:
        """Whether both are one object."""
        return self.obj is other.obj

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    def fact(self) -> Value:
        """Return a class of modules itself; of others whether branches may depend on it: a dtype is
        a setting.
        """
        return self if is_class(self) else Code(name("_"), static=isinstance(self.obj, torch.dtype))


def is_class(value: Global) -> bool:
    """Whether an object is a class of modules."""
    return isinstance(value.obj, type) and issubclass(value.obj, nn.Module)


@dataclass(frozen=True, eq=False)
class Choice(Value):
    """One of two classes or functions; `test` is known once the config is."""

    test: ast.expr
    first: Value
    second: Value

    def code(self) -> ast.expr:
        """Return the choice."""
        return ast.IfExp(self.test, self.first.code(), self.second.code())


@dataclass(frozen=True, eq=False)
class Closure(Value):
    """A function that is defined inside another one, or a lambda."""

    node: ast.FunctionDef
    source: ModuleSource
    seen: dict[str, Value]
    """What the variables around it held when it was defined."""
    home: object = None
    """The frame of the function around it, in which they hold what they hold when it is called."""

    def code(self) -> ast.expr:
        """Raise: generated code has no functions inside others."""
        raise Untranslatable(f"the function {self.node.name} as a run-time value")

    @property
    def is_static(self) -> bool:
        """It is: which function it is does not depend on a tensor."""
        return True


@dataclass(frozen=True, eq=False)
class Repeated(Value):
    """A list or tuple of any length whose items are all the same."""

    item: Value
    expr: ast.expr

    def code(self) -> ast.expr:
        """Return the code that makes it."""
        return self.expr

    def same_as(self, other: Repeated) -> bool:
        """Whether the items of both are equal."""
        return self.item.equals(other.item)

    @property
    def is_static(self) -> bool:
        """Whether the item depends on config and constants only."""
        return self.item.is_static

    def fact(self) -> Value:
        """Return itself where its item is a constant."""
        return self if isinstance(self.item, Known) else Code(name("_"))

    def as_parameter(self, parameter: str) -> Value:
        """Return it under the parameter's name."""
        return replace(self, expr=name(parameter))


@dataclass(frozen=True, eq=False)
class Config(Value):
    """The model's config object, or that of a part of a multimodal model."""

    expr: ast.expr
    obj: Any
    copy: ast.expr | None = None
    """How it is copied, where code may change it from here on."""

    def code(self) -> ast.expr:
        """Return its path."""
        return self.expr

    def same_as(self, other: Config) -> bool:
        """Whether both are one object."""
        return self.obj is other.obj

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    def fact(self) -> Value:
        """Return itself."""
        return self

    def as_parameter(self, parameter: str) -> Value:
        """Return it under the parameter's name."""
        return Config(name(parameter), self.obj)


@dataclass(frozen=True, eq=False)
class Self(Value):
    """The module whose code is evaluated."""

    def code(self) -> ast.expr:
        """Return `self`."""
        return name("self")

    def same_as(self, other: Self) -> bool:
        """There is one."""
        return True


@dataclass(frozen=True, eq=False)
class Super(Value):
    """`super()`, or `super(C, self)`, which begins behind a class that it names."""

    after: type | None = None

    def code(self) -> ast.expr:
        """Return `super()`."""
        return call(name("super"))

    def same_as(self, other: Super) -> bool:
        """Whether both begin behind the same class."""
        return self.after is other.after


@dataclass(frozen=True, eq=False)
class PlainObject(Value):
    """An object of a class that is no module, in an attribute of `self`: what it keeps becomes
    attributes of `self` that begin with that attribute's name.
    """

    cls: type
    arguments: Any
    """`Args` of the call that makes it."""
    attr: str = ""

    def code(self) -> ast.expr:
        """Raise: generated code has no such objects."""
        raise Untranslatable(f"a {self.cls.__name__} elsewhere than in an attribute of its module")

    @property
    def is_static(self) -> bool:
        """It is: which object it is does not depend on a tensor."""
        return True


@dataclass(frozen=True, eq=False)
class Made:
    """A constructor call: class and arguments. They count for the class's translation once its
    forward is reached.
    """

    cls: type
    arguments: dict[str, Value] = field(default_factory=dict)

    def equals(self, other: Made) -> bool:
        """Whether another constructor call is certainly equal."""
        if self is other:
            return True
        if self.cls is not other.cls or self.arguments.keys() != other.arguments.keys():
            return False
        return all(self.arguments[key].equals(other.arguments[key]) for key in self.arguments)


def joined_ways(first: tuple[Made, ...], second: tuple[Made, ...]) -> tuple[Made, ...]:
    """Return the ways in which the modules of either list are made, each once."""
    return (*first, *(way for way in second if not any(way.equals(other) for other in first)))


@dataclass(frozen=True, eq=False)
class Instance(Value):
    """A module: made in one of the ways `made`, by `expr` (a constructor call) or found there (an
    attribute).
    """

    made: tuple[Made, ...]
    expr: ast.expr
    optional: bool = False
    """It may be None, as some configs have it."""

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes it may be of."""
        return tuple(dict.fromkeys(made.cls for made in self.made))

    def code(self) -> ast.expr:
        """Return its constructor call or path."""
        return self.expr

    def same_as(self, other: Instance) -> bool:
        """Whether both are made in the same ways by the same code."""
        ways = len(self.made) == len(other.made) and all(
            way.equals(own) for way, own in zip(self.made, other.made, strict=True)
        )
        return ways and self.optional == other.optional and same_code(self.expr, other.expr)

    @property
    def may_be_none(self) -> bool:
        """Whether it may be None."""
        return self.optional

    def truth(self) -> bool | None:
        """Return that a module counts as true."""
        return None if self.optional else True

    def fact(self) -> Value:
        """Return the ways in which it is made."""
        return self.as_parameter("_")

    def joined(self, other: Value) -> Value:
        """Return a module made in the ways of either."""
        if isinstance(other, Instance):
            return Instance(
                joined_ways(self.made, other.made), name("_"), self.optional or other.optional
            )
        return either(self, other)

    def as_parameter(self, parameter: str) -> Value:
        """Return it under the parameter's name."""
        return replace(self, expr=name(parameter))


@dataclass(frozen=True, eq=False)
class ModuleList(Value):
    """An nn.ModuleList of modules that are made in the given ways."""

    made: tuple[Made, ...]
    expr: ast.expr
    stretches: tuple[Instance | ModuleList, ...] = ()
    """The single modules and the lists of any length that it is put together of, as far as that is
    known.
    """
    own: type | None = None
    """The class of a repository's code that the list is of."""

    def code(self) -> ast.expr:
        """Return its constructor call or path."""
        return self.expr

    def same_as(self, other: ModuleList) -> bool:
        """Whether both are the same code."""
        return same_code(self.expr, other.expr)

    def fact(self) -> Value:
        """Return the ways in which its modules are made."""
        return ModuleList(self.made, name("_"), own=self.own)

    def same_fact(self, other: Value) -> bool:
        """Whether another list's modules are made in the same ways."""
        return isinstance(other, ModuleList) and all(
            len(joined_ways(one.made, two.made)) == len(one.made)
            for one, two in ((self, other), (other, self))
        )

    def joined(self, other: Value) -> Value:
        """Return a list of modules made in the ways of either."""
        if isinstance(other, ModuleList):
            return ModuleList(joined_ways(self.made, other.made), name("_"))
        return either(self, other)

    def as_parameter(self, parameter: str) -> Value:
        """Return it under the parameter's name."""
        return replace(self, expr=name(parameter))


@dataclass(frozen=True, eq=False)
class NamedModules(Code):
    """`{key: module for ...}` in a constructor, of modules that are made in these ways."""

    made: tuple[Made, ...] = ()


@dataclass(frozen=True, eq=False)
class ModuleTable(Value):
    """An nn.ModuleDict whose keys are known, with the modules and lists of modules in it."""

    entries: dict[str, Value]
    expr: ast.expr

    def code(self) -> ast.expr:
        """Return its constructor call or path."""
        return self.expr

    def same_as(self, other: ModuleTable) -> bool:
        """Whether both are the same code."""
        return same_code(self.expr, other.expr)

    def entry(self, key: str) -> Value:
        """Return what lies under a key, by its path."""
        path = (
            attribute(self.expr, key)
            if key.isidentifier()
            else ast.Subscript(self.expr, ast.Constant(key), ast.Load())
        )
        return replace(self.entries[key], expr=path)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class ModuleRows(Value):
    """An nn.ModuleList of lists, or tables, of modules, all of which are put together like `row`."""

    row: ModuleList | ModuleTable
    expr: ast.expr

    @property
    def made(self) -> tuple[Made, ...]:
        """The ways in which the modules of all rows are made."""
        return ways_of(self.row)

    def code(self) -> ast.expr:
        """Return its constructor call or path."""
        return self.expr

    def same_as(self, other: ModuleRows) -> bool:
        """Whether both are the same code."""
        return same_code(self.expr, other.expr)

    def fact(self) -> Value:
        """Return what its rows are put together of."""
        return self.as_parameter("_")

    def as_parameter(self, parameter: str) -> Value:
        """Return it under the parameter's name."""
        return replace(self, expr=name(parameter))

    def item(self, expr: ast.expr) -> ModuleList | ModuleTable:
        """Return a row that lies at a place."""
        return replace(self.row, expr=expr)


def ways_of(value: Value) -> tuple[Made, ...]:
    """Return the ways in which the modules in a value are made."""
    match value:
        case Instance(made=made) | ModuleList(made=made):
            return made
        case ModuleRows(row=row):
            return ways_of(row)
        case ModuleTable(entries=entries):
            every: tuple[Made, ...] = ()
            for entry in entries.values():
                every = joined_ways(every, ways_of(entry))
            return every
    return ()


@dataclass(frozen=True, eq=False)
class Method(Value):
    """`owner.name`, to be called."""

    owner: Value
    name: str

    def code(self) -> ast.expr:
        """Return the attribute."""
        return attribute(self.owner.code(), self.name)

    def same_as(self, other: Method) -> bool:
        """Whether both are the same method of equal owners."""
        return self.name == other.name and self.owner.equals(other.owner)


@dataclass(frozen=True, eq=False)
class LayerMask(Mask):
    """A mask in layers with attention, None in others."""


@dataclass(frozen=True, eq=False)
class SetApart(Unread):
    """An attribute that the constructor of another module sets, in its own way for each layer."""


@dataclass(frozen=True, eq=False)
class MaskMaker(Value):
    """A function that builds an attention mask, or a mask of padding alone."""

    padding: bool = False
    chunked: bool = False
    """The mask cuts the text into chunks of the config's length."""

    def same_as(self, other: MaskMaker) -> bool:
        """Whether both make masks of one kind."""
        return self.padding == other.padding

    @property
    def is_static(self) -> bool:
        """It is."""
        return True


@dataclass(frozen=True, eq=False)
class AttentionInterface(Value):
    """What transformers' attention dispatch returns: a function of q, k, v, mask and keywords."""

    def same_as(self, other: AttentionInterface) -> bool:
        """There is one."""
        return True
