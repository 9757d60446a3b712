"""The recording of one call of one module."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from onboard.codegen.straight.sizes import Symbolic, known_sizes, plain, written
from onboard.codegen.straight.straight_lines import (
    Given,
    Line,
    Made,
    NotStraight,
    Of,
    Own,
    Ref,
    Size,
    Straight,
    in_order,
    mapped,
    outer_leaves,
)

_PLAIN = (bool, int, float, str, complex, type(None), type(Ellipsis), torch.dtype, torch.layout)
_PLAIN_TOO = (torch.memory_format,)


class Recorder:
    """Records what a forward does with what it is given.

    Args:
        module: whose forward it is.
        given: its arguments, by the names of its parameters.
        computed: what other recordings have computed, by the ids of the tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Mapping[str, Any],
        computed: dict[int, tuple[Recorder, Any]],
    ) -> None:
        self.module, self.computed = module, computed
        self.lines: list[Line] = []
        self.values: dict[int, Any] = {}
        self.kept: list[Any] = []
        self.inputs: dict[Given, torch.Tensor] = {}
        self.stale: set[int] = set()
        self.again: dict[int, dict[int, int]] = {}
        self.numbers: dict[str, Any] = {}
        self.modules = {
            id(part): tuple(path.split("."))
            for path, part in reversed([*module.named_modules(remove_duplicate=False)])
            if path
        }
        self.own = dict(_own_tensors(module))
        for name, value in given.items():
            self._take(Given(name), value)
        self.known = known_sizes(self.inputs)

    def _take(self, place: Given, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.inputs.setdefault(place, value)
            self._bind(value, place)
        elif type(value) in (int, float) and not place.path:
            self.numbers[place.name] = value
        else:
            for key, item in parts(value):
                self._take(dataclasses.replace(place, path=(*place.path, key)), item)

    def _bind(self, tensor: torch.Tensor, place: Any) -> None:
        self.values.setdefault(id(tensor), place)
        self.kept.append(tensor)

    def expression(self, value: Any) -> Any:
        """Return what an argument is.

        Raises:
            NotStraight: it is of no kind that can be written, or from elsewhere.
        """
        value = plain(value)
        if isinstance(value, Symbolic):
            return written(value.expr, self.known)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return self._device(value)
        if isinstance(value, (*_PLAIN, *_PLAIN_TOO)):
            return value
        if isinstance(value, slice):
            return slice(*map(self.expression, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Size):
            value = tuple(value)
        found = parts(value, empty=True)
        if found is None:
            raise NotStraight(f"a value of type {type(value).__name__}")
        keys = tuple(key for key, _ in found)
        return Made(type(value), keys, tuple(self.expression(item) for _, item in found))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self.stale:
            raise NotStraight("a tensor that was changed in place by another name")
        if id(tensor) in self.values:
            return self.values[id(tensor)]
        if id(tensor) in self.own:
            return Own(self.own[id(tensor)])
        if (
            (kept := self.computed.get(id(tensor))) is not None
            and kept[0] is not self
            and id(tensor) not in kept[0].stale
        ):
            self.values[id(tensor)] = self._again(*kept, self.again.setdefault(id(kept[0]), {}))
            return self.values[id(tensor)]
        raise NotStraight(
            f"a tensor {[*map(str, tensor.shape)]} that is neither given nor one of the module's"
        )

    def _device(self, device: torch.device) -> Any:
        if device.type == "meta":
            raise NotStraight("a tensor on the meta device")
        first = next(iter(self.inputs), None)
        weights = (Own(path) for path in self.own.values())
        owner = first or next(weights, None)
        return device if owner is None else Of(owner, "device")

    def call(self, kind: str, target: Any, args: Any, kwargs: Any, result: Any, place: Any) -> None:
        """Record a call and what it gave."""
        made = tuple(self.expression(item) for item in args)
        named = tuple((key, self.expression(item)) for key, item in kwargs.items())
        number = len(self.lines)
        self.lines.append(Line(kind, target, made, named, number, place, result))
        self._give(Ref(number), result)

    def same(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Record that a call gives what it is given."""
        self.values[id(result)] = self._tensor(tensor)
        self.kept.append(result)

    def _give(self, place: Ref, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.values[id(result)] = place
            self.computed[id(result)] = self, place
            self.stale.discard(id(result))
            self.kept.append(result)
            return
        for key, item in parts(result) or ():
            self._give(Ref(place.number, (*place.path, key)), item)

    def _again(self, other: Recorder, place: Any, done: dict[int, int]) -> Any:
        """Record once more what an earlier recording has computed of nothing but sizes and numbers,
        and code has kept.
        """

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            if leaf.number not in done:
                line = other.lines[leaf.number]
                self._check_kept(line, other)
                line = mapped(change, line)
                done[leaf.number] = len(self.lines)
                self.lines.append(replace(line, number=len(self.lines)))
            return replace(leaf, number=done[leaf.number])

        return mapped(change, place)

    def _check_kept(self, line: Line, other: Recorder) -> None:
        if type(other.module) is not type(self.module):
            raise NotStraight("a tensor that a module of another class has computed")
        for leaf in outer_leaves((line.args, line.kwargs)):
            if isinstance(leaf, Given | Own):
                raise NotStraight("a tensor that was computed of other texts, or of weights")
            if isinstance(leaf, Size) and other.size(leaf) != self.size(leaf):
                raise NotStraight("a tensor that was computed for a text of another length")

    def size(self, place: Size) -> Any:
        """Return a size of an input."""
        found = self.inputs.get(place.of)
        return None if found is None else plain(found.shape[place.dim])

    def changed(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is about to change in place.

        Raises:
            NotStraight: others than this module may see it.
        """
        found = self._tensor(tensor)
        storage = _storage(tensor)
        others = [item for item in self.kept if item is not tensor and _storage(item) == storage]
        shared = {_storage(item) for item in self.inputs.values()}
        if not isinstance(found, Ref) or storage in shared or id(tensor) in self.own:
            raise NotStraight("it changes in place what it is given")
        self.stale |= {id(item) for item in others}

    def finish(self, result: Any) -> Straight:
        """Return the recording of a forward that gives `result`."""
        return in_order(Straight(tuple(self.lines), self.expression(result)))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _own_tensors(module: nn.Module) -> list[tuple[int, tuple[str, ...]]]:
    """Return the tensors of a module and its parts, registered or not, with their paths."""
    found = []
    for path, part in reversed([*module.named_modules(remove_duplicate=False)]):
        held = {**vars(part), **part._buffers, **part._parameters}
        names = tuple(path.split(".")) if path else ()
        found += [(id(v), (*names, k)) for k, v in held.items() if isinstance(v, torch.Tensor)]
    return found


def parts(value: Any, empty: bool = False) -> Any:
    """Return what a container holds, with the keys that Python reads it by; None, or nothing, for
    what is none.
    """
    if isinstance(value, ModelOutput):
        return [(f".{name}", item) for name, item in value.items()]
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, tuple | list):
        return [*enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value)]
        return [(f".{name}", getattr(value, name, None)) for name in names]
    return None if empty else []


def bound(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by the names of parameters, without `self`."""
    signature = inspect.signature(forward)
    made = signature.bind(module, *args, **kwargs).arguments
    return dict([*made.items()][1:])
