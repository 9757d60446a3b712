"""The language model inside of a model whose towers are code of its repository, as a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from onboard.graph.weight_load.quantised_folder import decoded_state, open_checkpoint
from onboard.hub import open_source, read_config
from onboard.sources.language_part import PART_FILE, inner_config, part_of
from onboard.sources.made_folders import kept_folders
from tests.support.hub_server import HubServer, Repository
from tests.support.own_media import CODE

TEXT = json.loads((CODE / "config.json").read_text())["text_config"]
WORDS = 97
_FETCH = """
import sys
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.hub import open_source
source = open_source("acme/halo")
before, config = source.files(), source.config()
print(config["model_type"], source.weights() == before, len(open_checkpoint(before).names()))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path_factory.mktemp("cache")))
    kept_folders.cache_clear()
    yield
    kept_folders.cache_clear()


def save_whole(folder: Path, prefix: str = "inside.", **fields: Any) -> dict[str, torch.Tensor]:
    """Save a model with a tower and a language model; return the latter's tensors."""
    folder.mkdir()
    config = {**json.loads((CODE / "config.json").read_text()), **fields}
    config["text_config"] = {**TEXT, "vocab_size": WORDS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    made = Qwen2Config.from_dict({**TEXT, "vocab_size": WORDS, "_attn_implementation": "eager"})
    model = AutoModelForCausalLM.from_config(made)
    state = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    tower = {"tower.layers.0.weight": torch.randn(WORDS - 1, 3), "mlp1.0.bias": torch.randn(5)}
    save_file(
        {f"{prefix}{name}": each for name, each in state.items()} | tower,
        folder / "model.safetensors",
    )
    return state


def test_the_language_model_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    state = save_whole(tmp_path / "halo")
    source = open_source(str(tmp_path / "halo"))
    folder = source.weights()
    assert folder == source.files() != tmp_path / "halo"
    config = source.config()
    assert config["model_type"] == "qwen2"
    assert config["torch_dtype"] == "float32"
    assert not {"auto_map", "vision_config", "_attn_implementation"} & config.keys()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.names().keys() == state.keys()
    assert all(torch.equal(checkpoint.read(name), each) for name, each in state.items())
    row = checkpoint.read_run("lm_head.weight", 0, 2, 5)
    assert torch.equal(row, state["lm_head.weight"][2:5])
    decoded = decoded_state(folder)
    assert decoded is not None
    assert decoded.keys() == state.keys()
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (folder / "preprocessor_config.json").exists()
    found = part_of(folder)
    assert found is not None
    assert (found.whole, found.prefix) == ((tmp_path / "halo").resolve(), "inside.")


def test_the_folder_is_made_anew_when_the_config_changes(tmp_path: Path) -> None:
    save_whole(tmp_path / "halo")
    source = open_source(str(tmp_path / "halo"))
    before = source.files()
    path = tmp_path / "halo" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rope_theta"] = 5000.0
    path.write_text(json.dumps(config))
    assert source.files() != before
    assert source.config()["rope_theta"] == 5000.0


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_map": None},
        {"model_type": "llava"},
        {"vocab_size": WORDS},
        {"other_config": {**TEXT}},
        {"quantization_config": {"quant_method": "gptq"}},
    ],
)
def test_other_models_stay_as_they_are(tmp_path: Path, fields: dict[str, Any]) -> None:
    save_whole(tmp_path / "halo", **fields)
    assert inner_config(json.loads((tmp_path / "halo" / "config.json").read_text())) is None
    assert open_source(str(tmp_path / "halo")).files() == (tmp_path / "halo").resolve()


def test_words_in_several_trees_are_no_language_model_inside(tmp_path: Path) -> None:
    save_whole(tmp_path / "halo", prefix="")
    assert open_source(str(tmp_path / "halo")).files() == (tmp_path / "halo").resolve()
    assert not kept_folders("language-parts").exists()  # nothing is written for it


def test_a_file_in_a_strangers_folder_leads_nowhere(tmp_path: Path) -> None:
    state = save_whole(tmp_path / "halo", prefix="", auto_map=None)
    says = {"whole": str(Path.home()), "prefix": "model."}
    (tmp_path / "halo" / PART_FILE).write_text(json.dumps(says))
    assert part_of(tmp_path / "halo") is None
    assert open_checkpoint(tmp_path / "halo").names().keys() >= state.keys()
    whole = tmp_path / "whole"
    save_whole(whole)
    (whole / PART_FILE).write_text(json.dumps(says))
    found = part_of(open_source(str(whole)).files())
    assert found is not None
    assert (found.whole, found.prefix) == (whole.resolve(), "inside.")


def test_of_a_hub_s_model_the_folder_is_the_same_before_weights_are_fetched(tmp_path: Path) -> None:
    state = save_whole(tmp_path / "halo")
    with HubServer({"acme/halo": Repository(tmp_path / "halo")}) as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        own["ONBOARD_CACHE"] = str(tmp_path / "cache")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _FETCH],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **own},
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["qwen2", "True", str(len(state))]


def test_the_inner_config_of_the_fixture_is_read() -> None:
    assert inner_config(json.loads((CODE / "config.json").read_text())) is not None
    assert read_config(CODE)["model_type"] == "halo_vl"
