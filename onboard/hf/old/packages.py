"""Packages that a model's code imports and that are not installed.

Most serve training, or kernels of a GPU. What a forward pass may need of them has its torch form
here; any other name can be imported, and says which package to install when it is called.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from onboard.hf.old import einops_forms
from onboard.hf.old.gone import Gone


def _first(item: Any, *_: Any, **__: Any) -> Any:
    return item


def _nothing(*_: Any, **__: Any) -> None:
    return None


FORMS: dict[str, Any] = {
    "einops.rearrange": einops_forms.rearrange,
    "einops.repeat": einops_forms.repeat,
    "timm.models.layers.drop_path": _first,
    "timm.layers.drop_path": _first,
    "accelerate.init_empty_weights": contextlib.nullcontext,
    "transformers_stream_generator.init_stream_support": _nothing,
}
"""What names of packages that are missing compute, in inference."""
WHOLE = ("einops",)
"""Packages whose every use is in `FORMS`: code that asks whether they are there is told so."""


class _Absent(ModuleType):
    """A module of a package that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, leaf: str) -> Any:
        if leaf.startswith("__"):
            raise AttributeError(leaf)
        full = f"{self.__name__}.{leaf}"
        package = full.split(".")[0]
        return FORMS.get(full, Gone(full, f"pip install {package.replace('_', '-')}"))


def is_missing(package: str) -> bool:
    """Whether a package is not installed; one that is stood in for is missing, too."""
    known = sys.modules.get(package)
    return isinstance(known, _Absent) or (known is None and find_spec(package) is None)


def missing(packages: Iterable[str]) -> list[str]:
    """Return those of the packages that are neither installed nor stood in for, sorted."""
    return sorted({name for name in packages if name not in sys.modules and is_missing(name)})


def stand_in(module: str) -> list[str]:
    """Make a module of a package that is not installed importable; return what to say of it."""
    parts = module.split(".")
    names = [".".join(parts[: length + 1]) for length in range(len(parts))]
    for name in names:
        if name not in sys.modules:
            sys.modules[name] = _Absent(name)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, sys.modules[name])
    return [f"the package {parts[0]} is not installed; {module} is stood in for"]


def provide_whole() -> list[str]:
    """Stand in for the packages that nothing is missing of."""
    return [fact for name in missing(WHOLE) for fact in stand_in(name)]


def asked_for(error: BaseException, packages: Iterable[str]) -> list[str]:
    """Return the missing packages that an error's text names, however it writes them."""
    text = re.sub(r"\W|_", "", str(error)).lower()
    return [name for name in missing(packages) if name.replace("_", "").lower() in text]
