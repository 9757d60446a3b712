"""Fill the graph's parameters, which lie on the meta device until here, from the checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.constants import fold_again
from onboard.graph.quantise.coded_shares import weight_of_share
from onboard.graph.quantise.read_forms import check_finite, read_decoded, read_forms
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.weight_load.computed_tables import take_computed
from onboard.graph.weight_load.converted_weights import Source
from onboard.graph.weight_load.parameters import (
    CACHE_SCALE,
    Form,
    Share,
    further_names,
    mark_loaded,
    move_buffers,
    set_parameter,
    tied_names,
    unread_names,
    weight_plan,
)
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.weight_sources import (
    WRONG_MODEL,
    check_ties,
    find_sources,
    read_source,
)
from onboard.graph.weight_load.weight_stream import Load, stream

if TYPE_CHECKING:
    from onboard.graph.factory import ModelFactory
    from onboard.graph.weight_load.converted import ConvertedCheckpoint

_RANDOM_SCALE = 0.02  # the usual `initializer_range`
_CODES = 100.0  # of the 448 that eight-bit floats reach
_RANDOM_SCALES = {
    torch.float32: _RANDOM_SCALE / _CODES,
    torch.bfloat16: _RANDOM_SCALE / 4.6,  # the deviation of integers from -8 to 7
    torch.uint8: 127 - 7,  # floats of four bits deviate by 3
}


class LoadWeightsConfig(TransformConfig):
    """Where the checkpoint is read."""

    checkpoint_device: str | None = None
    """Device that each tensor is read to before it is copied into place; None: the model's device,
    "cpu" saves the room of one tensor there."""


@register_transform("load_weights")
class LoadWeights(BaseTransform[LoadWeightsConfig]):
    """Materialise every parameter on the run's device in its dtype and move the buffers there,
    dtypes unchanged.

    Memory peaks at the model's final size and one tensor: joined parameters are read slice by
    slice.
    """

    acts = True
    needed = True
    config_class = LoadWeightsConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for each parameter that was filled."""
        every, read = tied_names(gm), 0
        groups = [names for names in every if not _is_shared(gm, names, context.shared)]
        if context.runtime.skip_loading_weights:
            generator = torch.Generator(context.device).manual_seed(0)
            for names in groups:
                _place(gm, names, _random(names[0], _allocate(gm, names[0], context), generator))
        else:
            read = context.bytes_read = self._load(gm, groups, context)
        for names in every:
            mark_loaded(gm.get_parameter(names[0]))
        fold_again(gm)
        move_buffers(gm, context.device)
        return gm, TransformInfo(
            num_matches=len(groups),
            is_clean=True,
            has_valid_shapes=True,
            summary=f"{read} bytes read" if read and not context.ranks.is_alone else "",
        )

    def _load(self, gm: nn.Module, groups: list[list[str]], context: TransformContext) -> int:
        """Fill every parameter; return the bytes that were read of files."""
        plan, checkpoint = weight_plan(gm), _checkpoint(context)
        scales = {form.weight for form in plan.forms.values() if form.kind == CACHE_SCALE}
        weights = {plan.weight_of(part) for names in groups for part in plan.parts(names[0])}
        weights -= scales
        wanted = {weight: [weight, *further_names(gm, weight)] for weight in sorted(weights)}
        buffers = [name for name, _ in gm.named_buffers() if name in gm.state_dict()]
        found, facts = find_sources(
            wanted,
            buffers,
            unread_names(gm),
            checkpoint,
            context.factory,
            is_part=bool(context.shared),
        )
        context.facts.extend(facts)
        if (
            not context.shared
        ):  # a draft head's further names are those of other layers, like its own
            known = [*wanted.values(), *groups]
            check_ties(known, open_checkpoint(context.factory.checkpoint), context.factory)
        if isinstance(checkpoint, QuantisedCheckpoint):
            kept = {form.weight for form in plan.forms.values()} - scales
            encoded = {name for each in kept for name in found[each].names}
            context.facts.extend(checkpoint.facts(encoded, scales))
        device = self.config.checkpoint_device or context.device
        later: list[tuple[str, Load]] = []  # on a GPU alone
        coded: dict[str, list[tuple[Form, torch.Tensor]]] = defaultdict(list)
        for names in groups:
            parameter = _allocate(gm, names[0], context)
            for part, view in plan.slices(names[0], parameter):
                if part is None:
                    view.zero_()
                elif part in plan.forms:
                    form = plan.forms[part]
                    coded[form.weight].append((form, view))
                elif part in plan.shares:
                    _read_share(checkpoint, found[part], plan.shares[part], view, device)
                elif self.config.checkpoint_device is None and (
                    load := _direct(checkpoint, found[part], view)
                ):
                    later.append(load)
                else:
                    _read(checkpoint, found[part], view, device)
            _place(gm, names, parameter)
        tables = {name: gm.get_buffer(name) for name in buffers if name in found}
        made = {name: table.clone() for name, table in tables.items()}
        for name, table in tables.items():
            _read(checkpoint, found[name], table, device)
        context.facts.extend(_as_computed(tables, made, context.factory))
        for weight, forms in coded.items():
            read_forms(checkpoint, found, forms, device, plan.shares.get(weight))
        _read_later(later)
        direct = sum(load.target.nbytes for _, load in later)
        return direct + getattr(checkpoint, "bytes_read", 0)


def _as_computed(
    tables: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor], factory: ModelFactory
) -> list[str]:
    """Write over roundings what the model file computes, which `made` has for a model with all its
    layers; return facts about them.
    """
    if factory.mode != "graph":
        return []

    def computed() -> Mapping[str, torch.Tensor]:
        return factory.computed_tables if "num_hidden_layers" in factory.model_kwargs else made

    rounded = take_computed(tables, computed)
    more = f" (and {len(rounded) - 1} more)" if len(rounded) > 1 else ""
    return [
        f"the checkpoint has {name}{more} rounded: taken as the model computes it"
        for name in rounded[:1]
    ]


def _is_shared(gm: nn.Module, names: Sequence[str], shared: Mapping[str, nn.Parameter]) -> bool:
    """Give a parameter the one of another graph that has it under one of its names; return False
    where there is none of its shape.
    """
    shape = gm.get_parameter(names[0]).shape
    held = [shared[name] for name in names if name in shared and shared[name].shape == shape]
    for name in names if held else ():
        set_parameter(gm, name, held[0])
    return bool(held)


def _checkpoint(context: TransformContext) -> Checkpoint | ConvertedCheckpoint:
    factory = context.factory
    if factory.mode == "graph":
        return open_checkpoint(factory.checkpoint)
    # Imports transformers' models
    from onboard.graph.weight_load.converted import (
        ConvertedCheckpoint,
    )

    return ConvertedCheckpoint(
        factory.checkpoint, factory.config, factory.dtype, context.on_transformers_model
    )


def _read(
    checkpoint: Checkpoint | ConvertedCheckpoint,
    source: Source,
    target: torch.Tensor,
    device: torch.device | str,
) -> None:
    name = source.names[0]
    if _is_quantised(checkpoint, source):
        read_decoded(checkpoint, name, target, device)
        return
    tensor = read_source(checkpoint, source, device)
    if tensor.shape != target.shape:
        found, expected = list(tensor.shape), list(target.shape)
        raise OnboardError(
            f"{name} is {found} in the checkpoint and {expected} in the model", hint=WRONG_MODEL
        )
    target.copy_(tensor)
    check_finite(name, tensor, target)


def _is_quantised(
    checkpoint: Checkpoint | ConvertedCheckpoint, source: Source
) -> TypeGuard[QuantisedCheckpoint]:
    """Whether a source is one quantised weight, as it is."""
    return (
        isinstance(checkpoint, QuantisedCheckpoint)
        and source.is_plain
        and not checkpoint.is_stored(source.names[0])
    )


def _read_share(
    checkpoint: Checkpoint | ConvertedCheckpoint,
    source: Source,
    share: Share,
    target: torch.Tensor,
    device: torch.device | str,
) -> None:
    """Read a rank's part of a tensor, and no more where it lies in the file as it is, or in whole
    blocks of codes.
    """
    if not target.numel():  # a rank may have nothing of it
        return
    [name, *_] = source.names
    if _is_quantised(checkpoint, source) and weight_of_share(checkpoint.weights[name], share):
        read_decoded(checkpoint, name, target, device, share)
        return
    stored = source.is_plain and isinstance(checkpoint, Checkpoint) and checkpoint.is_stored(name)
    shape = checkpoint.names()[name].shape if stored else share.shape
    if stored and shape == share.shape:
        tensor = checkpoint.read_part(name, share.kept, device)  # type: ignore[union-attr]
    else:
        whole = torch.empty(share.shape, dtype=target.dtype, device=target.device)
        _read(checkpoint, source, whole, device)
        tensor = share.of(whole)
    target.copy_(tensor)
    check_finite(name, tensor, target)


def _direct(
    checkpoint: Checkpoint | ConvertedCheckpoint, source: Source, target: torch.Tensor
) -> tuple[str, Load] | None:
    """Return a tensor's name and how its bytes get to the device as they are; None: something is to
    be done to them.
    """
    if not (isinstance(checkpoint, Checkpoint) and target.is_cuda and target.is_contiguous()):
        return None
    if not source.is_plain:
        return None
    [name] = source.names
    if not checkpoint.is_stored(name):
        return None
    file, meta = checkpoint.place(name)
    is_same = (meta.dtype, meta.shape) == (target.dtype, tuple(target.shape))
    return (name, Load(file, meta.offset, target)) if is_same and target.numel() else None


def _read_later(later: list[tuple[str, Load]]) -> None:
    stream([load for _, load in later])
    for name, load in later:
        check_finite(name, load.target, load.target)


def _allocate(gm: nn.Module, name: str, context: TransformContext) -> torch.Tensor:
    parameter = gm.get_parameter(name)
    keeps = weight_plan(gm).keeps_dtype(name) or not parameter.is_floating_point()
    dtype = parameter.dtype if keeps else context.dtype
    return torch.empty(parameter.shape, dtype=dtype, device=context.device)


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a parameter as a fresh model would be: small matrices, no biases, neutral norms."""
    if tensor.dtype == torch.int32:  # words of codes
        return tensor.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    if name.endswith("_scale"):
        return tensor.fill_(_RANDOM_SCALES[tensor.dtype])
    if tensor.itemsize == 1:  # codes; their scales are those of rows, or a block's
        codes = torch.randn(tensor.shape, generator=generator, device=tensor.device) * _CODES
        return tensor.copy_(codes.clamp(-4 * _CODES, 4 * _CODES))
    if tensor.ndim > 1:
        return tensor.normal_(std=_RANDOM_SCALE, generator=generator)
    return tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def _place(gm: nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        set_parameter(gm, name, parameter)
