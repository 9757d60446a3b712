"""How many GPUs a model is registered with."""

from __future__ import annotations

from typing import Any

import pytest

from onboard.workflow.checkpoint import fewest_gpus as module
from onboard.workflow.checkpoint.fewest_gpus import FewestGpus, config_folder, fewest_gpus
from onboard.workflow.checkpoint.parameter_count import build_on_meta, module_counts
from tests.support.sharding.zoo import ROOT

GIB = 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 20,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
"""5.0e9 parameters: 9.4 GiB. A sequence takes 0.16 GiB, a rank 0.75 GiB of its own."""


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made once for all tests here."""
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path_factory.getbasetemp() / "plans"))


def found(monkeypatch: pytest.MonkeyPatch, gib: float, **changed: Any) -> FewestGpus:
    monkeypatch.setattr(module, "known_gpus", lambda: {"H100": int(gib * GIB)})
    config = LLAMA | changed
    with config_folder(config) as folder:
        count = sum(module_counts(build_on_meta(folder)).values())
        return fewest_gpus(folder, config, count, root=ROOT, model="x")


@pytest.mark.parametrize(("gib", "count"), [(20.0, 1), (14.0, 1), (9.0, 2), (5.0, 4), (4.0, 4)])
def test_the_fewest_gpus_that_hold_it_are_taken(
    monkeypatch: pytest.MonkeyPatch, gib: float, count: int
) -> None:
    """Of 5 GiB two hold the weights, and not what a rank has besides."""
    assert found(monkeypatch, gib).count == count


def test_a_model_that_takes_less_than_half_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "counted_or_kept", None)
    why = "its weights take less than half of one H100"
    assert found(monkeypatch, 20.0) == FewestGpus(1, why)
    with pytest.raises(TypeError):
        found(monkeypatch, 18.0)


def test_world_sizes_that_do_not_divide_the_heads_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = found(monkeypatch, 9.0, hidden_size=4000, num_attention_heads=25, num_key_value_heads=5)
    assert odd.count == 1
    assert "25 and 5 heads" in odd.why


def test_a_model_that_nothing_holds_gets_the_most_that_divide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(monkeypatch, 1.5) == FewestGpus(8, "not even 8 x H100 hold it")


def test_a_model_without_a_file_that_can_be_planned_gets_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "known_gpus", lambda: {"H100": 12 * GIB})
    config = LLAMA | {"model_type": "nothing_known"}
    with config_folder(config) as folder:
        alone = fewest_gpus(folder, config, 5 * 10**9, root=ROOT, model="x")
    assert alone.count == 1
    assert "nothing_known" in alone.why
