"""Random layers of each format, written number by number by code of ours that knows only the formats:
they stand for the weights that were written, compute with their codes where there are kernels, and a
damaged one is refused in one line.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onboard.errors import OnboardError
from onboard.graph.quantise.four_bit_parts import LINEARS, four_bit_part
from onboard.graph.quantise.int8_parts import int8_part
from onboard.graph.quantise.schemes import Schemes, group_of
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.ops.four_bits.four_bits import unpacked
from onboard.ops.integers.int8_linear import int8_values
from tests.support.quantised_drawing import FORMATS, Layer

NAME = "model.layers.0.mlp.up_proj"
SAME = 1e-6
CASES = 25


def drawn(kind: str) -> list[Layer]:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    return [FORMATS[kind](draw) for _ in range(CASES)]


def write(layer: Layer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": layer.said}))
    tensors = {f"{NAME}.{ending}": tensor for ending, tensor in layer.tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def opened(folder: Path) -> QuantisedCheckpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    return checkpoint


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_stand_for_what_was_written(kind: str, tmp_path: Path) -> None:
    for index, layer in enumerate(drawn(kind)):
        checkpoint = opened(write(layer, tmp_path / str(index)))
        found = checkpoint.read(f"{NAME}.weight")
        assert found.shape == layer.weight.shape, layer.said
        assert error(found, layer.weight) < SAME, layer.said
        pieces = [each.values() for _, each in checkpoint.encoded(f"{NAME}.weight").pieces()]
        assert torch.equal(torch.cat(pieces), found)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_ops_compute_with_is_the_same_weight(kind: str, tmp_path: Path) -> None:
    kept = 0
    for index, layer in enumerate(drawn(kind)):
        checkpoint = opened(write(layer, tmp_path / str(index)))
        (weight,) = checkpoint.weights.values()
        scheme = Schemes(checkpoint.part, checkpoint.input_scale).of(weight)
        if scheme is None or weight.computed_as == "fp8":
            continue
        kept += 1
        encoded, group = checkpoint.encoded(weight.name), group_of(weight)
        if weight.computed_as == "int8":
            offset = int8_part(encoded, "offset") if weight.has_offset else None
            codes, scale = int8_part(encoded, "codes"), int8_part(encoded, "scale")
            found = int8_values(codes, scale, offset, group)
        else:
            assert weight.computed_as in LINEARS
            zero = four_bit_part(encoded, "zero") if "zero" in weight.parts else None
            words, scale = four_bit_part(encoded, "words"), four_bit_part(encoded, "scale")
            found = unpacked(words, scale, zero, None, "int4", group, weight.shape[1])
        expected = layer.weight
        if encoded.groups is not None:
            expected = expected[:, int8_part(encoded, "order")]
        assert error(found, expected) < SAME, layer.said
    assert kept > 0


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_layers_are_refused(kind: str, tmp_path: Path) -> None:
    for index, layer in enumerate(drawn(kind)):
        for place, damaged in enumerate(damages(layer)):
            with pytest.raises(OnboardError) as caught:
                opened(write(damaged, tmp_path / f"{index}-{place}")).names()
            assert "\n" not in str(caught.value)
            assert str(caught.value)


def damages(layer: Layer) -> list[Layer]:
    """The layer without a part, with one that is too short, with an unknown scheme."""
    found = []
    for ending in layer.needed:
        left = {name: each for name, each in layer.tensors.items() if name != ending}
        found.append(Layer(left, layer.said, layer.weight, ()))
    for ending, tensor in layer.tensors.items():
        checked = ending in (*layer.needed, "g_idx") and ending != "weight_shape"
        if not checked or tensor.numel() < 2:
            continue
        dim = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
        short = tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()
        found.append(Layer(layer.tensors | {ending: short}, layer.said, layer.weight, ()))
    unknown = json.loads(json.dumps(layer.said))
    groups = unknown.get("config_groups")
    (groups["group_0"]["weights"] if groups else unknown)["spin"] = {"angle": 3}
    found.append(Layer(layer.tensors, unknown, layer.weight, ()))
    return found
