"""How each layer's weight lies in the files of a checkpoint of which only the config is here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.quantised.methods.settings import pattern_of
from onboard.quantised.read_method import read_method
from onboard.quantised.said import said_in_config, said_in_files
from onboard.quantised.weight import Layout, Method

_EXCLUDED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Keys with the modules that are left as they are."""
_IN_LAYERS = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class ConfigLayouts:
    """What a config, or a file beside it, says of layers."""

    method: Method
    excluded: tuple[str, ...]
    """Names and patterns of modules that are left as they are."""
    named: Mapping[str, str]
    """What the config calls modules, by their names in transformers' model."""

    @classmethod
    def of(
        cls, config: Mapping[str, Any], folder: Path, rename: Callable[[str], str] = str
    ) -> ConfigLayouts | None:
        """Read a parsed config.json; None: nothing says that weights are quantised. `rename` gives
        names of a checkpoint's tensors as transformers' model has them.

        Raises `OnboardError` for a method, a scheme or a key that is not read.
        """
        if (method := read_method(config, folder)) is None:
            return None
        said = _said(config, folder)
        excluded, own = tuple(map(str, _names(said))), said.get("quantized_layers")
        layers = own if isinstance(own, Mapping) else {}
        names = filter(_IN_LAYERS.search, [*excluded, *map(str, layers)])
        named = {rename(f"{name}.weight").removesuffix(".weight"): name for name in names}
        return cls(method, excluded, named)

    def layout_of(self, module: str, *, is_stack: bool = False) -> Layout | None:
        """Return how a linear layer, or a stack of experts, lies; None: as an unquantised model's, as
        all do that are in none of its layers.
        """
        if _IN_LAYERS.search(module) is None:
            return None
        module = self._as_named(module)
        only_stacks = self.method.description.startswith("mxfp4")
        is_left = any(_is_meant(pattern, module) for pattern in self.excluded)
        return None if is_left or only_stacks > is_stack else self.method.layout_of(module)

    def _as_named(self, module: str) -> str:
        """Return what the config calls a module, as far as it names it, or one that it is in."""
        path = module
        while path and path not in self.named:
            path = path.rpartition(".")[0]
        return self.named[path] + module.removeprefix(path) if path else module


def _said(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    beside = (values for _, values in said_in_files(folder))
    said = said_in_config(config) or next(beside, {})
    inner = said.get("quantization")
    return inner if isinstance(inner, Mapping) else said


def _names(said: Mapping[str, Any]) -> Iterator[Any]:
    for key in _EXCLUDED:
        value = said.get(key)
        yield from value if isinstance(value, list) else []


def _is_meant(pattern: str, module: str) -> bool:
    """Tell whether a module is one of those that a list of a config names: by a pattern, with "*", or
    as a part of its path.
    """
    if pattern.startswith("re:"):
        return pattern_of("its config", pattern.removeprefix("re:")).match(module) is not None
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."
