"""Stand-ins for torch, and for what of transformers needs it, as long as a process lives.

Model files, config classes and this package's operators are imported as they are and meet them.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from onboard.runtime.sketch import modules
from onboard.runtime.sketch.functions import FUNCTIONS
from onboard.runtime.sketch.storage import DTYPES, MEMORY, DType, Size, UnsureError
from onboard.runtime.sketch.tensor import Tensor, promote_types

_READ = (
    "transformers.configuration_utils",
    "transformers.modeling_rope_utils",
    "transformers.activations",
    "transformers.generation.configuration_utils",
    "transformers.integrations.heterogeneity",
    "transformers.utils.type_validators",
    "transformers.models",
)
"""Modules of transformers that are its own, with those below them; of any other one there is
none.
"""
_PACKAGES = (
    "transformers",
    "transformers.generation",
    "transformers.integrations",
    "transformers.utils",
    "transformers.models",
)
"""Packages whose `__init__`, which looks through all of transformers, is left out."""

_importing = True


@contextmanager
def known_alone() -> Iterator[None]:
    """Refuse to call what has no rule meanwhile; else modules that do so can be imported."""
    global _importing
    _importing = False
    try:
        yield
    finally:
        _importing = True


class Unknown:
    """Something that has no rule: it may be named, and be a base or a decorator while modules are
    imported.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is decorated; raise `UnsureError` once modules are there."""
        if not _importing:
            raise UnsureError(self.__name__)
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated and not isinstance(args[0], Unknown) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __getitem__(self, _: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        raise UnsureError(self.__name__)

    def __bool__(self) -> bool:
        if not _importing:
            raise UnsureError(self.__name__)
        return False


class _Silent:
    """A logger that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _StandIn(ModuleType):
    """A module of which only some is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        found = Unknown(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


@dataclass
class _Argument:
    name: str
    default_value: Any


class _Schema:
    """The arguments of an operator, as torch names them."""

    def __init__(self, signature: inspect.Signature) -> None:
        self.arguments = [
            _Argument(name, each.default) for name, each in signature.parameters.items()
        ]


class _Packet:
    """An operator of this package: it notes its calls and gives shapes by its own rule."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self.function = self.fake = function
        self.signature = inspect.signature(function)
        self.default = self.overloadpacket = self
        self._schema = _Schema(self.signature)

    def register_fake(self, fake: Callable[..., Any]) -> None:
        self.fake = fake

    def __call__(self, *args: Any, **hinted: Any) -> Any:
        # Hints for several ranks are no arguments of its function, and mean nothing here
        kwargs = {
            name: value for name, value in hinted.items() if name in self.signature.parameters
        }
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if MEMORY.tokens:
            CALLS.append((self.__name__, dict(bound.arguments)))
        return self.fake(*args, **kwargs)


class Node:
    """A call of an operator as a graph has it; an argument that is a tensor is a node, too."""

    name = "a call"

    def __init__(self, target: Any, arguments: Mapping[str, Any], value: Any = None) -> None:
        self.target, self.args, self.meta = target, (), {"val": value}
        self.kwargs = {name: _as_node(each) for name, each in arguments.items()}


def _as_node(value: Any) -> Any:
    return Node(None, {}, value) if isinstance(value, Tensor) else value


CALLS: list[tuple[str, dict[str, Any]]] = []
"""The operators that were called, in order, with all their arguments."""


def _custom_op(name: str, function: Callable[..., Any], **_: Any) -> _Packet:
    packet = _Packet(name.partition("::")[2], function)
    setattr(sys.modules["torch"].ops.onboard, packet.__name__, packet)
    return packet


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for torch's modules and for most of transformers'."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a stand-in, what is to be read of transformers, or None for any other module."""
        top = name.partition(".")[0]
        if top == "transformers" and _is_read(name) and name not in _PACKAGES:
            if (found := PathFinder.find_spec(name, path)) is None or not _is_package(found):
                return found
            folders = found.submodule_search_locations
            if name.startswith("transformers.models."):  # its __init__ is of no use
                spec = ModuleSpec(name, self, is_package=True)
                spec.submodule_search_locations = folders
                return spec
            return found
        if top not in ("torch", "transformers", "safetensors"):
            return None
        spec = ModuleSpec(name, self, is_package=True)
        if name in _PACKAGES:
            spec.submodule_search_locations = [str(self.folder.joinpath(*name.split(".")[1:]))]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None


def _is_read(name: str) -> bool:
    return any(name == each or name.startswith(each + ".") for each in _READ)


def install() -> None:
    """Put the stand-ins in place, for good."""
    found = PathFinder.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    sys.meta_path.insert(0, _Finder(Path(found.origin).parent))
    sys.modules["triton"] = None  # type: ignore[assignment]
    _fill_torch()
    import transformers

    transformers.__version__ = version("transformers")
    utils: Any = importlib.import_module("transformers.utils")
    utils.is_torch_available = lambda: True
    utils.logging.get_logger = lambda *_: _Silent()
    utils.PushToHubMixin = type("PushToHubMixin", (), {"push_to_hub": lambda self: None})


_SHORT = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "cfloat": "complex64",
}


def _fill_torch() -> None:
    import torch
    import torch._ops
    import torch.fx
    import torch.library
    import torch.nn.functional
    import torch.nn.init
    import torch.utils._pytree

    importlib.import_module("torch.ops.onboard")
    stand_in: Any = torch
    for name, value in {**DTYPES, **FUNCTIONS}.items():
        setattr(stand_in, name, value)
    for short, name in _SHORT.items():
        setattr(stand_in, short, DTYPES[name])
    stand_in.Tensor, stand_in.Size, stand_in.dtype = Tensor, Size, DType
    stand_in.get_default_dtype = lambda: MEMORY.default
    stand_in.promote_types = promote_types
    stand_in.inf, stand_in.pi = math.inf, math.pi
    stand_in.library.custom_op = _custom_op
    stand_in._ops.OpOverload = _Packet
    stand_in.fx.Node = Node
    for name in ("normal_", "uniform_", "zeros_", "ones_", "constant_", "trunc_normal_"):
        setattr(stand_in.nn.init, name, lambda value, *_, **__: value)
    for name, value in modules.NAMES.items():
        setattr(stand_in.nn, name, value)
    for name, value in FUNCTIONS.items():
        setattr(stand_in.nn.functional, name, value)
