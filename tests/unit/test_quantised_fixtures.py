"""The quantised checkpoints of tests/support/quantised: small, complete and told of."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.quantised import FOLDER, variants

LARGEST, LARGEST_OF_ALL = 300_000, 7_000_000
LOGITS = {"logits", "activation_logits", "cache_logits"}
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def size(variant: str) -> int:
    return sum(path.stat().st_size for path in (FOLDER / variant).iterdir())


def test_there_are_variants_and_they_are_small_together() -> None:
    assert len(variants()) >= 20
    assert sum(map(size, variants())) < LARGEST_OF_ALL


def test_the_readme_tells_of_those_that_there_are() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == variants()


@pytest.mark.parametrize("variant", variants())
def test_a_variant_is_small_and_says_what_it_stands_for(variant: str) -> None:
    assert size(variant) < LARGEST
    expected = load_file(FOLDER / variant / "expected.safetensors")
    tokens = len(expected.pop("ids"))
    assert "logits" in expected
    for name in LOGITS & expected.keys():
        logits = expected.pop(name)
        assert logits.shape == (tokens, 64)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
    assert expected
    for name, product in expected.items():
        assert product.isfinite().all(), name
        assert product.ndim in (1, 2), name
        assert product.abs().amax(-1).min() > 0, name


@pytest.mark.parametrize("variant", [name for name in variants() if not name.startswith("gguf")])
def test_every_product_is_of_a_module_of_the_checkpoint(variant: str) -> None:
    with safe_open(FOLDER / variant / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    expected = load_file(FOLDER / variant / "expected.safetensors")
    for module in expected.keys() - LOGITS - {"ids"}:
        assert any(name.startswith((f"{module}.", f"{module}_")) for name in names), module
