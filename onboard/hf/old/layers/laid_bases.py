"""Bases that classes of a repository were written for, laid between them and those of transformers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

from onboard.hf.parsed_code import parsed_code


def lay_under(
    module: ModuleType, is_theirs: Callable[[Any], bool], form_of: Callable[[type], type | None]
) -> Iterator[str]:
    """Lay bases under a module's own classes, one by one; a base that a constructor calls by its name
    is what they have. Yields what was done.

    Args:
        module: of a repository.
        is_theirs: whether a class is one of transformers that is made otherwise today.
        form_of: what a class of the module wants over its base; None: nothing.
    """
    own = [cls for cls in vars(module).values() if _is_heir(cls, module, is_theirs)]
    for theirs in {base: None for cls in own for base in cls.__bases__ if is_theirs(base)}:
        heirs = [cls for cls in own if theirs in cls.__bases__]
        forms = [form for cls in heirs if (form := form_of(cls)) is not None]
        if not forms:
            continue
        most: Any = max(forms, key=lambda form: len(form.__mro__))
        before = as_before(theirs, most)
        for cls in heirs:
            cls.__bases__ = tuple(before if base is theirs else base for base in cls.__bases__)
        for name in [key for key, value in vars(module).items() if value is theirs]:
            setattr(module, name, before)
        names = " and ".join(cls.__name__ for cls in heirs)
        yield f"{theirs.__name__} of transformers is made otherwise now; a stand-in is under {names}"


def _is_heir(cls: Any, module: ModuleType, is_theirs: Callable[[Any], bool]) -> bool:
    return (
        isinstance(cls, type)
        and cls.__module__ == module.__name__
        and any(map(is_theirs, cls.__bases__))
    )


def calls_of_base(cls: type) -> list[ast.Call]:
    """Return the calls of constructors by name in a class: `super().__init__(...)`."""
    calls = [x for x in ast.walk(parsed_code(cls)) if isinstance(x, ast.Call)]
    return [x for x in calls if isinstance(x.func, ast.Attribute) and x.func.attr == "__init__"]


@cache
def as_before(cls: Any, form: Any) -> Any:
    """Return a class of transformers with a form laid over it."""
    return type(f"{cls.__name__}AsBefore", (form, cls), {"__module__": cls.__module__})
