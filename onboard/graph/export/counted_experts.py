"""Builds a model with a few experts of each mixture, for one whose size alone is wanted.

Most of the time that a large mixture takes to be built goes into experts that are made alike. A
list that is filled one by one, with modules that only hold weights, gets the first of them; of the
others the constructor's arguments are compared, and they are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from torch import nn

from onboard.graph.export.layer_kinds import UnlikeError, holds_weights_only, note_unbuilt

_PLAIN = (bool, int, float, str, type(None))

Call = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def few_experts(count: int) -> Iterator[None]:
    """Have each list of experts that is built meanwhile hold `count` of them, two at least.

    The list notes how many more there should be. Raises `UnlikeError` for experts that are not made
    alike.
    """
    extend = nn.ModuleList.extend

    def extend_by_few(members: nn.ModuleList, modules: Iterable[nn.Module]) -> nn.ModuleList:
        if isinstance(modules, Iterator) and not len(members):
            modules = _few(members, modules, count)
        return extend(members, modules)

    with _replaced(nn.ModuleList, "extend", extend_by_few):
        yield


def _few(members: nn.ModuleList, modules: Iterator[nn.Module], count: int) -> Iterator[nn.Module]:
    """Yield the modules to build: all of them unless they only hold weights, else the first
    `count`.
    """
    first = list(islice(modules, 1))
    if not first or not holds_weights_only(first[0]):
        yield from chain(first, modules)
        return
    with _replaced(type(first[0]), "__init__", _constructor(type(first[0]), count - 1)):
        yield from chain(first, islice(modules, count - 1))
        note_unbuilt(members, sum(_is_unbuilt(module, type(first[0])) for module in modules))


def _constructor(module_class: type[nn.Module], wanted: int) -> Callable[..., None]:
    """Return a constructor that makes `wanted` modules and leaves those empty that would be like
    the last of them.
    """
    initialise, calls = module_class.__init__, list[Call]()

    def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if len(calls) < wanted:
            calls.append((args, kwargs))
            initialise(module, *args, **kwargs)
        elif not _are_equal(calls[-1], (args, kwargs)):
            raise UnlikeError(
                f"modules of the class {module_class.__name__} in one list are made in different ways"
            )

    return construct


def _are_equal(one: Call, other: Call) -> bool:
    """Whether two calls have the same arguments: the same objects, or equal numbers and words."""
    if len(one[0]) != len(other[0]) or one[1].keys() != other[1].keys():
        return False
    pairs = [*zip(one[0], other[0], strict=True), *((one[1][key], other[1][key]) for key in one[1])]
    return all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b) for a, b in pairs
    )


def _is_unbuilt(module: nn.Module, module_class: type[nn.Module]) -> bool:
    """Return True for a module that the constructor left empty; raise `UnlikeError` for any
    other.
    """
    if type(module) is not module_class or vars(module):
        raise UnlikeError(f"modules of the class {module_class.__name__} share a list with others")
    return True


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    """Let a class have another method meanwhile."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
