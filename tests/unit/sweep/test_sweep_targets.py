"""What words on the command line stand for, and the tiny checkpoints that are made of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.errors import UsageError
from onboard.workflow.sweep.inputs import tiny_checkpoint as checkpoint
from onboard.workflow.sweep.inputs.options_on import Option, options
from onboard.workflow.sweep.inputs.targets import (
    VARIANTS,
    Target,
    causal_types,
    check_types,
    resolve,
)
from onboard.workflow.sweep.inputs.tiny_checkpoint import (
    flow,
    is_causal,
    make_checkpoint,
    missing_classes,
    why_not_causal,
)
from onboard.workflow.sweep.target_record import LEAST_FLOW
from tests.support.checkpoints import TINY


def test_all_types_of_transformers() -> None:
    types = causal_types()
    assert types == sorted(set(types))
    assert len(types) > 150
    assert {"llama", "gpt2", "mamba", "deepseek_v3", "bart"} <= set(types)


def test_a_file_names_types_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))
    names = tmp_path / "names.txt"
    names.write_text(f"# families\ngpt2\n\n{folder}  # ours\ngpt2\n")
    targets = resolve(["llama", str(names), "llama"], tmp_path)
    assert [target.name for target in targets] == ["llama", "gpt2", str(folder)]
    assert [target.config is None for target in targets] == [True, True, False]
    assert len({target.folder for target in targets}) == 3


@pytest.mark.parametrize("word", ["lama", "no-such-model"])
def test_an_unknown_word_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"'{word}' is neither a model type nor a model"):
        resolve([word], tmp_path)


def test_an_unknown_type_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="Did you mean 'llama'"):
        check_types(["gpt2", "lama"])


def test_folders_are_safe_and_apart(tmp_path: Path) -> None:
    names = ["../../etc", "a/b", "a-b", "a.b", "..", "é", "e"]
    folders = [Target(name=name).folder for name in names] + [
        Target(name="e", variant="varied").folder
    ]
    assert len(set(folders)) == len(folders)
    for folder in folders:
        assert (tmp_path / folder).resolve().parent == tmp_path.resolve()
        assert folder not in (".", "..")


def test_a_checkpoint_is_random_everywhere_and_loads_again(tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    made = make_checkpoint(Target(name="qwen2"), tmp_path / "one", seed)
    make_checkpoint(Target(name="qwen2"), tmp_path / "two", seed + 1)
    assert (made.architecture, made.is_causal) == ("Qwen2ForCausalLM", True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.unique().numel() > 1, name
        assert not torch.equal(tensor, second[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_a_class_that_serves_encoders_too_is_saved_as_a_decoder(name: str, tmp_path: Path) -> None:
    assert make_checkpoint(Target(name=name), tmp_path / name).is_causal
    saved = json.loads((tmp_path / name / "config.json").read_text())
    assert (saved["is_decoder"], saved.get("is_encoder_decoder", False)) == (True, False)


def test_a_model_that_looks_ahead_or_rolls_dice_is_not_causal() -> None:
    config = AutoConfig.for_model("bert", **TINY, is_decoder=False)
    bidirectional = AutoModelForCausalLM.from_config(config).eval()
    assert why_not_causal(_larger_vocabulary(bidirectional)).startswith(
        "a token changes the logits of tokens before"
    )
    dropout = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **TINY, attention_dropout=0.5)
    )
    assert is_causal(_larger_vocabulary(dropout.eval()))
    assert (
        why_not_causal(_larger_vocabulary(dropout.train()))
        == "its logits differ from one run to the next"
    )


def _larger_vocabulary(model: nn.Module) -> nn.Module:
    model.resize_token_embeddings(140)
    return model


def test_a_class_that_shrinking_lost_is_found() -> None:
    config = AutoConfig.for_model("qwen2_moe")
    sparse, dense = (
        {**TINY, "mlp_only_layers": layers, "num_experts": 4} for layers in ([], [0, 1])
    )
    for fields, missing in ((sparse, False), (dense, True)):
        tiny = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **fields))
        assert ("Qwen2MoeSparseMoeBlock" in missing_classes(config, tiny)) is missing


def test_options_are_what_the_defaults_leave_off() -> None:
    changes = {
        key: value
        for option in options(AutoConfig.for_model("llama"))
        for key, value in option.changes.items()
    }
    assert changes["attention_bias"] is True
    assert changes["mlp_bias"] is True
    assert changes["tie_word_embeddings"] is True
    assert changes["num_key_value_heads"] == 16
    assert changes["rope_parameters"]["rope_type"] == "linear"
    windowed = {option.name: option.changes for option in options(AutoConfig.for_model("qwen2"))}[
        "sliding window"
    ]
    assert windowed["use_sliding_window"] is True


def test_options_share_caches_and_mix_experts_and_cap() -> None:
    names = {option.name for option in options(AutoConfig.for_model("gemma4_text"))}
    assert {
        "num_kv_shared_layers=15",
        "a mixture in every layer",
        "final_logit_softcapping=2.5",
    } <= names
    assert "first_k_dense_replace=1" in {
        option.name for option in options(AutoConfig.for_model("dots1"))
    }


def test_the_second_variant_is_another_model_and_runs(tmp_path: Path) -> None:
    made = make_checkpoint(Target(name="llama", variant="varied"), tmp_path / "llama")
    assert made.is_causal
    assert made.missing == []
    assert {"attention_bias=True", "mlp_bias=True", "grouped heads", "rope scaling"} <= {
        *made.options
    }
    assert not set(made.options) & made.refused.keys()
    tensors = load_file(tmp_path / "llama" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.bias" in tensors
    assert "lm_head.weight" not in tensors  # tied
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "linear"
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert heads in ((6, 2), (6, 3))
    assert config["head_dim"] * heads[0] != config["hidden_size"]
    assert config["intermediate_size"] % 2 == 1
    assert config["max_position_embeddings"] > 300 + 48
    usual = tiny_config(AutoConfig.for_model("llama")).to_dict()
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "rms_norm_eps",
        "num_hidden_layers",
    ):
        assert config[name] != usual[name], name


def test_a_variant_is_the_same_every_time_and_other_for_each_type(tmp_path: Path) -> None:
    texts = []
    for folder, name in (("one", "qwen2"), ("two", "qwen2"), ("three", "mistral")):
        make_checkpoint(Target(name=name, variant="varied"), tmp_path / folder)
        texts.append((tmp_path / folder / "config.json").read_text())
    assert texts[0] == texts[1]
    sizes = [
        [json.loads(text)[name] for name in ("vocab_size", "intermediate_size")] for text in texts
    ]
    assert sizes[0] != sizes[2]


def test_layers_of_several_kinds_come_in_another_order(tmp_path: Path) -> None:
    orders = []
    for variant in VARIANTS:
        make_checkpoint(Target(name="gemma3_text", variant=variant), tmp_path / variant)
        orders.append(json.loads((tmp_path / variant / "config.json").read_text())["layer_types"])
    assert set(orders[0]) == set(orders[1]) == {"sliding_attention", "full_attention"}
    assert len(orders[1]) > len(orders[0])
    assert orders[1][: len(orders[0])] != orders[0]


def test_a_composite_varies_in_its_text_model(tmp_path: Path) -> None:
    made = make_checkpoint(Target(name="gemma3", variant="varied"), tmp_path / "gemma3")
    assert made.is_causal
    text = json.loads((tmp_path / "gemma3" / "config.json").read_text())["text_config"]
    assert text["num_attention_heads"] == 6
    assert text["intermediate_size"] % 2 == 1


def test_what_transformers_refuses_is_told(tmp_path: Path) -> None:
    made = make_checkpoint(Target(name="mamba2", variant="varied"), tmp_path / "mamba2")
    assert any(
        name.startswith("head_dim=") and "validate_architecture" in why
        for name, why in made.refused.items()
    )
    assert any(name.startswith("state_size=") for name in made.options)


def test_a_checkpoint_of_a_given_config_keeps_what_the_config_says(tmp_path: Path) -> None:
    config = {"model_type": "llama", **TINY, "attention_bias": True, "rms_norm_eps": 3e-3}
    make_checkpoint(Target(name="mine", config=config), tmp_path / "mine")
    saved = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert (saved["attention_bias"], saved["rms_norm_eps"]) == (True, 3e-3)


def test_a_model_that_does_not_listen_is_told() -> None:
    model: Any = build_tiny(AutoConfig.for_model("llama"))
    assert flow(model) > LEAST_FLOW
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    assert flow(model) == 0


def test_an_option_without_effect_is_not_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, bias = Option("nothing", {"pretraining_tp": 2}), Option("bias", {"mlp_bias": True})
    monkeypatch.setattr(checkpoint, "options", lambda config: [nothing, bias, nothing])
    made = checkpoint.Checkpoint("", is_causal=False)
    config = checkpoint._switched_on(AutoConfig.for_model("llama"), made)
    assert config.mlp_bias
    assert made.options == ["bias"]
    assert made.refused == {"nothing": "it changes nothing in the tiny model"}
