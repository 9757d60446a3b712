from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import fx, nn

from onboard.errors import OnboardError, UsageError
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.fx import graph_modules, nodes_of, placeholders
from tests.support.graph.harness import export, make_context, random_inputs, randomize, rmse


@pytest.mark.parametrize("mode", ["graph", "hf"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_graph_computes_what_the_model_computes(tmp_path: Path, mode, tied: bool) -> None:
    context = make_context(tmp_path, mode=mode, tie_word_embeddings=tied, attention_bias=True)
    gm = export(context)
    model = context.factory.build_model("cpu")
    randomize(model, random.randrange(2**31))
    gm.load_state_dict(model.state_dict(), strict=True, assign=True)

    for batch, sequence in ((3, 11), (1, 1), (1, 7), (2, 1), (5, 16)):
        inputs = random_inputs(batch, sequence)
        with torch.no_grad():
            assert rmse(gm(*inputs), model(*inputs).logits) < 1e-6


def test_parameters_are_the_models_and_take_no_memory(tmp_path: Path) -> None:
    context = make_context(tmp_path, tie_word_embeddings=True)
    gm = export(context)
    model = context.factory.build_model()

    assert set(gm.state_dict()) == set(model.state_dict())
    assert all(parameter.is_meta for parameter in gm.parameters())
    assert gm.get_parameter("lm_head.weight") is gm.get_parameter("model.embed_tokens.weight")
    assert gm.meta["tied_parameters"] == {"lm_head.weight": "model.embed_tokens.weight"}
    torch.testing.assert_close(
        gm.get_buffer("model.rotary_emb.cos_cached"), model.model.rotary_emb.cos_cached
    )


def test_inputs_and_output_are_plain(tmp_path: Path) -> None:
    gm = export(make_context(tmp_path))

    assert [node.target for node in placeholders(gm)] == ["input_ids", "position_ids"]
    batch, sequence = placeholders(gm)[0].meta["val"].shape
    assert isinstance(batch, torch.SymInt)
    assert isinstance(sequence, torch.SymInt)
    output = gm.graph.output_node().args[0]
    assert isinstance(output, fx.Node)
    assert output.meta["val"].shape[-1] == 97


def test_canonical_ops_and_linears_stay_whole_and_know_their_module(tmp_path: Path) -> None:
    gm = export(make_context(tmp_path))

    assert len(nodes_of(gm, torch.ops.onboard.torch_attention)) == 2
    assert len(nodes_of(gm, torch.ops.onboard.torch_rmsnorm)) == 5
    linears = nodes_of(gm, torch.ops.aten.linear)
    assert len(linears) == 2 * 7 + 1
    stack = linears[0].meta["nn_module_stack"]
    assert any(path.endswith("layers.0.self_attn.q_proj") for path, _ in stack.values())


def test_no_run_time_checks_are_left(tmp_path: Path) -> None:
    gm = export(make_context(tmp_path, mode="hf"))

    assert not [node for node in gm.graph.nodes if "assert" in node.name or "guard" in node.name]
    assert not gm._forward_pre_hooks
    assert list(graph_modules(gm)) == [("", gm)]


def test_parameters_have_the_runs_dtype_and_buffers_their_own(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.factory.dtype = torch.bfloat16
    gm = export(context)

    assert {parameter.dtype for parameter in gm.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in gm.buffers()} == {torch.float32}


def test_a_reduced_config_cuts_its_per_layer_lists(tmp_path: Path) -> None:
    make_context(tmp_path, "qwen3", num_hidden_layers=4)
    factory = ModelFactory(
        tmp_path / "checkpoint",
        root=None,
        dtype=torch.float32,
        model_kwargs={"num_hidden_layers": 2},
        mode="hf",
    )

    assert factory.config.num_hidden_layers == 2
    assert len(factory.config.layer_types) == 2
    assert len(factory.build_model().model.layers) == 2


def test_an_unknown_config_key_names_the_nearest(tmp_path: Path) -> None:
    make_context(tmp_path)
    factory = ModelFactory(
        tmp_path / "checkpoint",
        root=tmp_path,
        dtype=torch.float32,
        model_kwargs={"num_hiden_layers": 1},
    )

    with pytest.raises(UsageError, match="num_hidden_layers"):
        _ = factory.config


def test_a_missing_model_file_says_what_to_do(tmp_path: Path) -> None:
    context = make_context(tmp_path, "helium")  # a family that does not come with the project

    with pytest.raises(OnboardError, match="Onboard the model first"):
        context.factory.build_model()


class _WithConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_constants_made_in_forward_are_no_part_of_the_state() -> None:
    model = _WithConstant()
    inputs = {"x": torch.randn(2, 4)}
    gm = export_to_graph(model, inputs, {"x": {0: torch.export.Dim.DYNAMIC}}, torch.device("cpu"))

    assert set(gm.state_dict()) == set(model.state_dict())
    torch.testing.assert_close(gm(inputs["x"]), model(inputs["x"]))


def test_what_a_model_file_does_not_cover_is_an_error_in_one_line(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    path = tmp_path / "models" / "modeling_llama.py"
    text = path.read_text()
    opening = "class LlamaForCausalLM(nn.Module):\n"
    assert opening in text
    guard = "    def __new__(cls, config):\n        assert config.vocab_size < 0, 'not covered: words'\n\n"
    path.write_text(text.replace(opening, opening + guard))
    with pytest.raises(
        OnboardError,
        match=r"modeling_llama.py does not serve this model: not covered: words\. Onboard",
    ):
        context.factory.build_model()


def test_a_field_that_the_config_does_not_have_is_an_error_in_one_line(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    path = tmp_path / "models" / "modeling_llama.py"
    text = path.read_text()
    assert "config.rms_norm_eps" in text
    path.write_text(text.replace("config.rms_norm_eps", "config.rms_norm_bound"))
    with pytest.raises(
        OnboardError,
        match=rf"modeling_llama.py reads rms_norm_bound, .* in transformers {transformers.__version__}",
    ):
        context.factory.build_model()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float17"}, "transformers cannot read .*config.json .*float17"),
        ({"rope_scaling": {"rope_type": "linear"}}, "transformers cannot read .*'factor'"),
        ({"rope_scaling": {"rope_type": "words"}}, "modeling_llama.py makes no model of .*'words'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "modeling_llama.py makes no model of .*config.json .*Check the config's values",
        ),
    ],
)
def test_wrong_values_of_a_config_are_said_in_one_line(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    context = make_context(tmp_path)
    path = tmp_path / "checkpoint" / "config.json"
    said = json.loads(path.read_text("utf-8"))
    said.pop("rope_parameters")
    path.write_text(json.dumps({**said, **values}), "utf-8")
    with pytest.raises(OnboardError, match=message) as caught:
        context.factory.build_model()
    assert "\n" not in str(caught.value)
