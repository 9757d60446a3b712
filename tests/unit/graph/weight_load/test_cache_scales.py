"""Keys and values are cached with the checkpoint's scales."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import LLM
from onboard.errors import OnboardError
from onboard.graph.cache_init.interface import cache_dtype
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.quantised_folder import asks_for_float8_cache
from onboard.graph.weight_load.scales.cache_scales import scales_of
from tests.support import quantised
from tests.support.graph.harness import settled_config

LINEARS = ("quantize_fp8_linear_from_config", "quantize_finegrained_fp8_linear_from_config")
KEY = "quantize_kv_cache_from_config"
SAME = 1e-5


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def opened(folder: Path, dtype: str = "float8_e4m3fn") -> LLM:
    config = {
        "max_seq_len": 64,
        "kv_cache_config": {"dtype": dtype, "tokens_per_block": 8},
        "transforms": {key: {"backend": "torch"} for key in LINEARS},
    }
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def changed(folder: Path, names: dict[str, torch.Tensor | None]) -> Path:
    """`ct_fp8_kv_cache` with other scales; None takes one away."""
    shutil.copytree(quantised.FOLDER / "ct_fp8_kv_cache", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in names}
    tensors |= {name: tensor for name, tensor in names.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("variant", ["ct_fp8_kv_cache", "modelopt_fp8"])
def test_logits_are_those_of_the_writers_cache(variant: str) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    llm = opened(folder)
    assert error(llm.logits(ids), expected["cache_logits"]) < SAME
    entry = next(each for each in llm.engine.history if each.key == KEY)
    assert entry.num_matches == 2
    fact = "keys and values are cached in float8_e4m3fn, with 4 scales of the checkpoint"
    assert fact in llm.engine.facts
    assert error(expected["activation_logits"], expected["cache_logits"]) > 1e-3


def test_a_cache_of_another_dtype_has_no_scales() -> None:
    folder = quantised.FOLDER / "ct_fp8_kv_cache"
    expected = load_file(folder / "expected.safetensors")
    llm = opened(folder, "auto")
    assert error(llm.logits(expected["ids"].tolist()), expected["activation_logits"]) < SAME
    assert "the checkpoint's 4 scales of cached keys and values are not used" in llm.engine.facts


def layer(kind: str, index: int = 0) -> str:
    return f"model.layers.{index}.self_attn.{kind}"


NAMES = {
    "of both": ({"self_attn.kv_scale"}, ("self_attn.kv_scale", "self_attn.kv_scale")),
    "of keys alone": ({"self_attn.attn.k_scale"}, ("self_attn.attn.k_scale",) * 2),
    "of projections": (
        {"self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"},
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ),
    "beside attention": ({"k_scale", "v_scale"}, ("k_scale", "v_scale")),
    "of queries": ({"self_attn.q_scale"}, None),
    "of another layer": (set(), None),
}


@pytest.mark.parametrize("name", NAMES)
def test_scales_by_other_names(name: str) -> None:
    given, expected = NAMES[name]
    cache_scales = (*(f"m.layers.0.{each}" for each in given), "m.layers.1.self_attn.k_scale")
    checkpoint: Any = SimpleNamespace(cache_scales=cache_scales)
    weights = {f"layers.{i}.self_attn.q.weight": f"m.layers.{i}.self_attn.q.weight" for i in (0, 1)}
    weights |= {f"layers.{i}.mlp.weight": f"m.layers.{i}.mlp.weight" for i in (0, 1)}
    found = scales_of("layers.0.self_attn", checkpoint, weights)
    assert found == (expected and tuple(f"m.layers.0.{each}" for each in expected))


def test_a_layer_without_scales_is_cached_as_it_is(tmp_path: Path) -> None:
    one = torch.tensor([[[0.0125]]])
    without = {layer(f"{kind}_scale", index): None for kind in "kv" for index in (0, 1)}
    some = without | {layer("k_scale"): one.clone(), layer("v_scale"): one.clone()}
    every = some | {layer(f"{kind}_scale", 1): torch.ones(1) for kind in "kv"}
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found = [
        opened(changed(tmp_path / str(index), each)).logits(ids)
        for index, each in enumerate((some, every, without))
    ]
    assert torch.equal(found[0], found[1])
    assert error(found[0], found[2]) > 1e-4


@pytest.mark.parametrize(
    ("scale", "said"),
    [(torch.tensor([0.0]), "no scale"), (torch.ones(3) / 99, "3 numbers, not 1 or 1")],
)
def test_what_is_no_scale_is_refused(scale: torch.Tensor, said: str, tmp_path: Path) -> None:
    folder = changed(tmp_path / "wrong", {layer("k_scale"): scale})
    with pytest.raises(OnboardError, match=rf"k_scale .*{said}"):
        opened(folder).logits([1, 2])


ASKING = [("ct_fp8_kv_cache", True), ("modelopt_fp8", True), ("ct_fp8_static", False)]


@pytest.mark.parametrize(("variant", "asks"), [*ASKING, ("awq", False)])
def test_a_checkpoint_that_asks_for_it_gets_it_in_16_bit_runs_on_a_gpu(
    variant: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantised.FOLDER / variant
    assert asks_for_float8_cache(folder) == asks
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    wanted = torch.float8_e4m3fn if asks else None
    assert cache_dtype(run_on("cuda", torch.bfloat16, folder)) == wanted
    assert cache_dtype(run_on("cuda", torch.float32, folder)) is None
    assert cache_dtype(run_on("cpu", torch.bfloat16, folder)) is None
    assert cache_dtype(run_on("cuda", torch.bfloat16, folder, "bfloat16")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert cache_dtype(run_on("cuda", torch.bfloat16, folder)) is None


def run_on(device: str, dtype: torch.dtype, folder: Path, cache: str = "auto") -> TransformContext:
    factory: Any = SimpleNamespace(checkpoint=folder, mode="graph")
    runtime = settled_config(kv_cache_config={"dtype": cache})
    return TransformContext(factory, runtime, torch.device(device), dtype)


def test_what_modelopt_says_beside_the_config_counts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(quantised.FOLDER / "modelopt_fp8", folder)
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    assert asks_for_float8_cache(folder)
    (folder / "hf_quant_config.json").unlink()
    assert not asks_for_float8_cache(folder)
    said["kv_cache_scheme"] = {"num_bits": 8, "type": "int"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    assert not asks_for_float8_cache(folder)
