"""Where in a GGUF file the tensors of a model are: its names are llama.cpp's, a layer's experts are
one tensor, and some values are kept otherwise than transformers has them.

The gguf package knows which of its names stands for which of transformers'. How values were changed
is what llama.cpp's converter does for each architecture (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.sources.gguf_architectures import architectures
from onboard.sources.gguf_header import GgufHeader
from onboard.sources.gguf_package import gguf
from onboard.sources.gguf_rotation import FACTORS


@dataclass(frozen=True)
class Place:
    """Where one of the model's tensors is, and what has to be done to it."""

    tensor: str
    expert: int | None = None
    """Of a stack, which one."""
    heads: int = 0
    """In how many heads rows are to be put back in order; 0: they are in order."""
    is_plus_one: bool = False
    shape: tuple[int, ...] | None = None
    """The model's, where the file leaves out a dimension of one."""


def places(header: GgufHeader, model: Any) -> dict[str, Place]:
    """Return where each tensor of a model is, by the name that a checkpoint in safetensors has.

    `model` is transformers' own, on the meta device. Tensors of the file that the model has no name
    for keep theirs. Raises `OnboardError` for an architecture whose changes are not known.
    """
    if header.architecture not in architectures():
        raise OnboardError(
            f"the GGUF file is of the architecture {header.architecture[:60]!r}, which onboard cannot read",
            hint=f"Read are {', '.join(architectures())}; use a release in safetensors",
        )
    names = _NameMap(header, model)
    found: dict[str, Place] = {}
    for name, parameter in model.state_dict().items():
        for source, tensor in names.sources(name):
            found |= dict(_placed(header, source, tensor, tuple(parameter.shape)))
    used = {place.tensor for place in found.values()}
    left = header.tensors.keys() - used
    return found | {name: Place(name) for name in left if not FACTORS.fullmatch(name)}


class _NameMap:
    """The gguf package's names of an architecture, asked with those of a model."""

    def __init__(self, header: GgufHeader, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.header = header
        self.rules = get_model_conversion_mapping(model)
        kinds = {name: kind for kind, name in gguf().MODEL_ARCH_NAMES.items()}
        layers = int(model.config.get_text_config().num_hidden_layers)
        self.names = gguf().get_tensor_name_map(kinds[header.architecture], layers)

    def sources(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield names of a checkpoint from which a model's tensor is made, "*" in an expert's place,
        and the file's tensors that have them.
        """
        for source in (name, *self._split(name)):
            if (tensor := self._tensor(source)) is not None:
                yield source, tensor

    def _split(self, name: str) -> Iterator[str]:
        """Yield the names of the parts that transformers makes a tensor of."""
        for rule in self.rules:
            targets = [each.replace("\\.", ".") for each in rule.target_patterns]
            target = next((each for each in targets if name.endswith(each)), None)
            if target is not None and getattr(rule, "operations", None):
                stem = name.removesuffix(target)
                yield from (stem + each.replace("\\.", ".") for each in rule.source_patterns)

    def _tensor(self, name: str) -> str | None:
        stem, dot, suffix = name.replace(".*.", ".").rpartition(".")
        for each in (stem, *self._older(stem)):
            found = self.names.get_name(each)
            if found is not None and f"{found}{dot}{suffix}" in self.header.tensors:
                return f"{found}{dot}{suffix}"
        return None

    def _older(self, name: str) -> Iterator[str]:
        """Yield what a module was called before transformers renamed it."""
        for rule in self.rules:
            pairs = zip(rule.source_patterns, rule.target_patterns, strict=False)
            for source, target in pairs:
                if re.fullmatch(r"[\w.]+", source + target) and target in f"{name}.":
                    yield f"{name}.".replace(target, source).removesuffix(".")


def _placed(
    header: GgufHeader, name: str, tensor: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, Place]]:
    if "*" in name:
        stack = header.tensors[tensor].shape[0]
        yield from ((name.replace("*", str(index)), Place(tensor, index)) for index in range(stack))
        return
    stored = header.tensors[tensor].shape
    is_narrower = stored != shape and stored == tuple(size for size in shape if size != 1)
    is_plus_one = architectures()[header.architecture].norms_plus_one and tensor.endswith(
        "norm.weight"
    )
    yield (
        name,
        Place(
            tensor,
            heads=_heads(header, tensor),
            is_plus_one=is_plus_one,
            shape=shape if is_narrower else None,
        ),
    )


def _heads(header: GgufHeader, tensor: str) -> int:
    """Return in how many heads a tensor's rows are in the order of pairs."""
    role = tensor.split(".")[-2]
    in_pairs = architectures()[header.architecture].rows_in_pairs
    if not in_pairs or role not in ("attn_q", "attn_k"):
        return 0
    count = header.of_model("attention.head_count")
    if role == "attn_k":
        count = header.of_model("attention.head_count_kv") or count
    rows = header.tensors[tensor].shape[0]
    if type(count) is not int or count < 1 or rows % (2 * count):
        raise OnboardError(
            f"the GGUF file's {tensor} has {rows} rows, which are no {str(count)[:20]} heads",
            hint="Use a release in safetensors",
        )
    return count


def in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows [outputs, ...] with the two halves of each head behind one another."""
    if not heads:
        return rows
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
