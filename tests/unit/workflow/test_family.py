"""A family is what configs say it is; its sizes are found on the Hub and registered, its wrong
entries mended.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from onboard import registry
from onboard.composition import compose
from onboard.hub import HubSource
from onboard.registry import RegistryEntry, parse_entries
from onboard.registry_text import insert_entry, set_files
from onboard.workflow.checkpoint.family import (
    Kind,
    configs_here,
    differences,
    kind_of_entry,
    on_the_hub,
    registered,
)
from onboard.workflow.phases.register import Register
from tests.support.phases import LLAMA_CONFIG, make_context

LLAMA = Kind("LlamaForCausalLM", "llama")
QUANTISED = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, True),
        ({"model_type": "llama"}, True),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, False),
        ({"model_type": "qwen3", "architectures": ["LlamaForCausalLM"]}, False),
        ({"model_type": "llama", "architectures": "LlamaForCausalLM"}, True),
        ({}, False),
    ],
)
def test_what_is_of_one_kind(config: dict[str, Any], same: bool) -> None:
    assert LLAMA.is_same(Kind.of_config(config)) is same


class _Hub:
    """What a Hub lists, in the order of downloads, and the config.json that it serves of each."""

    def __init__(
        self, folder: Path, models: dict[str, tuple[dict[str, Any], int | None, dict[str, Any]]]
    ) -> None:
        self.folder, self.models = folder, models

    def list_models(self, *, author: str, filter: str, **_: Any) -> list[Any]:
        assert (author, filter) == ("acme", "llama")
        return [
            SimpleNamespace(
                id=name, config=listed, safetensors=SimpleNamespace(total=size) if size else None
            )
            for name, (listed, size, _) in self.models.items()
        ]

    def hf_hub_download(self, name: str, file: str) -> str:
        path = self.folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.models[name][2]))
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    big = LLAMA_CONFIG | {
        "hidden_size": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40,
    }
    models = {
        "acme/Fox-1B": (LLAMA_CONFIG, 1_000_000_000, LLAMA_CONFIG),
        "acme/Fox-7B-Chat": (big, 7_000_000_000, big),
        "acme/Fox-7B": (big, 7_001_000_000, big),
        "acme/Fox-1B-Chat": (LLAMA_CONFIG, 1_000_000_000, LLAMA_CONFIG),
        "acme/Wolf-70B": (big, 70_000_000_000, big),
        "acme/Fox-MoE": (LLAMA_CONFIG | {"model_type": "mixtral"}, 8_000_000_000, LLAMA_CONFIG),
        "acme/Fox-13B-FP8": (big | QUANTISED, 13_000_000_000, big | QUANTISED),
        "acme/Fox-30B-lies": (LLAMA_CONFIG, 30_000_000_000, LLAMA_CONFIG | {"model_type": "qwen2"}),
        "acme/Fox-33B-int4": (LLAMA_CONFIG, 33_000_000_000, LLAMA_CONFIG | QUANTISED),
    }
    hub = _Hub(tmp_path / "hub", models)
    monkeypatch.setattr(huggingface_hub, "list_models", hub.list_models)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.hf_hub_download)
    return hub


def test_the_hubs_models_of_the_kind_are_found_one_a_size_whatever_their_names(hub: _Hub) -> None:
    members, note = on_the_hub(HubSource("acme/Fox-1B"), LLAMA)
    assert [member["name"] for member in members] == ["acme/Fox-7B-Chat", "acme/Wolf-70B"]
    assert note == ""
    assert differences(LLAMA_CONFIG, members[0]["config"]) == {"tie_word_embeddings": [None, False]}
    assert on_the_hub(HubSource("acme/Fox-1B", offline=True), LLAMA)[0] == []
    del hub.models["acme/Fox-1B"], hub.models["acme/Fox-1B-Chat"]
    hub.models["acme/Fox-7B-Chat"] = ({}, None, {})
    assert [member["name"] for member in on_the_hub(HubSource("acme/Fox-1B"), LLAMA)[0]] == [
        "acme/Fox-7B",
        "acme/Wolf-70B",
    ]


def test_configs_differ_in_words_and_switches_also_inside_and_not_in_sizes() -> None:
    own = {
        "a": 1,
        "act": "silu",
        "bias": True,
        "rope_parameters": {"rope_type": "default", "theta": 1e4},
        "dtype": "x",
    }
    other = {
        "a": 2,
        "act": "silu",
        "bias": 0,
        "rope_parameters": {"rope_type": "yarn", "theta": 1e6},
        "_name": "y",
    }
    assert differences(own, other) == {
        "bias": [True, None],
        "rope_parameters.rope_type": ["default", "yarn"],
    }
    assert differences(own, own) == {}


def test_configs_of_registered_models_that_are_here_are_found(tmp_path: Path) -> None:
    (tmp_path / "kin").mkdir()
    (tmp_path / "kin" / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    context = make_context(tmp_path / "root", str(tmp_path / "kin"))
    Register().run(context)
    (entry,) = registry.load_entries(context.root)
    gone = RegistryEntry(
        name="org/gone", config_id="gone", yaml_extra=["gone.yaml"], family="llama"
    )
    registry.config_path(context.root, "gone").write_text("model: org/gone\n")
    path = registry.models_path(context.root)
    path.write_text(insert_entry(path.read_text(), gone))
    found = configs_here([entry.name, "org/gone"], context.root)
    assert {name: config["hidden_size"] for name, config in found.items()} == {entry.name: 64}


def test_the_family_is_registered_and_says_that_nobody_tried_it(tmp_path: Path, hub: _Hub) -> None:
    context = make_context(tmp_path / "root", "acme/Fox-1B")
    members, _ = on_the_hub(HubSource("acme/Fox-1B"), LLAMA)
    context.write_json(
        "survey.json", {"configs": {member["name"]: member["config"] for member in members}}
    )
    summary = Register().run(context).summary
    assert "of its family, untested: acme/Fox-7B-Chat, acme/Wolf-70B" in summary
    entries = {entry.name: entry for entry in registry.load_entries(context.root)}
    statuses = {
        "acme/Fox-1B": "pending",
        "acme/Fox-7B-Chat": "untested",
        "acme/Wolf-70B": "untested",
    }
    assert {name: entry.status for name, entry in entries.items()} == statuses
    found = compose(entries["acme/Fox-7B-Chat"], context.root)
    assert (found.model, found.max_seq_len, found.world_size) == ("acme/Fox-7B-Chat", None, 1)
    assert {(entry.architecture, entry.family) for entry in entries.values()} == {
        ("LlamaForCausalLM", "llama")
    }
    assert context.read_json("registration.json")["family"] == []
    before = registry.models_path(context.root).read_bytes()
    assert "already there" in Register().run(context).summary
    assert registry.models_path(context.root).read_bytes() == before


def test_a_wrong_entry_is_mended_and_said_and_fragments_stay(tmp_path: Path) -> None:
    context = make_context(tmp_path / "root", "acme/Fox-1B")
    Register().run(context)
    path = registry.models_path(context.root)
    wrong = path.read_text().replace(
        "      - world_size_1.yaml\n", "      - world_size_2.yaml  # two\n      - mine.yaml\n"
    )
    wrong = wrong.replace("      - fox-1b.yaml\n", "").replace(
        "LlamaForCausalLM", "OtherForCausalLM"
    )
    other = RegistryEntry(
        name="b/kin", config_id="kin", yaml_extra=["kin.yaml", "world_size_8.yaml"], family="llama"
    )
    (path.parent / "configs" / "mine.yaml").write_text("max_batch_size: 3\n")
    (path.parent / "configs" / "kin.yaml").write_text("model: b/kin\n")
    path.write_text(insert_entry(wrong, other))
    summary = Register().run(context).summary
    own, kin = registry.load_entries(context.root)
    assert own.yaml_extra == [
        "dashboard_default.yaml",
        "world_size_1.yaml",
        "mine.yaml",
        "fox-1b.yaml",
    ]
    assert kin.yaml_extra == ["dashboard_default.yaml", "world_size_8.yaml", "kin.yaml"]
    assert own.architecture == "LlamaForCausalLM"
    assert "entry updated: configs dashboard_default.yaml world_size_2.yaml" in summary
    assert "architecture OtherForCausalLM -> LlamaForCausalLM" in summary
    assert "b/kin updated: configs kin.yaml world_size_8.yaml ->" in summary
    assert compose(own, context.root).max_batch_size == 3


TEXTS = [
    "models:\n- name: a\n  config_id: b\n  yaml_extra:\n  - x.yaml   # why\n  - y.yaml\n  status: passed\n# end\n",
    "models:\n  - name: a\n    yaml_extra: [x.yaml, y.yaml]  # why\n    config_id: b\n# end\n",
    "models:\n  - {name: a, yaml_extra: [x.yaml, y.yaml], config_id: b}  # why\n# end\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "files", [["x.yaml", "longer.yaml"], ["one.yaml"], ["x.yaml", "y.yaml", "z.yaml"]]
)
def test_other_files_change_nothing_else(text: str, files: list[str]) -> None:
    [before], [after] = parse_entries(text), parse_entries(new := set_files(text, "a", files))
    assert after == before.model_copy(update={"yaml_extra": files})
    assert new.endswith("# end\n")
    if len(files) == 2:
        assert "# why" in new


def test_an_entry_that_does_not_say_what_it_is_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    context = make_context(tmp_path / "root", str(folder))
    Register().run(context)
    path = registry.models_path(context.root)
    path.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if "amily:" not in line)
    )
    [entry] = registry.load_entries(context.root)
    assert entry.family is None
    assert kind_of_entry(entry, context.root) == LLAMA
    assert registered(LLAMA, context.root, "other") == ["tiny"]
    assert registered(LLAMA, context.root, str(folder)) == []
