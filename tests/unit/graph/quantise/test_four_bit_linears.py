"""Linears compute with a checkpoint's codes of four bits, and say what the decoded model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import LLM, SamplingParams
from onboard.hub import open_source
from onboard.quantised.encode_four_bits import encode_int4, encode_mxfp4
from onboard.sources import made_folders
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint
from tests.support.drawing import some_of

KEYS = tuple(f"quantize_{kind}_linear_from_config" for kind in ("int4", "mxfp4", "nvfp4", "int8"))
SAME = 1e-5
LINEARS = 4
"""Of a layer: q, k and v are one, gate and up are one."""
APART = 7


def run(folder: Path, backend: str, **settings: object) -> LLM:
    transforms = {key: {"backend": backend} for key in KEYS}
    config = {"max_seq_len": 64, "transforms": transforms, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def matches(llm: LLM) -> int:
    return sum(entry.num_matches for entry in llm.engine.history if entry.key in KEYS)


def greedy(llm: LLM, ids: list[int]) -> tuple[int, ...]:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return tuple(llm.generate([ids], params)[0].token_ids)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


VARIANTS = (
    "ct_w4a16_asym",
    "ct_w4a16_actorder",
    "ct_mxfp4",
    "ct_nvfp4",
    "modelopt_w4a8_awq",
    "gptq",
    "awq",
    "ct_w4a16",
    "modelopt_nvfp4",
    "modelopt_int4_awq",
    "gptq_asym",
    "auto_round",
    "gptq_desc_act",
    "ct_w4a16_g_idx",
)
ORDERED = ("gptq_desc_act", "ct_w4a16_g_idx")
"""The groups of q, k and v differ, and so do those of gate and up: each is a product."""


@pytest.mark.parametrize(
    "variant", some_of(VARIANTS, always=("gptq_desc_act", "ct_nvfp4"), by_chance=3)
)
def test_codes_say_what_the_decoded_model_says(variant: str) -> None:
    count = APART if variant in ORDERED else LINEARS
    folder = quantised.FOLDER / variant
    ids = load_file(folder / "expected.safetensors")["ids"].tolist()
    codes, decoded = run(folder, "torch"), run(folder, "auto")
    assert (matches(codes), matches(decoded)) == (count, 0)
    said = [fact for fact in codes.engine.facts if "are computed with as they are" in fact]
    assert len(said) == 1
    assert not any("are decoded" in fact for fact in codes.engine.facts)
    assert error(codes.logits(ids), decoded.logits(ids)) < SAME
    assert greedy(codes, ids[:5]) == greedy(decoded, ids[:5])
    words = [p for p in codes.engine.gm.parameters() if p.dtype == torch.int32]
    assert len(words) == count


GGUF = [
    ("gguf_q4_0", LINEARS + 1, LINEARS, ["1 weights in q8_0", "7 weights in q4_0"]),  # and the head
    ("gguf_q8_0", LINEARS + 1, 0, ["8 weights in q8_0"]),
    (
        "gguf_k_mixed",
        LINEARS + 3,
        2,  # two of the three are one layer
        ["2 weights in q5_k", "3 weights in q4_k", "3 weights in q6_k"],
    ),
]


@pytest.mark.parametrize(("variant", "count", "four_bits", "facts"), GGUF)
def test_codes_of_a_gguf_file(
    variant: str,
    count: int,
    four_bits: int,
    facts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All types with kernels are computed with, in layers that are cut where these differ."""
    pytest.importorskip("gguf", reason='the extra "gguf" is not installed')
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    made_folders.kept_folders.cache_clear()
    folder = open_source(str(quantised.FOLDER / variant / "model.gguf")).weights()
    codes, decoded = run(folder, "torch"), run(folder, "auto")
    assert (matches(codes), matches(decoded)) == (count, 0)
    said = [fact for fact in codes.engine.facts if "are computed with as they are" in fact]
    assert sorted(said) == [f"{fact} (gguf) are computed with as they are" for fact in facts]
    words = [each for each in codes.engine.gm.parameters() if each.dtype == torch.int32]
    assert len(words) == four_bits
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert error(codes.logits(ids), decoded.logits(ids)) < SAME
    assert greedy(codes, ids[:5]) == greedy(decoded, ids[:5])


def test_groups_without_a_common_size_are_decoded(tmp_path: Path) -> None:
    source = quantised.FOLDER / "gptq_desc_act"
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name][tensors[name] == 1] = 0
    save_file(tensors, path, {"format": "pt"})
    codes, decoded = run(tmp_path, "torch"), run(tmp_path, "auto")
    assert matches(codes) == 0
    assert torch.equal(codes.logits([1, 2, 3]), decoded.logits([1, 2, 3]))


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_weights_are_quantised_as_they_are_loaded(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=192, head_dim=32)
    ids = [3, 1, 4, 1, 5, 9]
    found = run(tmp_path, "auto", quantize=kind)
    assert matches(found) % LINEARS == 0 < matches(found)
    exact = run(tmp_path, "auto").logits(ids)
    assert 1e-3 < error(found.logits(ids), exact) < 0.5
    encode = encode_int4 if kind == "int4" else encode_mxfp4
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = encode(tensors[name]).values()
    save_file(tensors, path, {"format": "pt"})
    assert error(found.logits(ids), run(tmp_path, "auto").logits(ids)) < SAME


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_random_weights_are_those_of_a_fresh_model(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=192, head_dim=32)
    codes = run(tmp_path, "auto", quantize=kind, skip_loading_weights=True).logits([1, 2, 3])
    plain = run(tmp_path, "auto", skip_loading_weights=True).logits([1, 2, 3])
    assert 0.5 < float(codes.std() / plain.std()) < 2


Q4_1 = [("llama", 2 * LINEARS + 1), ("qwen3_moe", 9)]
"""Two layers and the head; those with mixtures have two products of attention, a router and one mixture."""


@pytest.mark.parametrize(("model_type", "count"), Q4_1)
def test_codes_with_offsets(
    model_type: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_1 adds a number to each code: linears and experts compute with words of such codes."""
    pytest.importorskip("gguf", reason='the extra "gguf" is not installed')
    from tests.unit.quantised.test_gguf import written

    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    made_folders.kept_folders.cache_clear()
    folder = open_source(str(written(model_type, tmp_path, "Q4_1"))).weights()
    transforms = {key: {"backend": "torch"} for key in (*KEYS, "quantize_int4_moe_from_config")}
    codes, decoded = run(folder, "torch", transforms=transforms), run(folder, "auto")
    taken = [entry for entry in codes.engine.history if entry.key in transforms]
    assert sum(entry.num_matches for entry in taken) == count
    assert error(codes.logits([3, 1, 4, 1, 5]), decoded.logits([3, 1, 4, 1, 5])) < SAME
    zeros = [name for name, _ in codes.engine.gm.named_parameters() if name.endswith("_zero")]
    assert len(zeros) >= count
