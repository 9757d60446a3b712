from __future__ import annotations

import ast
import json
from pathlib import Path

import nbformat
import pytest

from onboard.analysis.spec import Trait
from onboard.render import render
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.cookbook import (
    TEMPLATE,
    Cookbook,
    notebook_path,
    notebook_values,
    sampling_arguments,
)
from onboard.workflow.phases.register import Register
from tests.support.phases import ContextFactory, make_run, make_spec


def _write(context: RunContext) -> nbformat.NotebookNode:
    Register().run(context)
    Cookbook().run(context)
    notebook = nbformat.read(notebook_path(context), as_version=4)
    nbformat.validate(notebook)
    return notebook


def _code(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_valid_clean_and_deterministic(context_for: ContextFactory) -> None:
    context = context_for("org/Tiny-Llama.1")
    notebook = _write(context)
    path = context.root / "cookbooks" / "tiny_llama.1_cookbook.ipynb"
    before = path.read_bytes()
    assert all(
        cell.outputs == [] and cell.execution_count is None
        for cell in notebook.cells
        if "outputs" in cell
    )
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    path.unlink()
    Cookbook().run(context)
    assert path.read_bytes() == before


def test_every_code_cell_compiles_and_names_what_exists(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    for source in _code(_write(context)):
        ast.parse(source)
    text = notebook_path(context).read_text()
    assert "registry/configs/tiny.yaml" in text


def test_it_is_served_and_asked_unless_tokens_are_no_text(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    cells = _code(_write(context))
    [serve] = [cell for cell in cells if '"onboard", "serve", MODEL' in cell]
    [client] = [cell for cell in cells if "OpenAI(" in cell]
    assert cells.index(serve) < cells.index(client)
    assert "logprobs.tokens" in client
    (context.source.files() / "tokenizer.json").write_text("{}")
    assert "stream=True" in "\n".join(_code(_write(context)))
    spec = make_spec("org/codes", traits={"codebooks": Trait(value=4, evidence="probe")})
    registration = {"name": "org/codes", "config": "registry/configs/codes.yaml"}
    values = notebook_values(
        spec, registration, hub_id="org/codes", folder=None, generation={}, has_tokenizer=True
    )
    assert "OpenAI" not in render(TEMPLATE, None, **values)


def test_prompts_are_tokens_without_a_tokenizer_and_text_with_one(
    context_for: ContextFactory,
) -> None:
    context = context_for("org/tiny")
    assert "prompts = [[5, 3, 8, 2], [7, 1]]" in "\n".join(_code(_write(context)))
    (context.source.files() / "tokenizer.json").write_text("{}")
    assert "prompts = ['Once upon a time'" in "\n".join(_code(_write(context)))
    (context.source.files() / "prompts.txt").write_text('One day, Tom\nA "dog" and\nmore\n')
    assert "prompts = ['One day, Tom', 'A \"dog\" and']\n" in "\n".join(_code(_write(context)))


@pytest.mark.parametrize(
    "name",
    ["x\n%% code\nimport os; os.abort()", "a' + str(1/0) + '", "{{ 7 * 7 }}", '"""', "`|<b>"],
)
def test_a_hostile_name_stays_text(context_for: ContextFactory, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.replace("/", "_")
    folder.mkdir()
    plain = _write(context_for("org/tiny"))
    notebook = _write(context_for(str(folder)))
    assert len(notebook.cells) == len(plain.cells)
    for source in _code(notebook):
        tree = ast.parse(source)
        assert not [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "abort"
        ]
        assert not [
            n for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)
        ]


@pytest.mark.parametrize(
    ("generation", "arguments"),
    [
        ({}, "temperature=0.8, top_p=0.95"),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, "temperature=0.6, top_k=20"),
        (
            {"temperature": "1); import os; (", "top_k": True, "top_p": float("nan")},
            "temperature=0.8, top_p=0.95",
        ),
    ],
)
def test_sampling_arguments_are_numbers(generation: dict[str, object], arguments: str) -> None:
    assert sampling_arguments(generation) == arguments


def test_the_checkpoint_says_how_to_sample(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    (context.source.files() / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20})
    )
    text = "\n".join(cell.source for cell in _write(context).cells)
    assert "| `temperature` | 0.6 |" in text
    assert "temperature=0.6, top_k=20, max_tokens=" in text


def test_the_notebook_says_that_the_model_ran_only_when_it_did(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    never = "No run has tried the model with it yet."
    _write(context)
    assert never in notebook_path(context).read_text()
    context.write_json("run.json", make_run(status="runtime_error"))
    _write(context)
    assert never in notebook_path(context).read_text()
    context.write_json("run.json", make_run())
    _write(context)
    assert "The model ran with it on cpu in float32" in notebook_path(context).read_text()
    fragment = context.root / "registry" / "configs" / "dashboard_default.yaml"
    fragment.write_text("max_batch_size: 3\n")
    Cookbook().run(context)
    assert never in notebook_path(context).read_text(), (
        "it ran with what the entry comes to, which is something else"
    )


def test_a_zoo_notebook_recommends_nothing_and_warns_of_quantised_weights() -> None:
    spec = make_spec(
        "org/big",
        config={"quantization_config": {"quant_method": "aqlm"}},
        num_parameters=671_000_000_000,
    )
    registration = {"name": "org/big", "config": "registry/configs/big.yaml"}
    values = notebook_values(
        spec, registration, hub_id="org/big", folder=None, generation=None, has_tokenizer=True
    )
    text = render(TEMPLATE, None, **values)
    for said in (
        "released weights are quantised (aqlm)",
        "an example, not a recommendation",
        "1,342 GB",
        "No run has tried",
    ):
        assert said in text
    assert "recommends no sampling parameters" not in text
