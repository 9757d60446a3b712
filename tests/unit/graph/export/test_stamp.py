"""A graph with copied layers and experts is the graph that exporting all of them gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim
from transformers import AutoConfig

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.analysis.analyze import analyze
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.codegen.model_file import generate_model_file
from onboard.graph.export.counted_experts import few_experts
from onboard.graph.export.layer_kinds import UnlikeError, find_repeated
from onboard.graph.export.stamp import StampError
from onboard.graph.export.to_graph import export_to_graph
from onboard.modeling import load_model_file, registered_model
from tests.support.graph.harness import randomize

HIDDEN = 8


class Expert(nn.Module):
    """Weights alone, of which the mixture reads lists."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, 6, bias=False)
        self.down_proj = nn.Linear(6, HIDDEN, bias=False)


class Mixture(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.router = nn.Linear(HIDDEN, experts, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, HIDDEN)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        w1 = [expert.gate_proj.weight for expert in self.experts]
        w2 = [expert.down_proj.weight for expert in self.experts]
        out = torch.ops.onboard.torch_moe(rows, chosen, weights, w1, w2, [], False, "silu")
        return out.view(hidden.shape)


class Layer(nn.Module):
    """Reads the layer before, what all layers share, sizes, a buffer and a number of its own."""

    def __init__(self, kind: str, experts: int = 0) -> None:
        super().__init__()
        self.scale = {"wide": 0.5, "narrow": 2.0}[kind]
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("table", torch.rand(HIDDEN), persistent=False)
        self.mlp = Mixture(experts) if experts else nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        mixed = (
            self.proj(hidden)
            .view(batch, length, 2, -1)
            .transpose(1, 2)
            .reshape(batch, length, HIDDEN)
        )
        mixed.mul_(self.table)
        hidden = hidden + mixed * self.scale + shared
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.positions = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        shared = self.positions(position_ids)
        for layer in self.layers:
            hidden = layer(hidden, shared)
        return self.head(hidden)


class ReadsFirst(Model):
    """Every layer also reads what the first one made."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        first = None
        for layer in self.layers:
            hidden = layer(hidden, self.positions(position_ids) if first is None else first)
            first = hidden if first is None else first
        return self.head(hidden)


class Alternating(Model):
    """What a layer does depends on its place, not on the layer."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden, turn = self.embed(input_ids), False
        for layer in self.layers:
            hidden = layer(hidden, self.positions(position_ids) if turn else hidden)
            turn = not turn
        return self.head(hidden)


class Numbered(Model):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, self.positions(position_ids) * index)
        return self.head(hidden)


def export(model: nn.Module, *, stamped: bool) -> fx.GraphModule:
    ids = torch.arange(33).view(3, 11) % 11
    shapes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in ("input_ids", "position_ids")}
    repeated = find_repeated(model, 2) if stamped else None
    assert repeated or not stamped
    inputs = {"input_ids": ids, "position_ids": ids}
    return export_to_graph(model.eval(), inputs, shapes, torch.device("cpu"), repeated=repeated)


def described(gm: fx.GraphModule) -> list[Any]:
    """Return each operation with its arguments: weights by name, results by their place among the
    operations.
    """
    calls = [node for node in gm.graph.nodes if node.op in {"call_function", "output"}]
    tensors = [node for node in calls if not isinstance(node.meta.get("val"), torch.SymInt)]
    places: dict[fx.Node, Any] = {node: index for index, node in enumerate(tensors)}
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            places[node] = str(node.meta["val"])
        elif node.op in {"get_attr", "placeholder"}:
            places[node] = node.target

    def paths(node: fx.Node) -> list[str]:
        return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]

    return [
        (node.target, fx.map_arg((node.args, node.kwargs), places.__getitem__), paths(node))
        for node in tensors
    ]


def wide_then_mixture() -> list[nn.Module]:
    return [Layer("wide"), *(Layer("wide", experts=5) for _ in range(5))]


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(lambda: [Layer("wide") for _ in range(6)], id="one kind"),
        pytest.param(lambda: [Layer(kind) for kind in ("wide", "narrow") * 4], id="alternating"),
        pytest.param(
            lambda: [Layer(kind) for kind in ("wide",) * 4 + ("narrow",) + ("wide",) * 3],
            id="one alone",
        ),
        pytest.param(wide_then_mixture, id="experts"),
    ],
)
def test_a_stamped_graph_is_the_exported_one(layers: Callable[[], list[nn.Module]]) -> None:
    model = Model(layers())
    full, stamped = export(model, stamped=False), export(model, stamped=True)

    assert described(stamped) == described(full)
    stamped.graph.lint()
    assert set(stamped.state_dict()) == set(model.state_dict())
    randomize(model, random.randrange(2**31))
    for batch, length in ((1, 1), (3, 11), (2, 7)):
        ids, positions = torch.randint(11, (batch, length)), torch.randint(64, (batch, length))
        state = model.state_dict()
        stamped.load_state_dict(state, assign=True)
        torch.testing.assert_close(stamped(ids, positions), model(ids, positions), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReadsFirst, "more than the next layer reads the result of layer 0"),
        (Alternating, "are of one kind and run differently"),
    ],
)
def test_layers_that_are_no_chain_are_refused(model: type[Model], message: str) -> None:
    with pytest.raises(StampError, match=message):
        export(model([Layer("wide") for _ in range(6)]), stamped=True)


def test_layers_that_differ_in_a_number_are_of_different_kinds() -> None:
    layers = [Layer("wide") for _ in range(5)]
    layers[3].scale = 0.25
    assert find_repeated(Model([*layers]), 2).stack.kinds == (0, 0, 0, 1, 0)  # type: ignore[union-attr]


def test_code_that_counts_its_layers_is_exported_in_full() -> None:
    assert find_repeated(Numbered([Layer("wide") for _ in range(6)]), 2) is None


class Branched(Layer):
    """Members of a list that all read the same: no chain, in a model of few layers too."""

    def __init__(self) -> None:
        super().__init__("wide")
        self.branches = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(5))
        self.mix = nn.Linear(HIDDEN, 5)

    def forward(self, hidden: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        made = [branch(hidden) for branch in self.branches]
        weights = self.mix(hidden).unsqueeze(-2)
        return super().forward(hidden, shared) + (torch.stack(made, dim=-1) * weights).sum(-1)


class Looped(Branched):
    def forward(self, hidden: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        made = []
        for branch in self.branches:
            made.append(branch(hidden))  # noqa: PERF401  (as a loop, this once)
        weights = self.mix(hidden).unsqueeze(-2)
        return Layer.forward(self, hidden, shared) + (torch.stack(made, dim=-1) * weights).sum(-1)


@pytest.mark.parametrize("layer", [Branched, Looped])
def test_branches_of_a_layer_are_no_layers(layer: type[Branched]) -> None:
    torch.manual_seed(1)
    assert find_repeated(Model([layer() for _ in range(2)]), 2) is None
    model = Model([layer() for _ in range(5)])
    assert described(export(model, stamped=True)) == described(export(model, stamped=False))


def test_what_a_comprehension_runs_is_no_chain() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = Branched()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.only(hidden, hidden)

    assert find_repeated(Wrapped(), 2) is None


def test_layers_that_share_a_weight_are_exported_in_full() -> None:
    layers = [Layer("wide") for _ in range(6)]
    layers[4].proj = layers[1].proj
    assert find_repeated(Model([*layers]), 2) is None


def test_an_expert_read_by_itself_is_refused() -> None:
    class Favourite(Mixture):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for expert in self.experts:
                hidden = hidden + expert.down_proj(expert.gate_proj(hidden))
            return hidden

    layers = [Layer("wide") for _ in range(2)]
    layers[0].mlp = Favourite(4)
    with pytest.raises(StampError, match="reads one expert's weight"):
        export(Model([*layers]), stamped=True)


def test_experts_that_are_counted_or_picked_are_exported_in_full() -> None:
    class Counting(Mixture):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * len(self.experts) + self.experts[0].gate_proj.weight.sum()

    layers = [Layer("wide") for _ in range(2)]
    layers[0].mlp = Counting(4)
    assert find_repeated(Model([*layers]), 2) is None


def test_a_few_experts_tell_how_many_there_are() -> None:
    with few_experts(2):
        model = Model([Layer("wide", experts=7) for _ in range(5)])
    assert [len(layer.mlp.experts) for layer in model.layers] == [2] * 5  # type: ignore[arg-type, union-attr]
    assert find_repeated(model, 2) == find_repeated(
        Model([Layer("wide", experts=7) for _ in range(5)]), 2
    )
    assert len(Mixture(7).experts) == 7


class Sized(Expert):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


@pytest.mark.parametrize("sizes", [(3, 3, 3, 4), (3, 4, 4, 4), (3, 3, 4, 3)])
def test_experts_that_are_made_in_different_ways_are_built_in_full(sizes: tuple[int, ...]) -> None:
    layer = Layer("wide", experts=2)
    with few_experts(2), suppress(UnlikeError):
        layer.mlp.experts = nn.ModuleList(Sized(size) for size in sizes)
        assert find_repeated(Model([layer]), 2) is None, (
            "it was built with a few experts, and would be taken for whole"
        )
    assert [expert.size for expert in nn.ModuleList(Sized(size) for size in sizes)] == list(sizes)


def test_layers_are_built_in_full_whatever_they_are_made_of() -> None:
    with few_experts(2):
        assert len(nn.ModuleList(Layer("wide") for _ in range(5))) == 5
        assert len(nn.ModuleList([Expert() for _ in range(5)])) == 5


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_generated_models_are_stamped(family: str, tmp_path: Path) -> None:
    spec = analyze({"model_type": family, "vocab_size": 131}, [], model=family)
    path = tmp_path / f"modeling_{family}.py"
    path.write_text(generate_model_file(spec))
    load_model_file(path)
    config = tiny_config(AutoConfig.for_model(family))
    config.num_hidden_layers, config.layer_types = 6, ["full_attention"] * 6
    model = registered_model(type(config).__name__)(config)

    assert described(export(model, stamped=True)) == described(export(model, stamped=False))
