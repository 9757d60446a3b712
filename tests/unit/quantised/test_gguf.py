"""GGUF files stand for the weights, and for the model, that their writers say."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import (
    QuantisedCheckpoint,
    decoded_state,
    open_checkpoint,
)
from onboard.hf.hf_model import load_reference
from onboard.hub import open_source
from onboard.sources.file_config import shortest
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.checkpoint.usable_weights import check_fit, check_weights
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint
from tests.support.gguf_writer import write_gguf

gguf = pytest.importorskip("gguf", reason='the extra "gguf" is not installed')

SAME = 1e-6
FIXTURES = [name for name in quantised.variants() if name.startswith("gguf")]
DEQUANTISED = [
    kind
    for kind in gguf.GGML_QUANT_SIZES
    if kind.name
    not in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0")
]
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64},
    "qwen2": {"intermediate_size": 64},
    "qwen3": {"intermediate_size": 64, "head_dim": 32},
    "qwen3_moe": {"intermediate_size": 64, "head_dim": 32, **MIXTURE},
    "qwen2_moe": {"intermediate_size": 64, "shared_expert_intermediate_size": 64, **MIXTURE},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {"intermediate_size": 64, "head_dim": 32},
    "gemma2": {"intermediate_size": 64, "head_dim": 32},
    "gemma3_text": {"intermediate_size": 64, "head_dim": 32},
    "granite": {"intermediate_size": 64},
    "olmo2": {"intermediate_size": 64},
    "phi3": {"intermediate_size": 64, "pad_token_id": 0},
    "starcoder2": {"intermediate_size": 64},
}
FROM_METADATA = ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe"]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from onboard.sources import made_folders

    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path_factory.mktemp("cache")))
    made_folders.kept_folders.cache_clear()


def folder_of(variant: str) -> Path:
    return open_source(str(quantised.FOLDER / variant / "model.gguf")).weights()


def written(model_type: str, folder: Path, kind: str = "F32", **more: Any) -> Path:
    """A random model's folder, and beside it `gguf/model.gguf`; norms and biases, which begin as
    ones and zeros, are random, too.
    """
    source = save_checkpoint(folder / "source", model_type, **SHAPES[model_type])
    values = load_file(source / "model.safetensors")
    for value in values.values():
        if value.dim() == 1:
            value += torch.randn(value.shape) / 4
    save_file(values, source / "model.safetensors", {"format": "pt"})
    (folder / "gguf").mkdir()
    assert any(value.dim() == 1 for value in values.values())
    return write_gguf(source, folder / "gguf" / "model.gguf", kind, **more)


@pytest.mark.parametrize("kind", DEQUANTISED, ids=lambda kind: kind.name)
def test_blocks_are_dequantised_as_the_package_does(kind: Any) -> None:
    from onboard.quantised.layouts.gguf_blocks import decode

    _, size = gguf.GGML_QUANT_SIZES[kind]
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (3, 5, 4 * size), generator=generator, dtype=torch.uint8)
    expected = torch.from_numpy(gguf.dequantize(rows.numpy(), kind)).nan_to_num()
    found = decode(kind.name, rows).values().nan_to_num()
    assert found.shape == expected.shape
    finite = expected.abs() < 1e30
    torch.testing.assert_close(found[finite], expected[finite], rtol=SAME, atol=0)


@pytest.mark.parametrize("variant", FIXTURES)
def test_weights_are_what_their_writer_says(variant: str) -> None:
    checkpoint = open_checkpoint(folder_of(variant))
    assert isinstance(checkpoint, QuantisedCheckpoint)
    expected = load_file(quantised.FOLDER / variant / "expected.safetensors")
    modules = [name for name in expected if name not in ("ids", "logits")]
    assert {name.removesuffix(".weight") for name in checkpoint.weights} == set(modules)
    for module in modules:
        weight = checkpoint.read(f"{module}.weight").double()
        found = weight @ quantised.probe(weight.shape[-1])
        error = (found - expected[module]).norm() / expected[module].norm()
        assert error < SAME, f"{module}: {error:.1e}"


@pytest.mark.parametrize("variant", FIXTURES)
def test_the_model_of_the_metadata_computes_the_writers_logits(variant: str) -> None:
    from transformers import AutoConfig

    folder = folder_of(variant)
    expected = load_file(quantised.FOLDER / variant / "expected.safetensors")
    config = AutoConfig.from_pretrained(folder)
    model = load_reference(config, folder, state=decoded_state(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=expected["ids"].view(1, -1)).logits[0]
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert error < 1e-5, f"{error:.1e}"


@pytest.mark.parametrize("model_type", SHAPES)
def test_tensors_of_an_architecture_are_those_it_was_made_of(
    model_type: str, tmp_path: Path
) -> None:
    file = written(model_type, tmp_path)
    source = tmp_path / "source"
    if model_type not in FROM_METADATA:
        shutil.copyfile(source / "config.json", file.parent / "config.json")
    folder = open_source(str(file.parent)).weights()
    checkpoint, expected = open_checkpoint(folder), load_file(source / "model.safetensors")
    for stored, tensor in expected.items():
        name = stored.replace(".block_sparse_moe.", ".mlp.")  # as transformers renames it
        found = checkpoint.read(name)
        assert found.shape == tensor.shape == checkpoint.names()[name].shape, name
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-6, msg=name)
    check_fit(build_on_meta(folder), checkpoint.names())
    check_weights(folder)


@pytest.mark.parametrize("model_type", FROM_METADATA)
def test_the_config_of_the_metadata_is_the_models(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    file = written(model_type, tmp_path)
    found = AutoConfig.from_pretrained(open_source(str(file)).files()).to_dict()
    expected = AutoConfig.from_pretrained(tmp_path / "source").to_dict()
    aside = {"_name_or_path", "dtype", "transformers_version", "pad_token_id", "architectures"}
    # Of the default of its class, where the other leaves it to be computed
    aside |= {"head_dim"} if expected.get("head_dim") is None else set()
    differ = {
        key: (found.get(key), value)
        for key, value in expected.items()
        if key not in aside and found.get(key) != value
    }
    assert differ == ({"norm_topk_prob": (True, False)} if model_type == "qwen3_moe" else {})


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2_moe", "gemma2", "phi3", "starcoder2", "gemma3_text"]
)
def test_transformers_reads_the_same_from_the_file(model_type: str, tmp_path: Path) -> None:
    """The writer of these tests, held against a second reader."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = written(model_type, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert theirs.keys() == model.state_dict().keys() - tied
    for name, tensor in theirs.items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_types_of_numbers(kind: str, tmp_path: Path) -> None:
    file = written("llama", tmp_path, kind)
    checkpoint = open_checkpoint(open_source(str(file)).weights())
    expected = load_file(tmp_path / "source" / "model.safetensors")
    assert isinstance(checkpoint, QuantisedCheckpoint) == (kind == "Q8_0")
    for name, tensor in expected.items():
        limit = 0.005 if kind == "Q8_0" else 0.002 if kind == "F16" else 0.008
        error = (checkpoint.read(name).float() - tensor).abs().max() / tensor.abs().max()
        assert error < limit, name


@pytest.mark.parametrize(
    ("model_type", "more", "said"),
    [
        ("llama", {"leading_dense_block_count": 1}, "leading_dense_block_count"),
        ("llama", {"attention.sliding_window": 64}, "attention.sliding_window"),
        ("gemma2", {}, "gemma2"),
        ("mixtral", {"expert_count": 4}, "llama"),
    ],
)
def test_metadata_that_say_too_little_or_too_much(
    model_type: str, more: dict[str, int], said: str, tmp_path: Path
) -> None:
    file = written(model_type, tmp_path, **more)
    with pytest.raises(OnboardError, match=said) as caught:
        open_source(str(file)).files()
    assert "config.json" in str(caught.value.hint)


def test_a_config_beside_the_file_comes_first(tmp_path: Path) -> None:
    file = written("llama", tmp_path, leading_dense_block_count=1)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    found = json.loads((open_source(str(file)).files() / "config.json").read_text())
    assert found["rope_theta"] == 7.0


def test_the_tokenizer_is_the_files(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = open_source(str(written("llama", tmp_path))).files()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(["a", "b", "</s>"]) == [3, 4, 2]


def test_one_of_several_files_is_named(tmp_path: Path) -> None:
    first = written("llama", tmp_path)
    shutil.copyfile(first, first.with_name("other.Q8_0.gguf"))
    with pytest.raises(OnboardError, match="2 GGUF files") as caught:
        open_source(str(first.parent)).files()
    assert f"{first.parent}/model.gguf" in str(caught.value.hint)
    (first.parent / "mmproj-model.gguf").write_bytes(b"GGUF")
    assert open_source(str(first)).weights().is_dir()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_factors(channels: int) -> torch.Tensor:
    """What llama.cpp's converter writes of Llama 3.1's rotation (`generate_extra_tensors`)."""
    factors = []
    for channel in range(channels // 2):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (2 * channel / channels)
        if wavelength < 64 / 4.0:
            factors.append(1.0)
        elif wavelength > 64 / 1.0:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(factors)) > 2
    return torch.tensor(factors)


def with_factors(folder: Path, name: str, factors: torch.Tensor, **config: Any) -> Path:
    """A random llama's file with factors of the rotation, and a config beside it."""
    source = save_checkpoint(folder / "source", intermediate_size=64, head_dim=32)
    (folder / "gguf").mkdir()
    file = write_gguf(source, folder / "gguf" / "model.gguf", others={name: factors})
    said = json.loads((source / "config.json").read_text())
    (file.parent / "config.json").write_text(json.dumps({**said, **config}))
    return file


def test_factors_of_the_rotation_are_the_configs(tmp_path: Path) -> None:
    factors = llama3_factors(32)
    file = with_factors(tmp_path / "a", "rope_freqs.weight", factors, rope_parameters=LLAMA3)
    assert "rope_freqs.weight" not in open_checkpoint(open_source(str(file)).weights()).names()
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16}
    rope = {**long, "long_factor": factors.tolist(), "original_max_position_embeddings": 64}
    more = {"rope_parameters": rope}
    file = with_factors(tmp_path / "b", "rope_factors_long.weight", factors, **more)
    open_checkpoint(open_source(str(file)).weights())


@pytest.mark.parametrize("name", ["rope_freqs", "rope_factors_long"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, LLAMA3])
def test_factors_of_another_rotation(name: str, rope: dict[str, Any], tmp_path: Path) -> None:
    factors = llama3_factors(32)
    factors[3 if rope is LLAMA3 else 0] *= 1.01
    file = with_factors(tmp_path, f"{name}.weight", factors, rope_parameters=rope)
    with pytest.raises(OnboardError, match=f"{name}.* are not those of config.json") as caught:
        open_checkpoint(open_source(str(file)).weights())
    assert "config.json" in str(caught.value.hint)


def test_a_folder_runs_whose_only_weights_are_the_files() -> None:
    """The fixture's folder: beside the file lie other tensors, which are no model's."""
    from onboard import LLM

    folder = quantised.FOLDER / "gguf_q8_0"
    assert (folder / "expected.safetensors").is_file()
    expected = load_file(folder / "expected.safetensors")
    llm = LLM(folder, device="cpu", dtype="float32", config={"max_seq_len": 64})
    logits = llm.logits(expected["ids"].tolist())
    assert (logits - expected["logits"]).norm() / expected["logits"].norm() < 1e-5


def test_safetensors_beside_it_come_first(tmp_path: Path) -> None:
    file = written("llama", tmp_path)
    shutil.copyfile(file, tmp_path / "source" / "model.gguf")
    assert open_source(str(tmp_path / "source")).weights() == tmp_path / "source"
    assert type(open_checkpoint(tmp_path / "source")).__name__ == "Checkpoint"


def test_without_the_package_a_command_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from onboard.sources import gguf_package

    file = written("llama", tmp_path)
    gguf_package.block_sizes.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OnboardError) as caught:
        open_source(str(file)).files()
    assert "pip install" in str(caught.value.hint)


def test_a_number_of_float32_gets_its_short_form() -> None:
    assert shortest(9.999999974752427e-07) == 1e-06
    assert shortest(1e4) == 10000.0
