"""Exported plugins keep to what vLLM's source says: `vllm_interface.json` has names and arguments
of two releases.
"""

from __future__ import annotations

import ast
import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.standalone.cases import Case

FACTS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("vllm_interface.json").read_text()
)


@pytest.fixture(scope="module")
def plugin(cases: dict[tuple[str, str], Case]) -> dict[str, ast.Module]:
    done = cases["gpt_oss", "vllm-plugin"].exported
    return {
        path: ast.parse(done.folder.joinpath(path).read_text())
        for path in done.files
        if path.endswith(".py")
    }


@pytest.fixture(params=FACTS)
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FACTS[request.param]


def _nodes(plugin: dict[str, ast.Module], kind: type[Any]) -> list[Any]:
    return [node for tree in plugin.values() for node in ast.walk(tree) if isinstance(node, kind)]


def test_what_is_imported_is_there(plugin: dict[str, ast.Module], facts: dict[str, Any]) -> None:
    imports = [
        node
        for node in _nodes(plugin, ast.ImportFrom)
        if not node.level and node.module.startswith("vllm")
    ]
    assert imports
    for node in imports:
        assert {alias.name for alias in node.names} <= set(facts["imports"][node.module])


def test_the_attention_layer_knows_its_arguments(
    plugin: dict[str, ast.Module], facts: dict[str, Any]
) -> None:
    [call] = [node for node in _nodes(plugin, ast.Call) if ast.unparse(node.func) == "Attention"]
    [made] = [node for node in _nodes(plugin, ast.FunctionDef) if node.name == "_layer_arguments"]
    keys = [key.value for node in ast.walk(made) if isinstance(node, ast.Dict) for key in node.keys]
    given = {keyword.arg for keyword in call.keywords if keyword.arg} | set(keys)
    assert len(given) == 10
    assert given - set(facts["Attention.__init__"]) == {"sinks"}  # goes through **extra_impl_args
    assert "**" in facts["Attention.__init__"]
    assert all(facts["back ends with sinks"].values())
    [used] = [node for node in _nodes(plugin, ast.Call) if ast.unparse(node.func) == "self.layer"]
    assert isinstance(used.args[0], ast.Starred)
    assert facts["Attention.forward"][:3] == ["query", "key", "value"]


def test_the_configuration_has_what_is_read(
    plugin: dict[str, ast.Module], facts: dict[str, Any]
) -> None:
    read = {ast.unparse(node) for node in _nodes(plugin, ast.Attribute)}
    read = {text for text in read if text.startswith(("vllm_config.", "parallel."))}
    assert len(read) == 8
    for text in read:
        owner, _, field = text.replace("parallel.", "vllm_config.parallel_config.").rpartition(".")
        table = {"vllm_config": "VllmConfig", "vllm_config.model_config": "ModelConfig"}
        assert field in facts[table.get(owner, "ParallelConfig")]


def test_the_model_has_vllm_s_interface(
    plugin: dict[str, ast.Module], facts: dict[str, Any]
) -> None:
    [model] = [node for node in _nodes(plugin, ast.ClassDef) if node.name == "OnboardedForCausalLM"]
    methods = {node.name: node.args for node in model.body if isinstance(node, ast.FunctionDef)}
    assert [each.arg for each in methods["__init__"].kwonlyargs] == facts["model.__init__"]
    for name in ("embed_input_ids", "compute_logits"):
        assert [each.arg for each in methods[name].args[1:]] == facts[f"model.{name}"]
    forward = [each.arg for each in methods["forward"].args[1:]]
    assert (
        forward[: len(forward) - len(methods["forward"].defaults)] == facts["model.forward needs"]
    )
    assert forward == [name for name in facts["model.forward is given"] if name != "**"]
    assert [each.arg for each in methods["load_weights"].args[1:]] == ["weights"]


def test_the_plugin_is_found(cases: dict[tuple[str, str], Case], facts: dict[str, Any]) -> None:
    done = cases["gpt_oss", "vllm-plugin"].exported
    project = tomllib.loads(done.folder.joinpath("pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {facts["group"]: {done.package: f"{done.package}:register"}}
    assert "vllm" not in project["dependencies"]
    from tests.support.standalone.stand_in.vllm import ModelRegistry

    assert (
        list(inspect.signature(ModelRegistry.register_model).parameters)
        == facts["ModelRegistry.register_model"]
    )
