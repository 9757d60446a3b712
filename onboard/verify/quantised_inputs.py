"""Transformers' linear layers and experts with inputs quantised as a run's are, and its attention
with keys and values rounded as a run's caches hold them: their error is what ours is measured by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onboard.graph.cache_init.interface import cache_dtype
from onboard.graph.context import TransformContext
from onboard.graph.export.hf_attention import configs
from onboard.graph.weight_load.experts.quantised_mixtures import EXPERT_KEYS
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, quantised_checkpoint
from onboard.graph.weight_load.quantised_linears import EIGHT_BIT_KEYS
from onboard.graph.weight_load.scales.cache_scales import scales_of
from onboard.graph.weight_load.scales.input_scales import how_inputs_are_quantised
from onboard.graph.weight_load.weight_names import match_names, module_renaming
from onboard.ops.attention.stored import as_cached
from onboard.ops.integers.int8_linear import quantise_int8_rows
from onboard.ops.linear.fp8_linear import dequantised, quantise_rows
from onboard.quantised.layouts.apart_experts import WHOLE
from onboard.quantised.weight import QuantisedWeight

_ROUNDED = "onboard_float8_cache"
_SCALES = "_onboard_cache_scales"


def quantise_inputs(model: nn.Module, context: TransformContext) -> int:
    """Let linear layers and experts of transformers' `model` quantise their inputs where the run's
    do; return how many layers and mixtures.
    """
    quantised = _quantised(model, context)
    quantise_linears(model, quantised)
    return len(quantised) + _quantise_experts(model, context)


@dataclass(frozen=True)
class LayerInputs:
    """How a layer's inputs are quantised, and their scale where they have one."""

    how: str
    scale: float | None
    dtype: str

    def near(self, x: torch.Tensor) -> torch.Tensor:
        """Return what rows become."""
        scale = None if self.scale is None else torch.tensor([self.scale], device=x.device)
        if self.dtype == "int8":
            codes, scales = quantise_int8_rows(x, scale)
            return codes.float() * scales[:, None]
        return dequantised(*quantise_rows(x, self.how, scale))


def quantise_linears(model: nn.Module, quantised: Mapping[str, LayerInputs]) -> None:
    """Let the linear layers of `model` that have these weights quantise their inputs."""
    for name, inputs in quantised.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_quantising(inputs))


def quantised_inputs(context: TransformContext) -> dict[str, LayerInputs]:
    """Return the weights of a checkpoint whose layers the run computes with eight-bit inputs, as its
    files name them, those of experts with them, and how these are quantised.
    """
    if not quantising_transforms(context):
        return {}
    checkpoint = quantised_checkpoint(context.factory.checkpoint)
    return (
        {}
        if checkpoint is None
        else _inputs_of({each: each for each in checkpoint.weights}, checkpoint)
    )


def quantising_transforms(context: TransformContext) -> set[str]:
    """Return the transforms that have let a run compute with inputs in eight bits."""
    keys = (*EIGHT_BIT_KEYS, *EXPERT_KEYS)
    return {entry.key for entry in context.history if entry.key in keys and entry.num_matches}


def _quantised(model: nn.Module, context: TransformContext) -> dict[str, LayerInputs]:
    """Return the weights of `model` whose layers the run computes with eight-bit inputs, and how
    these are quantised.
    """
    if quantising_transforms(context).isdisjoint(EIGHT_BIT_KEYS):
        return {}
    if (checkpoint := quantised_checkpoint(context.factory.checkpoint)) is None:
        return {}
    stored = match_names(list(model.state_dict()), checkpoint.names(), module_renaming(model))
    return _inputs_of(stored, checkpoint)


def _inputs_of(
    stored: Mapping[str, str], checkpoint: QuantisedCheckpoint
) -> dict[str, LayerInputs]:
    """Return how the layers of weights quantise their inputs, of those that do; `stored` has the name
    in the checkpoint of each.
    """
    found = {}
    for name, each in stored.items():
        weight = checkpoint.weights.get(each)
        if weight is not None and name.endswith(".weight"):
            how = how_inputs_are_quantised(weight)
            scale = checkpoint.input_scale(weight) if how == "tensor" else None
            found[name] = LayerInputs(how, scale, weight.activations.dtype)
    return {name: each for name, each in found.items() if each.how}


def _quantising(quantised: LayerInputs) -> Any:
    def quantise(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        rows = quantised.near(x.reshape(-1, x.shape[-1]))
        return (rows.to(x.dtype).view(x.shape), *inputs[1:])

    return quantise


def _quantise_experts(model: nn.Module, context: TransformContext) -> int:
    """Let the experts of transformers' `model` quantise their inputs where the run's do; return how
    many mixtures do.

    Only modules with stacked weights are changed; in others experts are linear layers.
    """
    if quantising_transforms(context).isdisjoint(EXPERT_KEYS):
        return 0
    if (checkpoint := quantised_checkpoint(context.factory.checkpoint)) is None:
        return 0
    rename, found = module_renaming(model), 0
    weights = {
        rename(name): weight for name, weight in checkpoint.weights.items() if weight.kind != WHOLE
    }
    for path, module in model.named_modules():
        mine = {name: each for name, each in weights.items() if name.startswith(f"{path}.")}
        hows = {(how_inputs_are_quantised(each), each.activations.dtype) for each in mine.values()}
        if len(hows) != 1 or not _stacks(module):
            continue
        how, dtype = hows.pop()
        if how:
            scales = _scales(module, path, mine, checkpoint) if how == "tensor" else {}
            module.forward = _expert_forward(module, how, dtype, scales)
            found += 1
    if found:
        # Other implementations multiply the rows of all experts in one call
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return found


_PRODUCTS = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
"""What transformers multiplies with an expert's weight by: the last three where inputs come first."""
_Scales = Mapping[str, torch.Tensor]
"""Of a module's stacks by name: a scale [1] for the inputs of each expert, [experts, 1]."""


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that have a weight of all experts each."""
    return {name: each for name, each in module.named_parameters(recurse=False) if each.dim() == 3}


def _scales(
    module: nn.Module,
    path: str,
    weights: Mapping[str, QuantisedWeight],
    checkpoint: QuantisedCheckpoint,
) -> _Scales:
    """Return the largest scale of each expert's weights that a stack joins."""
    found = {}
    for name, stack in _stacks(module).items():
        experts, rows, inputs = stack.shape
        scales = torch.zeros(experts, 1)
        if (whole := weights.get(f"{path}.{name}")) is not None:
            found[name] = scales + checkpoint.input_scale(whole)
            continue
        for part, weight in weights.items():
            outputs, columns = weight.shape
            if columns == inputs and rows % outputs == 0:
                expert = int(part.removeprefix(f"{path}.").split(".")[0])
                scales[expert, 0] = max(float(scales[expert, 0]), checkpoint.input_scale(weight))
        found[name] = scales
    return found


def _expert_forward(module: nn.Module, how: str, dtype: str, scales: _Scales) -> Callable[..., Any]:
    original = module.forward

    @wraps(original)
    def forward(*arguments: Any, **keywords: Any) -> Any:
        with _QuantisedInputs(_stacks(module), how, dtype, scales):
            return original(*arguments, **keywords)

    return forward


class _QuantisedInputs(TorchFunctionMode):
    """Quantises the inputs of linear products whose weight is one of a stack's."""

    def __init__(
        self, stacks: Mapping[str, nn.Parameter], how: str, dtype: str, scales: _Scales
    ) -> None:
        super().__init__()
        self.names = {_place(stack): name for name, stack in stacks.items()}
        self.how, self.dtype, self.scales = how, dtype, scales

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, with another input where it is such a product."""
        if func in _PRODUCTS and (name := self.names.get(_place(args[1]))) is not None:
            args = (self._quantised(name, args[0], args[1]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _quantised(self, name: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        expert = weight.storage_offset() // weight.numel()
        scale = float(self.scales[name][expert]) if name in self.scales else None
        return LayerInputs(self.how, scale, self.dtype).near(x).to(x.dtype)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def round_caches(model: nn.Module, context: TransformContext) -> bool:
    """Let attention of transformers' eager `model` round keys and values where the run caches them
    in float8_e4m3fn; return whether it does. Latent attention, which keeps neither, stays as it is.
    """
    if cache_dtype(context) != torch.float8_e4m3fn:
        return False
    _register()
    for path, scales in _cache_scales(model, context).items():
        setattr(model.get_submodule(path), _SCALES, scales)
    for config in configs(model):
        config._attn_implementation = _ROUNDED
    return True


def _cache_scales(
    model: nn.Module, context: TransformContext
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the scales of keys and values that the checkpoint has for modules of `model`."""
    if (checkpoint := quantised_checkpoint(context.factory.checkpoint)) is None:
        return {}
    names = match_names(list(model.state_dict()), checkpoint.names(), module_renaming(model))
    found = {}
    for path, module in model.named_modules():
        attends = hasattr(module, "scaling")  # modules of the attention interface have it
        named = scales_of(path, checkpoint, names) if attends else None
        if named is not None:
            found[path] = checkpoint.cache_scale(named[0]), checkpoint.cache_scale(named[1])
    return found


@cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register(_ROUNDED, _attend)
    AttentionMaskInterface.register(_ROUNDED, eager_mask)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **kw: Any,
) -> Any:
    """Attend as transformers' own eager function does, to rounded keys and values."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    one = torch.ones(1)
    scales = getattr(module, _SCALES, (one, one))
    near = (
        as_cached(each, scale.to(each.device))
        for each, scale in zip((key, value), scales, strict=True)
    )
    return eager(module, query, *near, *rest, **kw)
