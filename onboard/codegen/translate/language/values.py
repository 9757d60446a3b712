"""What is known of a value while code is evaluated partially.

Every value can be turned back into code (`Value.code`); what is known lets branches be decided and
arguments dropped. Values of one mechanism (attention's scores, say) stand in its module.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from onboard.codegen.translate.language.forms import COMPLEX, DICT, ROWS, SEVERAL_ROWS, TUPLE
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    constant,
    mentions,
    name,
    renamed,
    same_code,
)


class Value:
    """A value of the evaluated program: by itself no code, never None, and certainly equal to
    itself alone.
    """

    lazy: ClassVar[bool] = False
    """A variable that holds it has no assignment of its own: it means other variables."""
    annotation: ClassVar[str | None] = None
    """Its type in a signature, where that is none of PyTorch's or Python's."""

    def code(self) -> ast.expr:
        """Return the code that computes it.

        Raises:
            Untranslatable: no code does.
        """
        raise Untranslatable(f"a {type(self).__name__} as a run-time value")

    def same_as(self, other: Any) -> bool:
        """Whether another value of the same class is certainly equal."""
        return False

    def equals(self, other: Value) -> bool:
        """Whether another value is certainly equal."""
        return self is other or (type(self) is type(other) and self.same_as(other))

    @property
    def is_static(self) -> bool:
        """Whether it depends on config and constants only."""
        return False

    @property
    def may_be_none(self) -> bool:
        """Whether it is None, or may be when the program runs."""
        return False

    def truth(self) -> bool | None:
        """Return whether it counts as true, or None when that is not known."""
        return True

    def parts(self) -> list[Value]:
        """Return the values that it is put together of."""
        return []

    def mapped(self, change: Callable[[Value], Value]) -> Value:
        """Return the same put together of changed parts."""
        return self

    def mentions(self, variable: str) -> bool:
        """Whether its code reads a variable."""
        return any(part.mentions(variable) for part in self.parts())

    def renamed(self, old: str, new: str) -> Value:
        """Return it with another name for a variable."""
        return self.mapped(lambda part: part.renamed(old, new))

    def fact(self) -> Value:
        """Return what a function may know of it as an argument: of run-time values their kind."""
        return Code(name("_"))

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same."""
        return self.equals(other)

    def joined(self, other: Value) -> Value:
        """Return the fact that holds for two uses of a function, of each of which one holds."""
        return either(self, other)

    def as_parameter(self, parameter: str) -> Value:
        """Return a fact as the value of the parameter inside the function."""
        return self

    def passed(self, fact: Value | None) -> ast.expr:
        """Return its code as an argument of a function that was translated with a fact about it."""
        return self.code()

    def apart(self) -> dict[str, Value] | None:
        """Return what a function is given in its place, by the ends of the parameters' names; None: it
        is given itself.
        """
        return None


@dataclass(frozen=True)
class Known(Value):
    """A Python constant that holds whatever the config says."""

    value: Any

    def code(self) -> ast.expr:
        """Return the literal."""
        return constant(self.value)

    def same_as(self, other: Known) -> bool:
        """Whether both are the same constant, of one type."""
        return type(self.value) is type(other.value) and bool(self.value == other.value)

    @property
    def is_static(self) -> bool:
        """It is."""
        return True

    @property
    def may_be_none(self) -> bool:
        """Whether it is None."""
        return self.value is None

    def truth(self) -> bool:
        """Return Python's truth."""
        return bool(self.value)

    def fact(self) -> Value:
        """Return itself."""
        return self


@dataclass(frozen=True, eq=False)
class Code(Value):
    """A value that exists at run time only: the expression that computes it."""

    expr: ast.expr
    static: bool = False
    """It depends on config and constants only (not on a tensor), so it may be None or decide a
    branch.
    """
    transposed: bool = False
    """The value is `expr.transpose(1, 2)`: heads and sequence are swapped later, or never."""
    form: str | None = None
    """One of `forms`, or None."""
    optional: bool = False
    """It may be None."""
    masked: bool = False
    """Its value needs a mask, which generated code does not have: it may become attention, but not
    be read.
    """
    unread: ClassVar[str] = ""
    """Why only attention may take it."""
    typed: ClassVar[bool] = False
    """A function that it is passed to is translated for values of its class, and is given `expr`
    alone.
    """
    returned: ClassVar[bool] = False
    """A function that returns `expr` alone gives its callers a value of its class."""

    def code(self) -> ast.expr:
        """Return the expression, with the transposition that was put off."""
        if self.masked:
            raise Untranslatable("attention scores that are read once they are masked")
        if self.unread:
            raise Untranslatable(self.unread)
        if self.transposed:
            return call(attribute(self.expr, "transpose"), ast.Constant(1), ast.Constant(2))
        return self.expr

    def as_seen(self) -> Code:
        """Return it as modules give it to one another."""
        return self

    def same_as(self, other: Any) -> bool:
        """Whether both are the same code."""
        return same_code(self.expr, other.expr) and bool(self.transposed == other.transposed)

    @property
    def is_static(self) -> bool:
        """Whether it depends on config and constants only."""
        return self.static

    @property
    def may_be_none(self) -> bool:
        """Whether it may be None."""
        return self.optional

    def truth(self) -> bool | None:
        """Return that it is not known."""
        return None

    def mentions(self, variable: str) -> bool:
        """Whether its code reads a variable."""
        return mentions(self.expr, variable)

    def renamed(self, old: str, new: str) -> Value:
        """Return it with another name for a variable."""
        return replace(self, expr=renamed(self.expr, old, new))

    def fact(self) -> Code:
        """Return its kind: class or form, and whether it is static or may be None."""
        return self.as_parameter("_")

    def same_fact(self, other: Value) -> bool:
        """Whether two facts say the same."""
        if not isinstance(other, Code) or type(self) is not type(other):
            return False
        return (self.static, self.form, self.optional) == (other.static, other.form, other.optional)

    def joined(self, other: Value) -> Value:
        """Return what holds for both."""
        if (
            isinstance(other, Code)
            and self.form != other.form
            and COMPLEX in (self.form, other.form)
        ):
            raise Untranslatable("an argument that is a complex RoPE table here, and not there")
        return either(self, other)

    def as_parameter(self, parameter: str) -> Code:
        """Return it as a function knows it that is given it."""
        if self.typed:
            return replace(self, expr=name(parameter))
        return Code(name(parameter), self.static, form=self.form, optional=self.optional)

    def passed(self, fact: Value | None) -> ast.expr:
        """Return the expression alone for a function that knows the class."""
        return self.expr if self.typed and type(self) is type(fact) else self.code()

    def of_result(self, parts: Sequence[Code], index: int) -> Code:
        """Return it as a result with these run-time parts has it, its own from `index` on."""
        return replace(self, expr=parts[index].expr)


@dataclass(frozen=True, eq=False)
class Unread(Value):
    """A value without a translation, of a variable that nothing may read."""

    reason: str
    blocks: tuple[str, ...] = ()
    """The classes whose code led there."""

    def code(self) -> ast.expr:
        """Raise what is in the way."""
        raise Untranslatable(self.reason, self.blocks)

    def truth(self) -> bool | None:
        """Raise what is in the way."""
        raise Untranslatable(self.reason, self.blocks)


@dataclass(frozen=True, eq=False)
class Half(Value):
    """cos (part 0) or sin (part 1) of a complex rotary embedding."""

    whole: Code
    part: int

    def same_as(self, other: Half) -> bool:
        """Whether both are the same part of one table."""
        return self.part == other.part and same_code(self.whole.expr, other.whole.expr)

    def truth(self) -> bool | None:
        """Return that it is not known."""
        return None


@dataclass(frozen=True, eq=False)
class Items(Value):
    """A tuple or list of known length."""

    items: tuple[Value, ...]
    kind: str = TUPLE
    """`TUPLE`, or `LIST`."""
    lazy = True

    @property
    def whole(self) -> Code | None:
        """The complex table that this is cos and sin of; None: it is something else."""
        match self.items:
            case (Half(whole=whole, part=0), Half(whole=other, part=1)) if same_code(
                whole.expr, other.expr
            ):
                return whole
        return None

    def code(self) -> ast.expr:
        """Return the tuple."""
        if self.whole is not None:
            return self.whole.expr
        return ast.Tuple([item.code() for item in self.items], ast.Load())

    def same_as(self, other: Items) -> bool:
        """Whether all items are equal."""
        pairs = zip(self.items, other.items, strict=False)
        return len(self.items) == len(other.items) and all(one.equals(two) for one, two in pairs)

    @property
    def is_static(self) -> bool:
        """Whether all items are."""
        return all(item.is_static for item in self.items)

    def truth(self) -> bool:
        """Return whether there are any."""
        return bool(self.items)

    def parts(self) -> list[Value]:
        """Return the items."""
        return list(self.items)

    def mapped(self, change: Callable[[Value], Value]) -> Items:
        """Return changed items."""
        return replace(self, items=tuple(map(change, self.items)))

    def fact(self) -> Value:
        """Return a tuple at run time, of constants or a complex table, or any other; masks stay."""
        masks = not self.is_static and all(isinstance(item, Known | Mask) for item in self.items)
        match self.items:
            case items if masks or (not items and self.kind == TUPLE):
                return self
            case (Half(whole=whole), Half()):
                return Code(name("_"), form=whole.form)
        if self.items and all(isinstance(i, Code) and i.form == ROWS for i in self.items):
            return Code(name("_"), form=SEVERAL_ROWS)
        static = all(isinstance(item.fact(), Known) for item in self.items)
        return Code(name("_"), static, form=self.kind)


@dataclass(frozen=True, eq=False)
class Entries(Value):
    """A value with named parts."""

    lazy = True

    @property
    def entries(self) -> dict[str, Value]:
        """The parts by name."""
        raise NotImplementedError

    def same_as(self, other: Entries) -> bool:
        """Whether both have the same parts."""
        own, others = self.entries, other.entries
        return own.keys() == others.keys() and all(own[key].equals(others[key]) for key in own)

    def parts(self) -> list[Value]:
        """Return the parts."""
        return list(self.entries.values())

    def mapped(self, change: Callable[[Value], Value]) -> Value:
        """Return changed parts under the same names."""
        changed = {key: change(item) for key, item in self.entries.items()}
        return replace(self, **{fields(self)[0].name: changed})


@dataclass(frozen=True, eq=False)
class Mapping(Entries):
    """A dict with known keys."""

    items: dict[str, Value]

    @property
    def entries(self) -> dict[str, Value]:
        """The items."""
        return self.items

    def code(self) -> ast.expr:
        """Return the dict."""
        return ast.Dict(
            [ast.Constant(key) for key in self.items], [item.code() for item in self.items.values()]
        )

    @property
    def is_static(self) -> bool:
        """Whether all items are."""
        return all(item.is_static for item in self.items.values())

    def truth(self) -> bool:
        """Return whether there are any."""
        return bool(self.items)

    def fact(self) -> Value:
        """Return itself where all items are constants or masks."""
        plain = all(isinstance(item, Known | Mask) for item in self.items.values())
        return self if plain else Code(name("_"), form=DICT)

    def as_parameter(self, parameter: str) -> Value:
        """Return one of the function's own, of the same items."""
        return Mapping(dict(self.items))


@dataclass(frozen=True, eq=False)
class Mask(Value):
    """A causal attention mask: it may only reach the attention interface, whose canonical op is
    causal by itself. A `whole` one is [batch, 1, queries, keys].
    """

    whole: bool = field(default=False, kw_only=True)

    def code(self) -> ast.expr:
        """Raise: generated code has none."""
        raise Untranslatable("attention that reads its mask")

    def same_as(self, other: Mask) -> bool:
        """Whether both are of one class."""
        return True

    def fact(self) -> Value:
        """Return itself."""
        return self

    def joined(self, other: Value) -> Value:
        """Return a mask of either kind."""
        return PaddingMask() if isinstance(other, Mask) else either(self, other)


@dataclass(frozen=True, eq=False)
class PaddingMask(Mask):
    """A mask that is None without padding, as layers without attention get; or one of either kind."""


NONE = Known(None)


def either(one: Value, other: Value) -> Code:
    """Return what two facts have in common: whether it is static, a dict, or may be None."""
    static = all(item.is_static and not item.lazy for item in (one, other))
    optional = one.may_be_none or other.may_be_none
    dicts = all(
        getattr(each.fact(), "form", None) == DICT or isinstance(each, Mapping)
        for each in (one, other)
    )
    return Code(name("_"), static, form=DICT if dicts else None, optional=optional)


def untransposed(value: Value) -> Code:
    """Return a transposed value's code as it lies in memory."""
    assert isinstance(value, Code)
    return replace(value, transposed=False)
