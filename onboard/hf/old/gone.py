"""What stands for something that is not there: it can be imported, named, asked after and
inherited from, and refuses to compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Never

from torch import nn

from onboard.errors import OnboardError

_importing = 0
_kept: list[str] = []
"""Names of what constructors made and kept without asking anything of it."""
_keeping = True


class Gone:
    """A name that was imported and is not there."""

    name: str
    hint: str | Callable[[], str]
    """What to do; asked for when it is needed, where more than this may be missing by then."""
    __name__: str

    def __init__(self, name: str, hint: str | Callable[[], str] = "Use its own version") -> None:
        self.__dict__.update(name=name, hint=hint, __name__=name.rpartition(".")[2])

    def __getattr__(self, leaf: str) -> Gone:
        if leaf.startswith("__"):
            raise AttributeError(leaf)
        return Gone(f"{self.name}.{leaf}", self.hint)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Stand for a decorated function while a file is imported, and for what a constructor makes,
        which may be for images alone; later raise `OnboardError`.
        """
        if _keeping and not _importing and _in_constructor(sys._getframe(1)):
            _kept.append(self.name)
            return self
        return self if _importing else self.refuse()

    __add__ = __radd__ = __call__  # of what a file makes tables of, while it is imported

    def refuse(self) -> Never:
        """Raise `OnboardError`: what is not there is needed."""
        hint = self.hint if isinstance(self.hint, str) else self.hint()
        raise OnboardError(f"the model's code uses {self.name}, which is not here", hint=hint)

    __iter__ = None  # which Python would make of the items

    def __getitem__(self, _: Any) -> Gone:
        """Stand for a type with parameters, as annotations have."""
        return Gone(self.name, self.hint)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type(self.__name__, (), {"__init__": lambda item, *_, **__: self.refuse()}),)

    def __instancecheck__(self, item: object) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<{self.name}, which is not here>"


class GoneModule(ModuleType):
    """A module that is not there: any name can be imported from it."""

    def __init__(self, name: str, shown: str, hint: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._told = shown, hint

    def __getattr__(self, leaf: str) -> Gone:
        if leaf.startswith("__"):
            raise AttributeError(leaf)
        shown, hint = self._told
        return Gone(f"{shown}.{leaf}", hint)


def _in_constructor(frame: FrameType | None) -> bool:
    """Whether a module's constructor calls, itself or by way of helpers, and no forward of one."""
    while frame is not None:
        code, first = frame.f_code, frame.f_locals.get("self")
        if isinstance(first, nn.Module) and code.co_name in ("__init__", "forward"):
            return code.co_name == "__init__"
        frame = frame.f_back
    return False


def keep_nothing() -> bool:
    """From here on constructors make nothing of what is not there: code failed that had kept some.
    Whether it had.
    """
    global _keeping
    had, _keeping = _keeping and bool(_kept), False
    return had


@contextmanager
def importing() -> Iterator[None]:
    """Let files be imported that use what is gone as decorators, or in tables that they make."""
    global _importing
    _importing += 1
    try:
        yield
    finally:
        _importing -= 1
