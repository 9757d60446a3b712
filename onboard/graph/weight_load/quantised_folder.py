"""A quantised checkpoint as the unquantised one that it stands for: each weight is decoded as it is
read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.graph.quantise.coded_shares import Kept, encoded_share, matrix_share, parts_of_share
from onboard.graph.quantise.kernel_forms import has_kernels
from onboard.graph.weight_load.gguf_folder import Gguf, gguf_files
from onboard.graph.weight_load.parameters import Share
from onboard.graph.weight_load.safetensors_folder import Checkpoint, TensorMeta
from onboard.quantised.encoded import Encoded, is_nothing, plain
from onboard.quantised.layouts.apart_experts import (
    WHOLE,
    are_apart,
    joined_experts,
    joined_rows,
    same_place,
)
from onboard.quantised.layouts.float4 import INVERSE_SCALE
from onboard.quantised.layouts.float8 import INPUT_SCALE_NAMES
from onboard.quantised.left_tensors import check_left
from onboard.quantised.read_method import read_method, refuse_unsaid
from onboard.quantised.said import says_float8_cache
from onboard.quantised.weight import DAMAGED, Method, QuantisedWeight
from onboard.untrusted.bounds import read_json

_CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".kv_scale",
    ".prob_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Scales of what attention keeps; `model.layers.0.self_attn.k_proj.k_scale` in ModelOpt's files,
the last two in AutoFP8's.
"""
_UNUSED_SCALES = (".q_scale", ".prob_scale")
_ZEROS = (".q_zero_point", ".k_zero_point", ".v_zero_point", ".input_zero_point")
_BESIDE_MODEL = (*_CACHE_SCALES, *INPUT_SCALE_NAMES, *_ZEROS)
"""Tensors that say nothing of a weight: how attention and layers with whole weights quantise inputs."""


class QuantisedCheckpoint(Checkpoint):
    """The weights in `files`, quantised by `method`; names, shapes and values are the unquantised
    model's.
    """

    def __init__(self, files: Checkpoint, method: Method) -> None:
        super().__init__(files.folder)
        self.files = files
        self.method = method

    @cached_property
    def weights(self) -> dict[str, QuantisedWeight]:
        """The quantised weights by name; what does not fit is an `OnboardError`."""
        if (found := self.method.weights(self.files)) is None:
            return {}
        if not found:
            raise OnboardError(
                f"its config.json says that it is quantised ({self.method.description}), and no tensor is",
                hint="Fetch the checkpoint again; weights and config.json have to be of one model",
            )
        return as_in_model(found, self.files.names(), self.folder)

    @cached_property
    def cache_scales(self) -> tuple[str, ...]:
        """Names of the scales of cached keys and values that the checkpoint has."""
        return tuple(name for name in self.files.names() if name.endswith(_CACHE_SCALES))

    def names(self) -> dict[str, TensorMeta]:
        """Return every weight as the unquantised model has it, in bfloat16, and all other
        tensors.
        """
        names = decoded_names(self.files.names(), self.weights)
        return names | {name: replace(names[name], is_zero=True) for name in self._zero_biases}

    @cached_property
    def _zero_biases(self) -> list[str]:
        """Biases of nothing but zeros: some writers give one to each layer that they quantise."""
        stored = self.files.names()
        biases = (f"{name.removesuffix('.weight')}.bias" for name in self.weights)
        return [name for name in biases if name in stored and not self.files.read(name).any()]

    def is_stored(self, name: str) -> bool:
        """Tell whether a tensor lies in the file as `read` returns it."""
        return name not in self.weights

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a tensor; a quantised weight's values are in float32."""
        if self.is_stored(name):
            return self.files.read(name, device)
        if self._is_apart(name):
            return torch.stack([each.values() for each in self.encoded_stack(name, device)])
        return self.encoded(name, device).values()

    def _is_apart(self, name: str) -> bool:
        """Tell whether a weight is a stack of matrices that lie one by one."""
        return bool(self.weights[name].members) and len(self.weights[name].shape) > 2

    def encoded(self, name: str, device: torch.device | str = "cpu") -> Encoded:
        """Return a quantised weight as codes and scales, of a stack all of it in one tensor."""
        return self._encoded(self.weights[name], device)

    def _encoded(self, weight: QuantisedWeight, device: torch.device | str) -> Encoded:
        if weight.members:  # biases of experts
            places = range(weight.shape[0])
            vectors = [self._matrix_of(weight.name, place, device, {}) for place in places]
            return plain(torch.stack([each.values().flatten() for each in vectors]))
        parts = {role: self.files.read(each, device) for role, each in weight.parts.items()}
        return _decoded(weight, parts)

    def encoded_share(self, name: str, share: Share, device: torch.device | str = "cpu") -> Encoded:
        """Return a rank's share of a quantised matrix; no more is read where whole blocks of its
        parts are a share.
        """
        weight, stored = self.weights[name], self.files.names()
        assert not weight.transposed, "a matrix lies as its codes do"
        shapes = {role: stored[each].shape for role, each in weight.parts.items()}
        if (wanted := parts_of_share(weight, shapes, share)) is None:
            return encoded_share(self.encoded(name, device), share)
        parts = {
            role: self.files.read_part(each, wanted[role], device)
            for role, each in weight.parts.items()
        }
        return _decoded(weight, parts)

    def read_entry(self, name: str, index: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a matrix of a stack; a quantised one's values are in float32."""
        if self.is_stored(name):
            return super().read_entry(name, index, device)
        return self._matrix_of(name, index, device, {}).values()

    def read_part(
        self,
        name: str,
        kept: Mapping[int, Sequence[tuple[int, int]]],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """Return runs of a tensor that is stored as it is."""
        return self.files.read_part(name, kept, device)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, those of codes and scales with them."""
        return super().bytes_read + self.files.bytes_read

    def encoded_stack(
        self, name: str, device: torch.device | str = "cpu", share: Share | None = None
    ) -> Iterator[Encoded]:
        """Yield the matrices of a quantised stack, whose parts are stacks, too, as codes and
        scales, or what a rank's share has of them; one at a time is read.
        """
        weight = self.weights[name]
        share = Share(weight.shape, {}) if share is None else share
        own = matrix_share(weight, share)
        wanted = parts_of_share(weight, self._matrix_shapes(weight), own) if own.kept else {}
        for index in share.entries(0):  # nothing of a matrix stays here beside the next one
            if wanted is None:
                yield encoded_share(self._matrix_of(name, index, device, {}), own)
            else:
                yield self._matrix_of(name, index, device, wanted)

    def _matrix_of(
        self, name: str, index: int, device: torch.device | str, wanted: Mapping[str, Kept]
    ) -> Encoded:
        """Read what is wanted of one matrix of a stack."""
        weight = self.weights[name]
        if weight.members:
            found = [self._encoded(each, device) for each in weight.members[index]]
            joined = joined_rows(found, alternates=weight.alternates)
            return replace(joined, transposed=weight.transposed)
        parts = {
            role: self._of_matrix(each, index, weight.shape[0], device, wanted.get(role))
            for role, each in weight.parts.items()
        }
        return _decoded(weight, parts)

    def _matrix_shapes(self, weight: QuantisedWeight) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what one matrix of a stack has of the parts."""
        shapes = {role: self.files.names()[each].shape for role, each in weight.parts.items()}
        count = weight.shape[:1]
        return {role: tuple(s[1:] if s[:1] == count else s) for role, s in shapes.items()}

    def _of_matrix(
        self,
        name: str,
        index: int,
        count: int,
        device: torch.device | str,
        kept: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> torch.Tensor:
        """Return what a stack's matrix has of a tensor, or runs of it; all have the whole of one that
        is no stack.
        """
        shape, kept = self.files.names()[name].shape, kept or {}
        if shape[:1] != (count,):
            return self.files.read_part(name, kept, device)
        if not kept:
            return self.files.read_run(name, 0, index, index + 1, device)[0]
        inside = {dim + 1: runs for dim, runs in kept.items()}
        return self.files.read_part(name, {0: [(index, index + 1)], **inside}, device)[0]

    def cache_scale(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a scale of cached keys or values, [1] or [kv_heads] float32."""
        scale = self.files.read(name, device).float().flatten()
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise OnboardError(f"{name} is {scale.tolist()[:4]}, no scale", hint=DAMAGED)
        return scale

    def check_scales(self) -> None:
        """Raise `OnboardError` for a scale of inputs, or of cached keys and values, that is none; those
        of queries and of attention's weights are of no use here.
        """
        for weight in self.weights.values():
            if weight.input_scale is not None:
                self.input_scale(weight)
        for name in self.cache_scales:
            if not name.endswith(_UNUSED_SCALES):
                self.cache_scale(name)

    def check_values(self, name: str, values: torch.Tensor) -> None:
        """Raise `OnboardError` for a weight of which scales of zero leave nothing, `values` being what
        `read` returns.
        """
        if self.is_stored(name) or not is_nothing(values):
            return
        if any(each.has_lost_scales() for each in self._all_encoded(name)):
            scale = self.weights[name].parts["scale"]
            raise OnboardError(f"{name} is all zeros, and its codes are not: {scale}", hint=DAMAGED)

    def _all_encoded(self, name: str) -> Iterator[Encoded]:
        if self._is_apart(name):
            yield from self.encoded_stack(name)
        else:
            yield self.encoded(name)

    def cache_scale_sizes(self) -> dict[str, int]:
        """Return how many numbers each of the `cache_scales` has."""
        stored = self.files.names()
        return {name: math.prod(stored[name].shape) for name in self.cache_scales}

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes that weights take whose codes there are kernels for, by name: about those
        in the files.
        """
        return {
            name: self._held_bytes(weight)
            for name, weight in self.weights.items()
            if has_kernels(weight.computed_as, weight.block, weight.inputs)
            and not (len(weight.shape) > 2 and self._is_decoded(name))
        }

    def _is_decoded(self, name: str) -> bool:
        """Tell whether a stack is of experts that all compute, or that the generated model has one by
        one: a run decodes it.
        """
        from onboard.hf.expert_weights import all_stacks  # builds transformers' model

        stacks = all_stacks(config_of(self.folder)).items()
        return any(
            (each.is_made or not each.are_chosen) and same_place(place, name)
            for place, each in stacks
        )

    def _held_bytes(self, weight: QuantisedWeight) -> int:
        if weight.members:
            return sum(self._held_bytes(each) for expert in weight.members for each in expert)
        parts = [self.files.names()[part].nbytes for part in weight.parts.values()]
        return weight.held_bytes or sum(parts)

    def spared_bytes(self) -> int:
        """Return by how many bytes those are smaller than with 16 bits an element."""
        shapes = self.names()
        return sum(
            math.prod(shapes[name].shape) * 2 - size for name, size in self.kept_bytes().items()
        )

    def part(self, weight: QuantisedWeight, role: str) -> torch.Tensor:
        """Return a part of a quantised weight as it is stored."""
        return self.files.read(weight.parts[role])

    def input_scale(self, weight: QuantisedWeight) -> float:
        """Return the scale that a weight's layer quantises all its inputs with, of a stack the largest
        of its layers'.
        """
        if weight.members:
            return max(self.input_scale(each) for expert in weight.members for each in expert)
        assert weight.input_scale is not None
        scale = float(self.files.read(weight.input_scale))
        if not 0 < scale < math.inf:
            raise OnboardError(f"{weight.input_scale} is {scale}, no scale", hint=DAMAGED)
        return 1 / scale if weight.input_scale.endswith(INVERSE_SCALE) else scale

    def facts(self, encoded: Collection[str] = (), scales: Collection[str] = ()) -> list[str]:
        """Return what is to be known of a run in which the weights `encoded` stay so, and keys and
        values are cached with `scales`.
        """
        quantised = (weight for weight in self.weights.values() if weight.kind != WHOLE)
        counts = Counter((weight.kind, weight.name in encoded) for weight in quantised)
        ways = {True: "are computed with as they are", False: "are decoded as they are read"}
        facts = [
            f"{count} weights in {kind} ({self.method.description}) {ways[kept]}"
            for (kind, kept), count in counts.items()
        ]
        if not counts:
            facts.append(f"no weights are quantised ({self.method.description})")
        used = set(scales) & set(self.cache_scales)
        if used:
            facts.append(
                f"keys and values are cached in float8_e4m3fn, with {len(used)} scales of the checkpoint"
            )
        if count := len(self.cache_scales) - len(used):
            facts.append(f"the checkpoint's {count} scales of cached keys and values are not used")
        if count := self._unused_input_scales:
            facts.append(
                f"{count} layers with whole weights compute with exact inputs, without the checkpoint's scales"
            )
        return facts

    @property
    def _unused_input_scales(self) -> int:
        taken = {name for weight in self.weights.values() for name in weight.tensors}
        return sum(
            name.endswith(INPUT_SCALE_NAMES) for name in self.files.names() if name not in taken
        )


def as_in_model(
    weights: Mapping[str, QuantisedWeight], stored: Mapping[str, TensorMeta], folder: Path
) -> dict[str, QuantisedWeight]:
    """Return the weights as the unquantised model of a folder's config has them: experts in stacks,
    where transformers expects stacks in checkpoints.
    """
    if not are_apart(weights):
        return dict(weights)
    from onboard.hf.expert_weights import declared_stacks  # builds transformers' model

    return joined_experts(weights, stored, declared_stacks(config_of(folder)))


def quantised_checkpoint(folder: Path) -> QuantisedCheckpoint | None:
    """Return the weights in `folder`, where its config, or a file beside it, says that they are
    quantised; no weights' header is read for that.

    Raises `OnboardError` where they are quantised in a way that is not read.
    """
    if (gguf := gguf_files(folder)) is not None:
        return QuantisedCheckpoint(gguf, Gguf(gguf)) if gguf.has_blocks else None
    method = read_method(config_of(folder), folder)
    return None if method is None else QuantisedCheckpoint(Checkpoint(folder), method)


def stored_checkpoint(folder: Path) -> Checkpoint:
    """Return the tensors of a folder as they lie in its files."""
    return gguf_files(folder) or Checkpoint(folder)


def asks_for_float8_cache(folder: Path) -> bool:
    """Tell whether a checkpoint asks for keys and values to be cached in float8_e4m3fn."""
    return says_float8_cache(config_of(folder), folder)


def config_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's parsed config.json; nothing where there is none."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    return config if isinstance(config, dict) else {}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the weights in `folder` as an unquantised model has them.

    Raises `OnboardError` where they are quantised in a way that is not read.
    """
    if (quantised := quantised_checkpoint(folder)) is not None:
        return quantised
    plain = stored_checkpoint(folder)
    refuse_unsaid(plain.names())
    return plain


def decoded_names(
    stored: Mapping[str, TensorMeta], weights: Mapping[str, QuantisedWeight]
) -> dict[str, TensorMeta]:
    """Return the tensors that an unquantised model's files would have."""
    taken = {name for weight in weights.values() for name in weight.tensors}
    left = {
        name: meta
        for name, meta in stored.items()
        if name not in taken and not name.endswith(_BESIDE_MODEL)
    }
    check_left(left, weights)
    return left | {name: _described(weight) for name, weight in weights.items()}


def decoded_state(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return all weights of a checkpoint that is quantised, a GGUF file or a part of another,
    decoded; None where transformers reads the files itself.
    """
    if type(checkpoint := open_checkpoint(folder)) is Checkpoint and not checkpoint.prefix:
        return None
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def _decoded(weight: QuantisedWeight, parts: Mapping[str, torch.Tensor]) -> Encoded:
    try:
        return weight.decode(parts)
    except (RuntimeError, IndexError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OnboardError(f"{weight.name} cannot be decoded: {reason}", hint=DAMAGED) from error


def _described(weight: QuantisedWeight) -> TensorMeta:
    size = math.prod(weight.shape) * torch.bfloat16.itemsize
    is_linear = len(weight.shape) == 2 and not weight.transposed
    return TensorMeta(tuple(weight.shape), torch.bfloat16, size, is_decoded=is_linear)
