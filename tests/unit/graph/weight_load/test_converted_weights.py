from __future__ import annotations

import pytest
import torch
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from onboard.graph.weight_load.converted_weights import Source, converted


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    declared: list[object] = [
        WeightRenaming("old", "new"),
        WeightConverter(
            "attn.qk.weight", ["attn.q.weight", "attn.k.weight"], operations=[Chunk(dim=0)]
        ),
        WeightConverter(
            ["q_conv.weight", "k_conv.weight"], "conv.weight", operations=[Concatenate(dim=0)]
        ),
        WeightConverter(r"mlp\.w13", r"mlp\.both", operations=[Interleave(dim=1)]),
        WeightConverter("turned.weight", "other.weight", operations=[Transpose(0, 1)]),
    ]
    found = {"known": declared}
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", found.get)
    return declared


def test_what_transformers_makes_of_other_tensors_is_found(rules: list[object]) -> None:
    available = [
        "h.0.attn.qk.weight",
        "h.0.q_conv.weight",
        "h.0.k_conv.weight",
        "h.1.q_conv.weight",
        "turned.weight",
    ]
    available.append("h.0.mlp.w13")
    wanted = [
        "h.0.attn.k.weight",
        "h.0.conv.weight",
        "h.1.conv.weight",
        "other.weight",
        "h.2.attn.q.weight",
    ]
    wanted.append("h.0.mlp.both")
    assert converted(wanted, available, ["NoSuchClass", "known"]) == {
        "h.0.attn.k.weight": Source(("h.0.attn.qk.weight",), 0, 1, 2),
        "h.0.conv.weight": Source(("h.0.q_conv.weight", "h.0.k_conv.weight"), 0),
        "h.0.mlp.both": Source(("h.0.mlp.w13",), 1, alternate=True),
    }
    assert converted(wanted, available, ["unknown"]) == {}


def test_names_are_renamed_first(rules: list[object]) -> None:
    found = converted(
        ["new.attn.q.weight"],
        ["old.attn.qk.weight"],
        ["known"],
        lambda name: name.replace("old", "new"),
    )
    assert found == {"new.attn.q.weight": Source(("old.attn.qk.weight",), 0, 0, 2)}


def test_values_are_those_of_transformers_operations(rules: list[object]) -> None:
    whole = torch.randn(6, 3)
    targets = ["attn.q.weight", "attn.k.weight"]
    expected = Chunk(dim=0).convert({"x": whole}, ["x"], targets)
    for index, target in enumerate(targets):
        assert torch.equal(Source(("x",), 0, index, 2).of([whole]), expected[target])
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    joined = Concatenate(dim=0).convert({"a": parts[0], "b": parts[1]}, ["a", "b"], ["y"])
    assert torch.equal(Source(("a", "b")).of(parts), joined["y"])
    pairs = torch.randn(2, 6, 3)
    expected = Interleave(dim=1).convert({"x": pairs}, ["x"], ["y"])
    assert torch.equal(Source(("x",), 1, alternate=True).of([pairs]), expected["y"])


def test_a_scalar_is_itself() -> None:
    assert torch.equal(Source(("a",)).of([torch.tensor(3.0)]), torch.tensor(3.0))
