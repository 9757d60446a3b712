"""What catches the calls of torch, of modules and of functions while a model runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onboard.codegen.straight.recorders import Recorder, bound
from onboard.codegen.straight.straight_lines import NotStraight, Own, Straight
from onboard.codegen.straight.torch_calls import SAME, named

_READ = {"__get__", "size", "dim", "stride", "numel", "ndimension", "nelement", "element_size",
    "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "get_device",
    "__len__", "__hash__", "data_ptr", "is_same_size", "has_names", "is_inference",
    "type", "__repr__", "__format__", "is_tensor", "untyped_storage", "_is_view"}  # fmt: skip
"""Calls that may give no tensor: what these say is of its kind alone."""
_MODES = {"_set_grad_enabled", "set_grad_enabled", "is_grad_enabled", "is_autocast_enabled",
    "get_default_dtype", "is_inference_mode_enabled", "get_autocast_dtype"}  # fmt: skip
"""Calls that say how things are computed, which the comparison with real texts looks at."""
_KEPT_VIEWS = ("T", "mT", "H", "mH", "real", "imag")


@dataclass
class Watched:
    """What was recorded of a run."""

    classes: Collection[type]
    leaves: Collection[Any]
    """Functions whose calls are recorded as such."""
    package: str
    stack: list[Recorder | None] = field(default_factory=list)
    """The recordings under way, the innermost last; None: what runs is a call in one."""
    found: dict[type, list[tuple[nn.Module, Straight, Recorder]]] = field(default_factory=dict)
    known: dict[int, tuple[Recorder, Any]] = field(default_factory=dict)
    """What was computed so far, by this recording or an earlier one: code may keep it."""
    single: set[int] = field(default_factory=set)
    """Numbers of tokens, or of texts, that something was decided for."""
    failed: dict[type, str] = field(default_factory=dict)
    """Why a class has none. Code may catch errors: the first counts."""

    @property
    def recorder(self) -> Recorder | None:
        """What the running code is recorded by."""
        return self.stack[-1] if self.stack else None

    def fail(self, reason: str) -> None:
        """Note why the class that is recorded has no straight form."""
        recorder = self.recorder
        if recorder is not None:
            self.failed.setdefault(type(recorder.module), reason + _at(self.place()))

    @contextmanager
    def inside(self, recorder: Recorder | None) -> Iterator[None]:
        """Let a recording, or none, be the innermost."""
        self.stack.append(recorder)
        try:
            yield
        finally:
            self.stack.pop()

    def note(self, kind: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call."""
        if self.recorder is None:
            return
        is_torchs = kind in ("function", "method")
        given = {k: v for k, v in kwargs.items() if not (is_torchs and _is_usual(k, v))}
        try:
            self.recorder.call(kind, target, args, given, result, self.place())
        except NotStraight as error:
            self.fail(str(error))

    def place(self) -> tuple[str, int]:
        """Return file and line of the model's own code that runs."""
        frame = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).split(".")[0] == self.package:
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return "", 0


def _is_usual(name: str, value: Any) -> bool:
    """Whether a keyword is one that torch's functions add, or says what is so without it."""
    return name == "_stacklevel" or value is None or (name == "inplace" and value is False)


def _at(place: tuple[str, int]) -> str:
    return f" at {place[0].rpartition('/')[2]}:{place[1]}" if place[1] else ""


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Record what the forwards of classes do."""
    with ExitStack() as stack:
        original = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _call_module(watched, original, module, args, kwargs)

        stack.enter_context(mock.patch.object(nn.Module, "__call__", called))
        for owner in {_owner(cls) for cls in watched.classes}:
            _enter(stack, watched, owner)
        for name, function in _named_leaves(watched):
            replaced = _leaf(watched, name[1], function)
            stack.enter_context(mock.patch.dict(vars(sys.modules[name[0]]), {name[1]: replaced}))
        stack.enter_context(_Functions(watched))
        # A table by sizes has one entry for each symbol, as it has one for each length
        stack.enter_context(mock.patch.object(torch.SymInt, "__hash__", lambda n: hash(str(n.node.expr))))  # fmt: skip
        yield


def _named_leaves(watched: Watched) -> list[tuple[tuple[str, str], Any]]:
    own = [key for key in sys.modules if key.split(".")[0] == watched.package]
    return [
        ((module, name), value)
        for module in own
        for name, value in vars(sys.modules[module]).items()
        if inspect.isfunction(value) and value in watched.leaves
    ]


def _owner(cls: type) -> type:
    return next(item for item in cls.__mro__ if "forward" in vars(item))


def _enter(stack: ExitStack, watched: Watched, owner: Any) -> None:
    """Have the innermost forward of a class, which decorators and this program wrap, recorded."""
    outer = vars(owner)["forward"]
    inner = inspect.unwrap(outer)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _record(watched, inner, self, args, kwargs)

    forward.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]
    if outer is inner:
        stack.enter_context(mock.patch.object(owner, "forward", forward))
        return
    wrapper = outer
    while wrapper.__wrapped__ is not inner:
        wrapper = wrapper.__wrapped__
    cells = [cell for cell in wrapper.__closure__ or () if cell.cell_contents is inner]
    if not cells:
        watched.failed[owner] = "its forward has a decorator"
    for cell in cells:
        cell.cell_contents = forward
        stack.callback(setattr, cell, "cell_contents", inner)


def _record(
    watched: Watched, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    recorder = watched.recorder
    wanted = type(module) in watched.classes
    if not wanted or (recorder is not None and recorder.module is module):
        return forward(module, *args, **kwargs)
    made = Recorder(module, bound(forward, module, args, kwargs), watched.known)
    with watched.inside(made):
        result = forward(module, *args, **kwargs)
        try:
            straight = made.finish(result)
            watched.found.setdefault(type(module), []).append((module, straight, made))
        except NotStraight as error:
            watched.fail(f"it returns {error}")
    return result


def _call_module(
    watched: Watched, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    recorder = watched.recorder
    path = recorder.modules.get(id(module)) if recorder is not None else None
    if path is None:
        return call(module, *args, **kwargs)
    with watched.inside(None):
        result = call(module, *args, **kwargs)
    if recorder is not None and isinstance(module, (nn.Dropout, nn.Identity)):
        recorder.same(args[0], result)
    else:
        watched.note("module", Own(path), args, kwargs, result)
    return result


def _leaf(watched: Watched, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with watched.inside(None):
            result = function(*args, **kwargs)
        watched.note("own", name, args, kwargs, result)
        return result

    return called


class _Functions(TorchFunctionMode):
    """Records calls of torch's functions and of tensors' methods."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        watched = self.watched
        if watched.recorder is None:
            return function(*args, **kwargs)
        try:
            return self._recorded(function, args, kwargs, watched.recorder)
        except NotStraight as error:
            watched.fail(str(error))
            return function(*args, **kwargs)

    def _recorded(self, function: Any, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return self._attribute(function, args, kwargs, recorder)
        if name in _READ:
            result = function(*args, **kwargs)
            if not isinstance(result, torch.Tensor):
                return result
            self.watched.note(*named(function), args, kwargs, result)
            return result
        if name in _MODES:
            return function(*args, **kwargs)
        if name in ("__setitem__", "__set__", "__delitem__") or kwargs.get("out") is not None:
            raise NotStraight(f"it changes a tensor in place ({name})")
        kind, target = named(function)
        if name not in SAME and (_in_place(name) or kwargs.get("inplace")):
            return self._changed(function, kind, target, args, kwargs, recorder)
        result = function(*args, **kwargs)
        if name in SAME or _is_dropout(name, args, kwargs):
            recorder.same(args[0], result)
        elif isinstance(result, torch.Tensor | tuple | list):
            self.watched.note(kind, target, args, kwargs, result)
        return result

    def _attribute(self, function: Any, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        result = function(*args, **kwargs)
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name == "data":
            recorder.same(args[0], result)
        elif name in _KEPT_VIEWS:
            self.watched.note("attribute", name, args[:1], {}, result)
        return result

    def _changed(
        self, function: Any, kind: str, target: str, args: Any, kwargs: Any, recorder: Recorder
    ) -> Any:
        """Record a call that changes its first argument as one that gives it anew."""
        changed, others = args[0], [*args[1:], *kwargs.values()]
        name = target.removesuffix("_")
        if target.startswith("__i"):
            name = f"__{target[3:]}"
        widens = any(
            torch.result_type(changed, item) is not changed.dtype
            for item in others
            if isinstance(item, torch.Tensor) and item.dtype is not torch.bool
        )
        if widens or name in ("copy", "set", "resize", "zero", "fill"):
            raise NotStraight(f"it changes a tensor in place ({target})")
        recorder.changed(changed)
        held = {key: item for key, item in kwargs.items() if key != "inplace"}
        result = function(*args, **kwargs)
        self.watched.note(kind, name, args, held, result)
        return result


def _in_place(name: str) -> bool:
    dunder = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return dunder or (name.endswith("_") and not name.endswith("__"))


def _is_dropout(name: str, args: Any, kwargs: Any) -> bool:
    if not name.endswith("dropout"):
        return False
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    if training and rate:
        raise NotStraight("it draws random numbers (dropout)")
    return True
