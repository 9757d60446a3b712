"""The parameters of a graph module, by dotted name, and the plan that says where joined ones come
from.

While a graph is on the meta device, joining parameters only changes the plan: `load_weights` then
reads each part straight into its slice of the joined parameter, so that no moment needs memory for
both.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule


@dataclass(frozen=True)
class Part:
    """`size` entries of a joined parameter along its dimension: the checkpoint's `source`, or zeros
    for None.
    """

    source: str | None
    size: int


@dataclass(frozen=True)
class Joined:
    """A parameter that is several checkpoint tensors, concatenated along `dim`."""

    parts: tuple[Part, ...]
    dim: int
    stacked: bool = False
    """The parameter has a dimension more than its parts, in front: they fill it one after the
    other.
    """


@dataclass(frozen=True)
class Folded:
    """A parameter that was computed from others after these were loaded."""

    sources: dict[str, tuple[list[int], torch.dtype]]
    """Their names, with shapes and dtypes."""
    calls: list[Any]
    """The expression, as nodes in the form of a saved graph."""


CACHE_SCALE = "cache_scale"


@dataclass(frozen=True)
class Form:
    """What a parameter has of a quantised weight: its "codes", their "scale", the "input_scale" of
    its layer, or a part of four bits (`four_bit_part`); or a "cache_scale", of keys or values.
    """

    weight: str
    """The name that the weight has in the unquantised model; that of a cache's scale in the
    checkpoint.
    """
    kind: str
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: all of an output's inputs do."""
    transposed: bool = False
    """The model has the weight as [..., inputs, outputs]."""
    beside: tuple[str, ...] = ()
    """Weights whose inputs have the same scale: the largest of all of theirs."""
    encoding: str = "fp8"
    """What codes are: `QuantisedWeight.computed_as`."""


@dataclass(frozen=True)
class Share:
    """What a rank has of a checkpoint's tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    kept: dict[int, list[tuple[int, int]]]
    """Dimension -> the runs of its entries, as (start, stop); the other dimensions are whole."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of the whole tensor."""
        for dim, runs in self.kept.items():
            tensor = of_runs(tensor, dim, runs)
        return tensor

    def entries(self, dim: int) -> list[int]:
        """Return the entries of a dimension that the rank has."""
        runs = self.kept.get(dim, [(0, self.shape[dim])])
        return [place for run in runs for place in range(*run)]

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the rank's part."""
        sizes = {dim: sum(stop - start for start, stop in runs) for dim, runs in self.kept.items()}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(self.shape))


def of_runs(tensor: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the entries of a dimension in runs, (start, stop) each, one after the other."""
    lengths = [(start, stop - start) for start, stop in runs] or [(0, 0)]
    parts = [tensor.narrow(dim, *each) for each in lengths]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass
class WeightPlan:
    """What `load_weights` cannot read off the parameters' names; kept in
    `gm.meta["weight_plan"]`.
    """

    joins: dict[str, Joined] = field(default_factory=dict)
    folds: dict[str, Folded] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)
    """Of the parts that are no weight's values."""
    shares: dict[str, Share] = field(default_factory=dict)
    """Of the parts of which a rank has not all."""

    def weight_of(self, part: str) -> str:
        """Return the weight that a part is read from."""
        return self.forms[part].weight if part in self.forms else part

    def keeps_dtype(self, name: str) -> bool:
        """Tell whether a parameter has a dtype of its own, whatever the run's is."""
        return any(part in self.forms for part in self.parts(name))

    def parts(self, name: str) -> list[str]:
        """Return the checkpoint names that fill parameter `name`."""
        return (
            [part.source for part in self.joins[name].parts if part.source]
            if name in self.joins
            else [name]
        )

    def joined(self, name: str, parts: Sequence[Part], dim: int = 0) -> None:
        """Record that parameter `name` is `parts` along `dim`; a part that is itself joined there
        is flattened.
        """
        flat: list[Part] = []
        for part in parts:
            inner = self.joins.pop(part.source, None) if part.source is not None else None
            assert inner is None or inner.dim == dim, (
                f"{part.source} is joined along another dimension"
            )
            flat.extend(inner.parts if inner else [part])
        self.joins[name] = Joined(tuple(flat), dim)

    def slices(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str | None, torch.Tensor]]:
        """Yield (checkpoint name or None for zeros, the view of `tensor` to fill)."""
        if name not in self.joins:
            yield name, tensor
            return
        join = self.joins[name]
        whole = tensor.flatten(0, 1) if join.stacked else tensor
        views = torch.split(whole, [part.size for part in join.parts], join.dim)
        yield from zip((part.source for part in join.parts), views, strict=True)


def weight_plan(gm: nn.Module) -> WeightPlan:
    """Return the plan of a module, an empty one at first."""
    meta: dict[str, WeightPlan] = gm.__dict__.setdefault("meta", {})
    return meta.setdefault("weight_plan", WeightPlan())


def tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of every parameter, those that share one tensor together."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def further_names(gm: nn.Module, name: str) -> list[str]:
    """Return the other names that the exported model had for a parameter, also those that clean-up
    removed.
    """
    tied: Mapping[str, str] = getattr(gm, "meta", {}).get("tied_parameters", {})
    first = tied.get(name, name)
    return [
        other for other in [first, *(key for key in tied if tied[key] == first)] if other != name
    ]


def unread_names(gm: nn.Module) -> set[str]:
    """Return the names of the exported model's weights that no part of the graph reads: checkpoints
    may have them.
    """
    names: set[str] = getattr(gm, "meta", {}).get("unread_parameters", set())
    return names


def leave_unread(gm: nn.Module, names: Iterable[str]) -> None:
    """Note that a rank does not read some of the model's weights."""
    unread: set[str] = gm.__dict__.setdefault("meta", {}).setdefault("unread_parameters", set())
    for name in names:
        unread |= {name, *further_names(gm, name)}


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter under a dotted name, with the modules on the way."""
    *path, leaf = name.split(".")
    for child in path:
        if not hasattr(module, child):
            module.add_module(child, nn.Module())
        module = getattr(module, child)
    module.register_parameter(leaf, parameter)


def delete_parameter(module: nn.Module, name: str) -> None:
    """Remove the parameter with a dotted name."""
    path, _, leaf = name.rpartition(".")
    delattr(module.get_submodule(path), leaf)


_SAMPLES = 512
"""Numbers of a tensor that its fingerprint holds, about."""


def mark_loaded(parameter: nn.Parameter) -> None:
    """Note that a parameter has the values that the plan says, and nothing else until it is written
    to.

    Of a tensor that was made in inference mode nobody knows when it is written to: it is never as
        loaded.
    """
    if not parameter.is_inference():
        parameter.loaded_as = _fingerprint(parameter)  # type: ignore[attr-defined]


def is_as_loaded(parameter: nn.Parameter) -> bool:
    """Tell whether a parameter still has the values that the plan says."""
    known = getattr(parameter, "loaded_as", None)
    return known is not None and not parameter.is_inference() and known == _fingerprint(parameter)


def _fingerprint(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return what changes with a tensor's contents: its place, its writes, some of its numbers, on
    a GPU their sum.

    Writes through `parameter.data` are not counted, so counting alone would not do.
    """
    data = parameter.detach().reshape(-1)
    sample = data[:: max(1, data.numel() // _SAMPLES)]
    content = [sample.contiguous().view(torch.uint8).cpu().numpy().tobytes()]
    if data.is_cuda and data.is_floating_point():
        content.append(data.sum(dtype=torch.float64).cpu().numpy().tobytes())
    return parameter.data_ptr(), parameter._version, *content


def join_parameters(gm: GraphModule, name: str, parts: Sequence[str | int], dim: int = 0) -> str:
    """Replace the parameters in `parts` by one named `name`, their concatenation along `dim`;
    return `name`.

    A number stands for that many zeros. On the meta device only the plan changes; loaded weights
    are copied once and freed, so that the peak is one group of parameters above the total.
    """
    old = [gm.get_parameter(part) if isinstance(part, str) else None for part in parts]
    first = next(parameter for parameter in old if parameter is not None)
    sizes = [part if isinstance(part, int) else gm.get_parameter(part).shape[dim] for part in parts]
    shape = list(first.shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=first.dtype, device=first.device)
    plan = weight_plan(gm)
    plan.joined(
        name,
        [Part(p if isinstance(p, str) else None, s) for p, s in zip(parts, sizes, strict=True)],
        dim,
    )
    for each, view in zip(old, torch.split(joined, sizes, dim), strict=True):
        view.zero_() if each is None else view.copy_(each.detach())
    for part in parts:
        if isinstance(part, str):
            delete_parameter(gm, part)
    parameter = nn.Parameter(joined, requires_grad=False)
    if all(each is None or is_as_loaded(each) for each in old):
        mark_loaded(parameter)
    set_parameter(gm, name, parameter)
    return name


def stack_parameters(gm: GraphModule, name: str, groups: Sequence[Sequence[str]]) -> str:
    """Replace parameters by one named `name`, whose entry i is those in `groups[i]`, one after the
    other; return it.

    All groups are alike in shape. Otherwise as `join_parameters`.
    """
    join_parameters(gm, name, [part for group in groups for part in group])
    joined = gm.get_parameter(name)
    flat = joined.detach()
    stacked = nn.Parameter(flat.view(len(groups), -1, *flat.shape[1:]), requires_grad=False)
    if is_as_loaded(joined):
        mark_loaded(stacked)
    set_parameter(gm, name, stacked)
    joins = weight_plan(gm).joins
    joins[name] = replace(joins[name], stacked=True)
    return name


@dataclass(frozen=True)
class ParameterNames(Container[object]):
    """The names of a module's parameters, to ask for one without going over all of a large
    model's.
    """

    module: nn.Module

    def __contains__(self, name: object) -> bool:
        try:
            self.module.get_parameter(str(name))
        except AttributeError:
            return False
        return True


def joined_name(names: Sequence[str], taken: Container[object] = ()) -> str:
    """Return a name for the join of `names` that is not taken: their common path, then what
    differs.

    >>> joined_name(["layers.0.q_proj.weight", "layers.0.k_proj.weight"])
    'layers.0.q_proj_k_proj.weight'
    """
    paths = [name.split(".") for name in names]
    shared = 0
    while all(len(path) > shared + 2 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    middle = "_".join(part for path in paths for part in path[shared:-1]) or "joined"
    while (name := ".".join([*paths[0][:shared], middle, paths[0][-1]])) in taken:
        middle += "_joined"
    return name


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move every buffer to `device`, dtypes unchanged: tables such as RoPE's keep their
    precision.
    """
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
