"""Objects that keep values by names: dataclasses, outputs of transformers, named tuples.

Generated code has none of them: what is given one is given each of its fields (`apart`), and what
returns one returns a tuple of them.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeGuard

from transformers.utils import ModelOutput

from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import (
    Code,
    Entries,
    Half,
    Items,
    Known,
    Value,
    either,
)

_NUMBERS = ("bool", "int", "float", "str")


class ByName(Value):
    """A value of a class that may be known, whose parts have names."""

    cls: type | None

    @property
    def entries(self) -> dict[str, Value]:
        """The parts by name."""
        raise NotImplementedError

    def having(self, entries: dict[str, Value]) -> Self:
        """Return it with other parts."""
        raise NotImplementedError

    @property
    def is_static(self) -> bool:
        """Whether all parts are."""
        return all(part.is_static for part in self.entries.values())

    def apart(self) -> dict[str, Value] | None:
        """Return its parts."""
        return self.entries

    def fact(self) -> Value:
        """Return it with the facts of its parts."""
        return self.having({key: part.fact() for key, part in self.entries.items()})

    def same_fact(self, other: Value) -> bool:
        """Whether the same is known of another one's parts."""
        own = self.entries
        return self.is_like(other) and all(
            own[key].same_fact(part) for key, part in other.entries.items()
        )

    def joined(self, other: Value) -> Value:
        """Return one with what holds for the parts of both; of anything else nothing is known."""
        if not self.is_like(other):
            return either(self, other)
        pairs = ((key, part, other.entries[key]) for key, part in self.entries.items())
        return self.having({key: _joined(one, two) for key, one, two in pairs})

    def as_parameter(self, parameter: str) -> Value:
        """Return it inside a function, which has its parts as parameters."""
        return self.having(
            {key: part.as_parameter(f"{parameter}_{key}") for key, part in self.entries.items()}
        )

    def is_like(self, other: Value) -> TypeGuard[Self]:
        """Whether another value is of the same class, and has parts of the same names."""
        if not isinstance(other, ByName) or type(self) is not type(other):
            return False
        both = [(each.cls, each.entries.keys(), each.apart() is None) for each in (self, other)]
        return both[0] == both[1]


@dataclass(frozen=True, eq=False)
class Output(ByName, Entries):
    """An object with fields, an output of transformers say."""

    fields: dict[str, Value]
    cls: type | None = None
    given: bool = field(default=False, kw_only=True)
    """Others have it, too: who calls the function that is evaluated, or a list."""
    told: str = field(default="", kw_only=True)
    """The field that is None where the object itself is; "": it never is."""
    stored: Callable[[ByName], ast.stmt] | None = field(default=None, kw_only=True)
    """Puts what has become of it into the list that it is from; None: it is from none."""

    @property
    def entries(self) -> dict[str, Value]:
        """The fields."""
        return self.fields

    @property
    def may_be_none(self) -> bool:
        """Whether it is, in some layers say."""
        return bool(self.told)

    def same_fact(self, other: Value) -> bool:
        """Whether the same is known of another one's fields, and of whether it is there."""
        return super().same_fact(other) and self.may_be_none == other.may_be_none

    def joined(self, other: Value) -> Value:
        """Return one with what holds for the fields of both; it may be None where one is."""
        if isinstance(other, Known) and other.value is None:
            return self.perhaps(lambda part: replace(part, optional=True))
        known = super().joined(other)
        if not isinstance(known, Output) or not isinstance(other, Output):
            return known
        told = {self.told, other.told} - {""}
        whole = [each.fields for each in (self, other) if not each.told]
        if len(told) > 1 or any(fields[key].may_be_none for key in told for fields in whole):
            return either(self, other)  # no field tells it for both
        return replace(known, told=min(told, default=""))

    def perhaps(self, change: Callable[[Code], Value]) -> Output:
        """Return it, or None: each field that is a constant or changed, so that it may be None.

        Raises:
            Untranslatable: no field would tell whether it is there.
        """
        parts: dict[str, Value] = {}
        for key, part in self.fields.items():
            if isinstance(part, Output):
                parts[key] = part.perhaps(change)
            else:
                parts[key] = change(part) if isinstance(part, Code) else part
        telling = [key for key, part in self.fields.items() if type(part) is Code]
        telling = [key for key in telling if not self.fields[key].may_be_none]
        if not (self.told or telling):
            self.code()  # which raises
        return replace(self, fields=parts, told=self.told or telling[0], given=True)

    def truth(self) -> bool | None:
        """Return that it counts as true, where its class does not say what does."""
        if self.told:
            return None
        asks = any(hasattr(self.cls, key) for key in ("__bool__", "__len__"))
        return None if asks and not issubclass(self.cls or object, ModelOutput) else True

    def having(self, entries: dict[str, Value]) -> Output:
        """Return it with other fields."""
        return replace(self, fields=entries)

    def code(self) -> ast.expr:
        """Raise: generated code has no such objects."""
        cls = "an object" if self.cls is None else f"the object {self.cls.__name__}(...)"
        raise Untranslatable(f"{cls} as a run-time value")

    def as_parameter(self, parameter: str) -> Value:
        """Return it inside a function, which has its fields as parameters, and may change them; not
        those of one that may be None.
        """
        known = super().as_parameter(parameter)
        assert isinstance(known, Output)
        return replace(known, given=known.may_be_none, stored=None)


@dataclass(frozen=True, eq=False)
class Named(ByName, Items):
    """A named tuple."""

    names: tuple[str, ...] = ()
    cls: type | None = None

    @property
    def entries(self) -> dict[str, Value]:
        """The items by their names."""
        return dict(zip(self.names, self.items, strict=True))

    def having(self, entries: dict[str, Value]) -> Named:
        """Return it with other items."""
        return replace(self, items=(*entries.values(),))

    def apart(self) -> dict[str, Value] | None:
        """Return its items, unless they are one complex table."""
        return None if self.whole is not None else self.entries

    def fact(self) -> Value:
        """Return it with the facts of its items."""
        return super().fact() if self.whole is None else self._of_table(self.whole.fact())

    def as_parameter(self, parameter: str) -> Value:
        """Return it inside a function, which has its items as parameters."""
        if self.whole is None:
            return super().as_parameter(parameter)
        return self._of_table(self.whole.as_parameter(parameter))

    def _of_table(self, table: Code) -> Named:
        return replace(self, items=(Half(table, 0), Half(table, 1)))


def _joined(one: Value, other: Value) -> Value:
    """Return what holds for two facts of a part."""
    if one.same_fact(other):
        return one
    return other.joined(one) if isinstance(other, Left) else one.joined(other)


def shared(item: Value) -> Value:
    """Return an object that others have, too, as code that may not change it has it."""
    return replace(item, given=True) if isinstance(item, Output) else item


def declared(facts: Mapping[str, Value], parameter: str) -> str | None:
    """Return the number or text that a class says a field is, which is a parameter of a function with
    these facts; None: it says nothing, or this is no field.
    """
    for key, fact in facts.items():
        if not isinstance(fact, ByName) or not parameter.startswith(f"{key}_"):
            continue
        parts = {f"{key}_{own}": part for own, part in fact.entries.items()}
        if parameter not in parts:
            return declared(parts, parameter)
        said = (
            inspect.get_annotations(fact.cls).get(parameter.removeprefix(f"{key}_"))
            if fact.cls
            else None
        )
        text = said.__name__ if isinstance(said, type) else said
        return text if text in _NUMBERS else None
    return None
