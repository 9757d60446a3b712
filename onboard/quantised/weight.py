"""A quantised weight of a checkpoint, found by the names, shapes and dtypes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded

if TYPE_CHECKING:
    from onboard.graph.weight_load.safetensors_folder import TensorMeta

Tensors = Mapping[str, torch.Tensor]
"""The parts of a weight, by their roles."""

NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of scales that are numbers; another one is no scale, whatever its values come to."""
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are exponents of 2, with 127 added (E8M0)."""
DAMAGED = "Fetch the checkpoint again; a release by another tool may name its tensors otherwise"


class Files(Protocol):
    """What is read of a checkpoint's files."""

    def names(self) -> Mapping[str, TensorMeta]:
        """Return every tensor's shape, dtype and size."""

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a tensor as it is stored."""

    def notes(self) -> Mapping[str, str]:
        """Return what the files' headers say besides."""


class NotAtHandError(Exception):
    """What is asked for lies in a file that is not here."""


@dataclass(frozen=True)
class Headers:
    """Files of which only the headers are here."""

    tensors: Mapping[str, TensorMeta]

    def names(self) -> Mapping[str, TensorMeta]:
        """Return what the headers say."""
        return self.tensors

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Raise `NotAtHandError`."""
        raise NotAtHandError(name)

    def notes(self) -> Mapping[str, str]:
        """Raise `NotAtHandError`."""
        raise NotAtHandError


@dataclass(frozen=True)
class Activations:
    """How a layer's input is quantised in the checkpoint's scheme."""

    kind: str = "none"
    """ "none", "tensor" (one scale, from the checkpoint), "token" (a scale each, as they come) or
    "group" (a scale for each `group` channels of a token)."""
    dtype: str = "float8_e4m3fn"
    group: int = 0


NOT_QUANTISED = Activations()


@dataclass(frozen=True)
class QuantisedWeight:
    """What stands for the weight `name` of the unquantised model."""

    name: str
    shape: tuple[int, ...]
    """As the model has it."""
    kind: str
    """The codes: "fp8" (e4m3), "int8", "int4", "nvfp4", "mxfp4", "nf4" or as a method calls them."""
    parts: Mapping[str, str]
    """The tensors of the checkpoint, by their roles."""
    decode: Callable[[Tensors], Encoded]
    activations: Activations = NOT_QUANTISED
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: all of an output's inputs do."""
    input_scale: str | None = None
    """The tensor that has the scale of all its inputs, where these have one."""
    unread: tuple[str, ...] = field(default=())
    """Further tensors of the checkpoint that belong to it: scales of what goes in and out."""
    transposed: bool = False
    """The model has it as [..., inputs, outputs]; codes are [..., outputs, inputs] always."""
    scale_dtype: torch.dtype = torch.float32
    """What holds the scales of blocks exactly."""
    encoding: str = ""
    """What ops compute with, where `kind` is a name of the format: "int8" for Q6_K."""
    axes: tuple[int, int] | None = None
    """The dimensions of outputs and of inputs, or of blocks of them, in each part that has two, of a
    stack in what one matrix has of a part: whole blocks of all parts are a weight that `decode`
    reads. None: parts lie otherwise."""
    offset: bool = False
    """Blocks have offsets that no part of its own holds."""
    members: tuple[tuple[QuantisedWeight, ...], ...] = ()
    """Of a stack whose matrices are weights of their own: those of each, one behind the other. `parts`
    are then the first one's."""
    alternates: bool = False
    """Outputs of members take turns."""

    @property
    def computed_as(self) -> str:
        """The codes that ops compute with: "fp8", "int8", "int4", "nvfp4" or "mxfp4"; others are
        decoded.
        """
        return self.encoding or self.kind

    @property
    def inputs(self) -> int:
        """How many numbers an output is the product of."""
        return self.shape[-2] if self.transposed else self.shape[-1]

    @property
    def has_offset(self) -> bool:
        """Whether something is added to its codes, or subtracted."""
        return self.offset or "zero" in self.parts

    @property
    def held_bytes(self) -> int:
        """The bytes of integers with their scales and offsets, where these are not as in the files;
        else 0.
        """
        if not self.encoding:
            return 0
        inputs, bits = self.shape[-1], 4 if self.encoding == "int4" else 8
        group = inputs if self.block is None else self.block[1]
        numbers = self.scale_dtype.itemsize + 4 * self.offset
        return math.prod(self.shape[:-1]) * (inputs * bits // 8 + numbers * blocks(inputs, group))

    @property
    def tensors(self) -> tuple[str, ...]:
        """All names of the checkpoint that belong to it."""
        own = (name for expert in self.members for each in expert for name in each.tensors)
        return tuple(own) if self.members else (*self.parts.values(), *self.unread)


class Layout(Protocol):
    """How a weight lies in the files."""

    @property
    def kind(self) -> str:
        """As `QuantisedWeight.kind`."""

    @property
    def block(self) -> tuple[int, int] | None:
        """As `QuantisedWeight.block`."""

    def size(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight with its scales."""


class Method(Protocol):
    """How a checkpoint is quantised."""

    @property
    def description(self) -> str:
        """In words: "fp8, 128 x 128 blocks"."""

    def weights(self, files: Files) -> Mapping[str, QuantisedWeight] | None:
        """Return the quantised weights by name; None: the method is for inputs or caches alone. Raise
        `OnboardError` for what does not fit.
        """

    def layout_of(self, module: str) -> Layout | None:
        """Return how a layer's weight lies in files that are not here, as far as the config says it;
        None: not as codes that ops compute with.
        """


def neighbours(
    tensors: Mapping[str, TensorMeta], stem: str, endings: Mapping[str, str]
) -> dict[str, str]:
    """Return those tensors that there are, by role: `endings` are put behind `stem`."""
    return {role: stem + ending for role, ending in endings.items() if stem + ending in tensors}


def require(tensors: Mapping[str, TensorMeta], name: str, needed: str) -> TensorMeta:
    """Return what is known of a tensor; raise `OnboardError` where it is missing."""
    if name not in tensors:
        raise OnboardError(f"the checkpoint has {needed} and no {name}", hint=DAMAGED)
    return tensors[name]


def require_shape(tensors: Mapping[str, TensorMeta], name: str, *allowed: tuple[int, ...]) -> None:
    """Raise `OnboardError` where a tensor has none of the allowed shapes."""
    found = tuple(tensors[name].shape)
    if found not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
        raise OnboardError(f"{name} is {list(found)}, not {wanted}", hint=DAMAGED)


def require_dtype(tensors: Mapping[str, TensorMeta], name: str, *allowed: torch.dtype) -> None:
    """Raise `OnboardError` where a tensor has none of the allowed dtypes."""
    if (found := tensors[name].dtype) not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise OnboardError(
            f"{name} is {str(found).removeprefix('torch.')}, not {wanted}", hint=DAMAGED
        )


def require_matrix(tensors: Mapping[str, TensorMeta], name: str) -> None:
    """Raise `OnboardError` where a tensor has not two dimensions."""
    if len(shape := tensors[name].shape) != 2:
        raise OnboardError(f"{name} is {list(shape)}, no matrix", hint=DAMAGED)


def require_scalar(tensors: Mapping[str, TensorMeta], name: str) -> None:
    """Raise `OnboardError` where a tensor is not one number."""
    require_shape(tensors, name, (), (1,), (1, 1))
    require_dtype(tensors, name, *NUMBERS)


def blocks(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)
