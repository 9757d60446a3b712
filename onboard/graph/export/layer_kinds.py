"""The kinds of a model's layers: which of them differ in their weights alone, so that one export
serves them all.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from onboard.hf.parsed_code import parsed_code

Signature = tuple[Any, ...]

PATTERNS = 3
"""Layers of a kind to export: the first has no layer before it, the second and the third must
agree.
"""

_UNBUILT = "_onboard_unbuilt"
"""Attribute of a list: how many more entries it should have, all like those that it has."""

_BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


class UnlikeError(Exception):
    """A part of a model does not say what the parts are like that were left out; the message says
    why.
    """


@dataclass(frozen=True)
class Stack:
    """A list of layers that run one after another: its dotted name, and the kind of each layer."""

    name: str
    kinds: tuple[int, ...]

    @property
    def exported(self) -> tuple[int, ...]:
        """The layers to export: the first ones of each kind."""
        return tuple(
            index
            for index, kind in enumerate(self.kinds)
            if self.kinds[:index].count(kind) < PATTERNS
        )

    def layer(self, index: int) -> str:
        """Return the dotted name of a layer."""
        return f"{self.name}.{index}"

    def index(self, path: str) -> int | None:
        """Return the layer that a dotted name lies in, None outside of all of them."""
        index = path.removeprefix(self.name + ".").split(".")[0]
        return int(index) if path.startswith(self.name + ".") and index.isdecimal() else None


@dataclass(frozen=True)
class ExpertList:
    """A list of experts of one kind whose weights are only ever read as lists: its dotted name and
    length.
    """

    name: str
    experts: int


@dataclass(frozen=True)
class ExpertStack:
    """A module whose parameters have a row for each of `experts`, of which `kept` are exported."""

    name: str
    experts: int
    kept: int


@dataclass(frozen=True)
class Repeated:
    """What of a model need not be exported, since it repeats what is."""

    stack: Stack | None
    experts: tuple[ExpertList, ...] = ()
    exported_experts: int = 0
    """Of the lists."""
    stacks: tuple[ExpertStack, ...] = ()

    def kept(self) -> dict[str, tuple[int, ...]]:
        """Return the entries to export of each list that is not exported in full."""
        layers = {self.stack.name: self.stack.exported} if self.stack else {}
        return layers | {item.name: tuple(range(self.exported_experts)) for item in self.experts}


def find_repeated(model: nn.Module, exported_experts: int) -> Repeated | None:
    """Return what an export may leave out; None when that is nothing.

    Raises `UnlikeError` for a list that was built with a few of its entries and is no list of
    experts.
    """
    experts = tuple(item for item in find_expert_lists(model) if item.experts > exported_experts)
    if others := sorted(unbuilt(model) - {item.name for item in experts}):
        raise UnlikeError(f"{others[0]} is read in other ways than experts are")
    stack = find_stack(model)
    return Repeated(stack, experts, exported_experts) if stack or experts else None


def find_stack(model: nn.Module) -> Stack | None:
    """Return the outermost list of layers that an export may shorten, None when there is no such
    list.
    """
    sources = _Sources(model)
    for name, child in _lists(model):
        runs = not holds_weights_only(child[0])
        if (
            runs
            and not _lies_in_list(model, name)
            and sources.iterates(name.rpartition(".")[2])
            and not _shares_parameters(model, child)
        ):
            signatures: dict[Signature, int] = {}
            kinds = tuple(
                signatures.setdefault(signature(layer), len(signatures)) for layer in child
            )
            stack = Stack(name, kinds)
            return stack if len(stack.exported) < len(kinds) else None
    return None


def find_expert_lists(model: nn.Module) -> list[ExpertList]:
    """Return the lists of equal modules without a forward of their own, as a mixture's experts
    are.
    """
    sources = _Sources(model)
    found = []
    for name, child in _lists(model):
        alike = holds_weights_only(child[0]) and len({signature(expert) for expert in child}) == 1
        if alike and sources.reads_as_list(child, name):
            found.append(ExpertList(name, _length(child)))
    return found


def note_unbuilt(members: nn.ModuleList, count: int) -> None:
    """Note that a list should have `count` more entries, which are like those that it has."""
    if count:
        setattr(members, _UNBUILT, count)


def unbuilt(model: nn.Module) -> set[str]:
    """Return the dotted names of the lists that were built with a few of their entries."""
    return {name for name, module in model.named_modules() if hasattr(module, _UNBUILT)}


def _length(members: nn.ModuleList) -> int:
    """Return how many entries a list has, or should have."""
    more: int = vars(members).get(_UNBUILT, 0)
    return len(members) + more


@contextmanager
def shortened(model: nn.Module, kept: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Leave only the `kept` entries in the named lists, under their own names."""
    lists = [(model.get_submodule(name), indices) for name, indices in kept.items()]
    originals = [dict(module._modules) for module, _ in lists]
    for module, indices in lists:
        for index in range(len(module._modules)):
            if index not in indices:
                del module._modules[str(index)]
    try:
        yield
    finally:
        for (module, _), original in zip(lists, originals, strict=True):
            module._modules.clear()
            module._modules.update(original)


def signature(module: nn.Module) -> Signature:
    """Return what decides how a module computes, but for the values of its parameters and buffers.

    Two modules with equal signatures trace to the same graph: class, plain attributes, shapes and
        dtypes, children.
    """
    attributes = {key: value for key, value in vars(module).items() if key not in _BOOKKEEPING}
    tensors = {**module._parameters, **module._buffers}
    return (
        type(module),
        tuple((key, _frozen(value)) for key, value in sorted(attributes.items())),
        tuple(
            (key, None if t is None else (tuple(t.shape), t.dtype)) for key, t in tensors.items()
        ),
        tuple(
            (key, child if child is None else signature(child))
            for key, child in module._modules.items()
        ),
    )


def _frozen(value: Any) -> Any:
    """Return something hashable that is equal for equal values: an object without an obvious one
    stands for itself.
    """
    if isinstance(value, dict):
        return tuple(sorted((repr(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return (type(value), tuple(_frozen(item) for item in value))
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return (type(value), value)
    return id(value)


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in model.named_modules():
        if isinstance(child, nn.ModuleList) and _length(child) > 2:
            yield name, child


def _lies_in_list(model: nn.Module, name: str) -> bool:
    """Whether a list is a part of another one's members, as the branches of a layer are."""
    parts = name.split(".")
    outer = (model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))
    return any(isinstance(module, nn.ModuleList) for module in outer)


def holds_weights_only(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, as an expert whose weights its list reads."""
    return "forward" not in vars(type(module))


def _shares_parameters(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether a parameter of one layer is also another's, or the rest of the model's."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return any(uses[id(parameter)] > 1 for parameter in layers.parameters())


class _Sources:
    """The code of a model's classes outside of `__init__`, asked how it reads a list of modules."""

    def __init__(self, model: nn.Module) -> None:
        classes = {
            type(module)
            for module in model.modules()
            if not type(module).__module__.startswith("torch.")
        }
        self._trees = {cls: _methods(cls) for cls in classes}
        self._uses = _attribute_uses(method for tree in self._trees.values() for method in tree)

    def iterates(self, attribute: str) -> bool:
        """Whether all that the code does with `.<attribute>` is `for item in self.<attribute>`, and
        it does that; a comprehension runs no layer on what the one before it hands on.
        """
        return self._uses.get(attribute) == {"loop"}

    def reads_as_list(self, members: nn.ModuleList, name: str) -> bool:
        """Whether the code calls a list and goes over its members, and asks it for nothing else."""
        uses = self._uses.get(name.rpartition(".")[2], set())
        inside = _self_uses(self._trees[type(members)]) if type(members) in self._trees else set()
        return uses <= {"loop", "each", "call"} and inside <= {"loop", "each"}


def _methods(cls: type) -> list[ast.AST]:
    """Return the parsed methods that a class defines, without `__init__`; nothing can be said
    without its source.
    """
    try:
        found = _classes(inspect.getsource(sys.modules[cls.__module__])).get(
            cls.__qualname__
        ) or _read(cls)
    except OSError:
        return [ast.parse("unknown[0]")]
    return [item for item in found.body if getattr(item, "name", "") != "__init__"]


def _read(cls: type) -> ast.ClassDef:
    """Return a class that is none of its module's own: defined in a function, or in another
    class.
    """
    found = parsed_code(cls)
    assert isinstance(found, ast.ClassDef)
    return found


@lru_cache(maxsize=16)
def _classes(text: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module's source by name; `inspect` would parse all of it once for
    each.
    """
    return {item.name: item for item in ast.parse(text).body if isinstance(item, ast.ClassDef)}


def _attribute_uses(methods: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Return what methods do with attributes, by their names."""
    nodes = [node for method in methods for node in ast.walk(method)]
    roles = _roles(nodes)
    uses: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            uses[node.attr].add(roles.get(id(node), "other"))
    return dict(uses)


def _self_uses(methods: list[ast.AST]) -> set[str]:
    """Return how methods use `self` where they do not ask for an attribute of it."""
    nodes = [node for method in methods for node in ast.walk(method)]
    roles = _roles(nodes)
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    names = [
        node
        for node in nodes
        if isinstance(node, ast.Name) and node.id == "self" and id(node) not in owners
    ]
    return {roles.get(id(node), "other") for node in names}


def _roles(nodes: list[ast.AST]) -> dict[int, str]:
    loops = {id(node.iter): "loop" for node in nodes if isinstance(node, ast.For)}
    each = {id(node.iter): "each" for node in nodes if isinstance(node, ast.comprehension)}
    return loops | each | {id(node.func): "call" for node in nodes if isinstance(node, ast.Call)}
