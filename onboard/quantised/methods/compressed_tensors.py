"""`compressed-tensors`, as llm-compressor writes it: groups of layers, each with a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from onboard.errors import OnboardError
from onboard.quantised.layouts.float4 import FourBitFloats
from onboard.quantised.layouts.float8 import EightBits, stems
from onboard.quantised.layouts.packed_rows import PackedRows
from onboard.quantised.methods.settings import check_keys, group_of, is_block, pattern_of, refusal
from onboard.quantised.weight import Activations, Files, QuantisedWeight

_NAME = "compressed-tensors"
_KEYS = {
    "quant_method",
    "format",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "quantization_status",
    "global_compression_ratio",
    "version",
    "sparsity_config",
    "transform_config",
    "run_compressed",
    "provider",
    "dequantize",
}
_GROUP_KEYS = {"weights", "input_activations", "output_activations", "targets", "format"}
_ARGS = {
    "num_bits",
    "type",
    "symmetric",
    "group_size",
    "strategy",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
}
_ENDINGS = (".weight_packed", ".weight_scale")
_INPUTS = {"float8": "float8_e4m3fn", "int8": "int8", "float4": "float4_e2m1fn"}
Layout = EightBits | FourBitFloats | PackedRows
_REGEX = "re:"
_IN_WEIGHTS = ("weight_input", "weight_output")
"""Where a transform is applied before weights are written."""
_OF_CLASS = 2
"""The rank of a group that means a module by its class."""


@dataclass(frozen=True)
class Group:
    """Layers that are quantised alike."""

    targets: tuple[str, ...]
    layout: Layout | None
    """None: weights are left as they are."""
    activations: Activations
    description: str

    def rank(self, module: str) -> int | None:
        """Return how closely a module is meant: 0 by its name, 1 by a pattern, 2 as a linear layer,
        3 by another class; None: not.
        """
        ranks = (_rank(target, module) for target in self.targets)
        return min((rank for rank in ranks if rank is not None), default=None)

    def weight_of(self, files: Files, module: str) -> QuantisedWeight:
        """Return the weight of a module; raise `OnboardError` where it is not stored as the group has
        it.
        """
        layout, weight = self.layout, None
        if isinstance(layout, PackedRows):
            layout = layout.of_layer(files, module)
        if layout is not None:
            weight = layout.find(files.names(), f"{module}.weight", self.activations)
        if weight is None:
            what = f"tensors of {module} that are not as its scheme ({self.description}) has them"
            raise refusal(_NAME, what)
        return weight


@dataclass(frozen=True)
class CompressedTensors:
    """Each quantised layer by the scheme of its group."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CompressedTensors:
        """Read a `quantization_config`."""
        check_keys(_NAME, values, _KEYS)
        _check_sparsity(values.get("sparsity_config") or {})
        _check_transforms(values.get("transform_config") or {})
        groups = values.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise refusal(_NAME, f"config_groups = {str(groups)[:60]}")
        return cls(tuple(_group(each, values.get("format")) for each in groups.values()))

    @property
    def description(self) -> str:
        """In words."""
        kinds = dict.fromkeys(group.description for group in self.groups if group.layout)
        return ", ".join([_NAME, *filter(None, [" and ".join(kinds)])])

    def layout_of(self, module: str) -> Layout | None:
        """Return how a layer lies in the files; None: no group targets it, or no op has its bits."""
        meaning = self._meaning(module)
        layout = meaning[0].layout if meaning else None
        return None if isinstance(layout, PackedRows) and layout.bits not in (4, 8) else layout

    def weights(self, files: Files) -> dict[str, QuantisedWeight] | None:
        """Return the quantised weights by name; None: no group is for weights."""
        tensors = files.names()
        modules = dict.fromkeys(stem for ending in _ENDINGS for stem in stems(tensors, ending))
        found = [self._weight(files, module) for module in modules]
        if not any(group.layout for group in self.groups):
            return None
        return {weight.name: weight for weight in found}

    def _weight(self, files: Files, module: str) -> QuantisedWeight:
        """Return a module's weight as the first group has it that may mean the module and fits."""
        refused: list[OnboardError] = []
        for group in self._meaning(module):
            try:
                return group.weight_of(files, module)
            except OnboardError as error:
                refused.append(error)
        raise (
            refused[0]
            if refused
            else refusal(_NAME, f"{module}, which no group of its config targets")
        )

    def _meaning(self, module: str) -> list[Group]:
        """Return the group that means a module most closely; names do not tell classes of modules
        apart, so groups that target classes may all mean it.
        """
        ranked = [(rank, each) for each in self.groups if (rank := each.rank(module)) is not None]
        ranked.sort(key=lambda each: each[0])
        by_name = bool(ranked) and ranked[0][0] < _OF_CLASS
        return [group for _, group in (ranked[:1] if by_name else ranked)]


def _check_sparsity(said: object) -> None:
    """Raise `OnboardError` where zeros are left out of the files."""
    if not isinstance(said, Mapping) or said.get("format", "dense") != "dense":
        raise refusal(_NAME, "sparsity_config")


def _check_transforms(said: object) -> None:
    """Raise `OnboardError` where a run has to rotate activations. Rotations of weights are in them
    already: a rotation and its inverse meet in two layers (SpinQuant, Liu et al. 2024).
    """
    groups = said.get("config_groups", {}) if isinstance(said, Mapping) else None
    if not isinstance(groups, Mapping):
        raise refusal(_NAME, f"transform_config = {str(said)[:60]}")
    for name, group in groups.items():
        if not _is_in_weights(group):
            raise refusal(_NAME, f"activations that a run rotates (transform_config {name!s:.40})")


def _is_in_weights(group: object) -> bool:
    places = group.get("apply") if isinstance(group, Mapping) else None
    return isinstance(places, list) and all(
        isinstance(each, Mapping) and each.get("location") in _IN_WEIGHTS for each in places
    )


def _rank(target: str, module: str) -> int | None:
    if target.startswith(_REGEX):
        return 1 if pattern_of(_NAME, target.removeprefix(_REGEX)).match(module) else None
    if target == module or module.endswith(f".{target}"):
        return 0
    if target[:1].isupper():
        return _OF_CLASS if target == "Linear" else _OF_CLASS + 1
    return None


def _group(values: object, general: object) -> Group:
    if not isinstance(values, Mapping):
        raise refusal(_NAME, f"the group {str(values)[:60]}")
    check_keys(_NAME, values, _GROUP_KEYS)
    weights = values.get("weights")
    if not isinstance(weights, Mapping | None):
        raise refusal(_NAME, f"weights = {str(weights)[:60]}")
    if values.get("output_activations"):
        raise refusal(_NAME, "output_activations")
    targets = values.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise refusal(_NAME, f"targets = {str(targets)[:60]}")
    activations = _activations(values.get("input_activations"))
    if weights is None:
        return Group(tuple(targets), None, activations, "no weights")
    check_keys(_NAME, weights, _ARGS)
    written = values.get("format") or general or _usual_format(weights)
    layout, described = _layout(weights, str(written))
    return Group(tuple(targets), layout, activations, described)


def _usual_format(weights: Mapping[str, Any]) -> str:
    """Return the format that the library writes where a config names none."""
    packs = weights.get("num_bits") != 8
    return "pack-quantized" if packs else f"{weights.get('type', 'int')}-quantized"


def _layout(weights: Mapping[str, Any], written: str) -> tuple[Layout, str]:
    """Return how weights lie in the files, and that in words."""
    kinds = (_four_bit_floats, _packed_integers, _eight_bits)
    layouts = (found for kind in kinds if (found := kind(weights, written)) is not None)
    if (layout := next(layouts, None)) is not None:
        return layout
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    raise refusal(_NAME, f"{written}, {kind}{bits}, {strategy}"[:90])


def _four_bit_floats(weights: Mapping[str, Any], written: str) -> tuple[Layout, str] | None:
    if (weights.get("num_bits"), weights.get("type")) != (4, "float"):
        return None
    if weights.get("strategy") == "tensor_group" and weights.get("group_size") == 16:
        return FourBitFloats(16, whole=".weight_global_scale", divides=True), "nvfp4"
    if weights.get("strategy") == "group" and weights.get("group_size") == 32:
        return FourBitFloats(32), "mxfp4"
    return None


def _packed_integers(weights: Mapping[str, Any], written: str) -> tuple[Layout, str] | None:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    is_packed = written == "pack-quantized" and weights.get("type", "int") == "int"
    if not is_packed or strategy not in ("group", "channel"):
        return None
    if not _is_small(bits):
        return None
    group = group_of(_NAME, weights) if strategy == "group" else None
    ordered = group is not None and str(weights.get("actorder")).lower() in ("group", "true")
    layout = PackedRows(bits, group, weights.get("symmetric") is False, ordered)
    return layout, f"int{bits}" + (f", groups of {group}" if group else "")


def _eight_bits(weights: Mapping[str, Any], written: str) -> tuple[Layout, str] | None:
    kind = str(weights.get("type", "int"))
    formats = (f"{kind}-quantized", "naive-quantized", "mxfp8-quantized")
    bits = weights.get("num_bits")
    if written not in formats or not _fit_bytes(kind, bits):
        return None
    name = {"float": "fp8"}.get(kind, f"{kind}{bits}")
    strategy, block = weights.get("strategy"), _sides(weights.get("block_structure"))
    coded = partial(EightBits, "_scale", kind="fp8" if kind == "float" else "int8")
    if strategy in ("tensor", "channel"):
        rows = coded(scale_bytes=2, of_outputs=strategy == "channel")
        return rows, f"{name} by {strategy}"
    if strategy == "block" and is_block(block):
        layout = coded((block[0], block[1]), scale_bytes=2)
        return layout, f"{name}, {block[0]} x {block[1]} blocks"
    if strategy == "group":
        group = group_of(_NAME, weights)
        is_mxfp8 = (group, kind) == (32, "float")
        described = "mxfp8" if is_mxfp8 else f"{name}, groups of {group}"
        runs = (1, group) if group else None
        return coded(runs, scale_bytes=1 if is_mxfp8 else 2), described
    return None


def _fit_bytes(kind: str, bits: object) -> bool:
    """Tell whether a code is a byte: float8, or an integer of eight bits or fewer."""
    return (kind == "float" and bits == 8) or (kind == "int" and _is_small(bits))


def _is_small(bits: object) -> TypeGuard[int]:
    return type(bits) is int and 1 <= bits <= 8


def _sides(block: object) -> object:
    """Return a block's sides; older releases write them as "128x128"."""
    if isinstance(block, str) and all(side.isdecimal() for side in block[:20].split("x")):
        return [int(side) for side in block[:20].split("x")]
    return block


def _activations(values: object) -> Activations:
    if values is None:
        return Activations()
    if not isinstance(values, Mapping):
        raise refusal(_NAME, f"input_activations = {str(values)[:60]}")
    check_keys(_NAME, values, _ARGS)
    kind, bits = values.get("type", "int"), values.get("num_bits")
    written = f"{kind}{bits}"
    if kind == "int" and bits != 8 and _is_small(bits):
        return Activations()  # exact: no op quantises inputs in fewer bits
    if (dtype := _INPUTS.get(written)) is None:
        raise refusal(_NAME, f"input_activations of {written[:60]}")
    strategy, group = values.get("strategy"), values.get("group_size")
    if dtype == "int8" and values.get("symmetric") is False:
        return Activations("none", dtype)  # exact: no op takes a zero of inputs
    if strategy in ("token", "tensor", None):
        dynamic = bool(values.get("dynamic"))
        return Activations("token" if dynamic and strategy == "token" else "tensor", dtype)
    if strategy in ("group", "tensor_group") and type(group) is int:
        return Activations("group", dtype, group)
    raise refusal(_NAME, f"input_activations by {str(strategy)[:60]}")
