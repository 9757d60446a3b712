"""Checkpoints that the formats' own libraries wrote stand for the weights that these libraries
say.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from tests.support import quantised

SAME = 1e-6
SAFETENSORS = [name for name in quantised.variants() if not name.startswith("gguf")]


@pytest.mark.parametrize("variant", SAFETENSORS)
def test_weights_are_what_their_writer_says(variant: str) -> None:
    folder = quantised.FOLDER / variant
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    expected = load_file(folder / "expected.safetensors")
    modules = [name for name in expected if name != "ids" and not name.endswith("logits")]
    assert {name.removesuffix(".weight") for name in checkpoint.weights} == set(modules)
    for module in modules:
        name = module if module in checkpoint.weights else f"{module}.weight"
        weight = checkpoint.read(name).double()
        assert weight.shape == checkpoint.names()[name].shape
        if weight.dim() == 3:  # a stack of experts, which has its inputs first
            weight = weight.mT
        found = weight @ quantised.probe(weight.shape[-1])
        error = (found - expected[module]).norm() / expected[module].norm()
        assert error < SAME, f"{module}: {error:.1e}"


@pytest.mark.parametrize("variant", SAFETENSORS)
def test_no_tensor_is_left_over(variant: str) -> None:
    names = open_checkpoint(quantised.FOLDER / variant).names()
    endings = (
        "_scale",
        "_scale_inv",
        "_scale_2",
        "_blocks",
        "_scales",
        "qzeros",
        "g_idx",
        "absmax",
    )
    assert not [name for name in names if name.endswith(endings)]
    assert all(meta.dtype.is_floating_point for meta in names.values())


def test_the_dtype_of_what_is_read_is_exact() -> None:
    checkpoint = open_checkpoint(quantised.FOLDER / "hf_fp8_llama")
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.read(name).dtype == torch.float32
    assert not checkpoint.is_stored(name)
    assert checkpoint.is_stored("model.norm.weight")
