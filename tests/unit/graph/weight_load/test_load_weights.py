"""Weights reach the graph whatever the checkpoint calls them, and nothing wrong is taken in
silence.
"""

import random

import pytest
import torch
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter

from onboard.errors import OnboardError
from onboard.graph.weight_load.safetensors_folder import TensorMeta
from onboard.graph.weight_load.weight_names import declared_renaming, explain_unused, match_names
from tests.support.graph.fusion import apply, context_for, exported, random_state
from tests.support.graph.harness import rmse


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 6)
        self.k = nn.Linear(8, 4)
        self.v = nn.Linear(8, 2, bias=False)

    def forward(self, x):
        return torch.cat(
            (self.q(x).view(*x.shape[:2], 3, 2).flatten(2), self.k(x), self.v(x)), dim=-1
        )


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Linear(5, 8, bias=False)
        self.model.layers = nn.ModuleList(Block() for _ in range(layers))
        self.model.out = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.unembed = nn.Linear(5, 8, bias=False)
        self.unembed.weight = self.model.embed.weight
        self.register_buffer("table", torch.arange(8, dtype=torch.float64), persistent=False)

    def forward(self, x):
        x = self.model.embed(x)
        for layer in self.model.layers:
            x = x + self.model.out(layer(x))
        return self.unembed(self.head(x * self.table.float()))


@pytest.fixture
def case():
    seed = random.randrange(10**6)
    model = Model()
    state = random_state(model, seed)
    model.load_state_dict(state, strict=False)
    x = torch.randn(2, 3, 5)
    expected = model(x).detach()
    return exported(Model(), 2, 3, 5), state, x, expected


def _load(gm, folder, state, **fields):
    return apply("load_weights", gm, context_for(folder, state), **fields)


@pytest.mark.parametrize("checkpoint_device", [None, "cpu"])
@pytest.mark.parametrize("fuse", [False, True])
def test_loaded_graph_is_the_model(case, tmp_path, fuse, checkpoint_device):
    gm, state, x, expected = case
    if fuse:
        gm, info, _ = apply("fuse_gemms_mixed_children", gm)
        assert info.num_matches == 2
    gm, info, context = _load(gm, tmp_path, state, checkpoint_device=checkpoint_device)
    assert info.num_matches == (2 * 2 + 4 if fuse else 2 * 5 + 4)
    assert not context.facts
    assert gm.table.dtype == torch.float64
    assert rmse(gm(x), expected) <= 1e-6


def test_load_in_another_dtype(case, tmp_path):
    gm, state, _, _ = case
    context = context_for(tmp_path, state)
    context.dtype = torch.bfloat16
    gm, _, _ = apply("load_weights", gm, context)
    assert {parameter.dtype for parameter in gm.parameters()} == {torch.bfloat16}
    assert gm.table.dtype == torch.float64
    assert torch.equal(gm.head.weight, state["head.weight"].bfloat16())


@pytest.mark.parametrize("name", ["unembed.weight", "model.embed.weight"])
@pytest.mark.parametrize("clean", [False, True])
def test_tied_weights_under_either_name(case, tmp_path, name, clean):
    gm, state, x, expected = case
    if clean:
        gm, _, _ = apply("fuse_gemms_mixed_children", gm)
    state[name] = state.pop("model.embed.weight")
    gm, _, _ = _load(gm, tmp_path, state)
    assert clean or gm.unembed.weight is gm.model.embed.weight
    assert rmse(gm(x), expected) <= 1e-6


def test_prefix_lacking_or_added(case, tmp_path):
    gm, state, x, expected = case
    without = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    gm, _, _ = _load(gm, tmp_path, without)
    assert rmse(gm(x), expected) <= 1e-6
    gm, _, context = _load(
        exported(Model(), 2, 3, 5),
        tmp_path,
        {f"text.{name}": tensor for name, tensor in state.items()}
        | {"vision.patch.weight": torch.ones(2)},
    )
    assert rmse(gm(x), expected) <= 1e-6
    assert context.facts == ["the model leaves out vision (1 tensors of the checkpoint)"]


def test_reduced_layers_and_legacy_buffers_are_facts(case, tmp_path):
    gm, state, x, expected = case
    extra = {
        "model.layers.2.q.weight": torch.ones(3),
        "model.layers.2.k.weight": torch.ones(3),
        "model.layers.0.attn.bias": torch.ones(1, 1, 4, 4),
        "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
        "model.layers.1.rotary_emb.inv_freq": torch.ones(4),
    }
    gm, _, context = _load(gm, tmp_path, state | extra)
    assert rmse(gm(x), expected) <= 1e-6
    assert sorted(context.facts) == [
        "the model leaves out legacy buffers (3 tensors of the checkpoint)",
        "the model leaves out model.layers.2 (2 tensors of the checkpoint)",
    ]


@pytest.mark.parametrize("name", ["model.layers.0.v.bias", "model.layers.1.q_norm.weight"])
def test_tensor_that_would_change_the_model(case, tmp_path, name):
    gm, state, _, _ = case
    with pytest.raises(OnboardError, match=f"no use for {name}"):
        _load(gm, tmp_path, state | {name: torch.ones(2)})


def test_scales_that_no_config_speaks_of(case, tmp_path):
    gm, state, _, _ = case
    with pytest.raises(OnboardError, match=r"quantised \(fp8: head.weight_scale_inv\)"):
        _load(gm, tmp_path, state | {"head.weight_scale_inv": torch.ones(2)})


def test_missing_tensor(case, tmp_path):
    gm, state, _, _ = case
    gm, _, _ = apply("fuse_gemms_mixed_children", gm)
    del state["model.layers.1.k.bias"], state["head.weight"]
    with pytest.raises(
        OnboardError, match=r"has no model\.layers\.1\.k\.bias \(and 1 more\)|has no head\.weight"
    ):
        _load(gm, tmp_path, state)


def test_wrong_shape(case, tmp_path):
    gm, state, _, _ = case
    with pytest.raises(
        OnboardError, match=r"head\.weight is \[5, 9\] in the checkpoint and \[5, 8\] in the model"
    ):
        _load(gm, tmp_path, state | {"head.weight": torch.zeros(5, 9)})


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
@pytest.mark.parametrize("fuse", [False, True])
def test_weights_that_are_not_finite(case, tmp_path, value, what, fuse):
    gm, state, _, _ = case
    if fuse:
        gm, _, _ = apply("fuse_gemms_mixed_children", gm)
    state["model.layers.1.k.weight"][2, 3] = value
    with pytest.raises(OnboardError, match=rf"model\.layers\.1\.k\.weight holds {what}"):
        _load(gm, tmp_path, state)


def test_weights_too_large_for_the_dtype(case, tmp_path):
    gm, state, _, _ = case
    state["head.weight"][0, 0] = 1e6
    context = context_for(tmp_path, state)
    context.dtype = torch.float16
    with pytest.raises(OnboardError, match=r"head\.weight .*float16.*Use bfloat16"):
        apply("load_weights", gm, context)


def test_random_weights_without_a_checkpoint(case, tmp_path):
    gm, _, x, _ = case
    gm, info, _ = apply("load_weights", gm, context_for(tmp_path, skip_loading_weights=True))
    assert info.num_matches == 14
    assert 0.01 < float(gm.head.weight.std()) < 0.04
    assert gm.unembed.weight is gm.model.embed.weight
    assert torch.isfinite(gm(x)).all()


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("correction", torch.zeros(8, dtype=torch.float64))

    def forward(self, x):
        return self.linear(x) + self.correction.float()


def test_persistent_buffers_come_from_the_checkpoint_in_their_own_dtype(tmp_path):
    state = random_state(Biased(), random.randrange(10**6))
    correction = torch.randn(8)
    gm, _, context = _load(
        exported(Biased(), 2, 3, 8), tmp_path, state | {"correction": correction}
    )
    assert not context.facts
    assert gm.correction.dtype == torch.float64
    assert torch.equal(gm.correction, correction.double())
    gm, _, context = _load(exported(Biased(), 2, 3, 8), tmp_path, state)
    assert context.facts == ["the checkpoint has no correction, a buffer"]
    assert torch.equal(gm.correction, torch.zeros(8, dtype=torch.float64))


def test_match_names_prefers_the_prefix_that_settles_most():
    available = ["a.norm.weight", "a.h.0.w", "a.h.1.w", "b.norm.weight", "head.w"]
    wanted = ["norm.weight", "h.0.w", "h.1.w", "head.w"]
    assert match_names(wanted, available) == {
        "norm.weight": "a.norm.weight",
        "h.0.w": "a.h.0.w",
        "h.1.w": "a.h.1.w",
        "head.w": "head.w",
    }


def test_names_that_transformers_declares_renamed():
    rename = declared_renaming(["NoSuchClass", "GPTNeoXForCausalLM", "gpt_neox"])
    wanted = ["gpt_neox.embed_in.weight", "lm_head.weight"]
    own = ["gpt_neox.embed_in.weight", "lm_head.weight"]
    released = ["gpt_neox.embed_in.weight", "embed_out.weight"]
    assert match_names(wanted, own, rename) == dict(zip(wanted, own, strict=True))
    # Releases that kept the checkpoint's name declare nothing
    if rename("embed_out.weight") != "embed_out.weight":
        assert match_names(wanted, released, rename) == dict(zip(wanted, released, strict=True))


def test_a_layer_bias_is_not_a_legacy_mask():
    used = ["h.0.attn.weight", "h.0.mlp.weight"]
    mask, bias = (TensorMeta(shape, torch.float32, 4) for shape in ((1, 1, 4, 4), (4,)))
    assert explain_unused({"h.0.attn.bias": mask}, used)[1] == []
    assert explain_unused({"h.0.attn.bias": bias}, used)[1] == ["h.0.attn.bias"]


def test_that_a_tensor_is_of_a_further_layer_may_show_in_its_new_name() -> None:
    def rename(name: str) -> str:
        kind, _, index = name.rpartition(".")
        return f"layers.{index}.query" if kind == "mixing.queries" else name

    used = ["mixing.queries.0", "mixing.queries.1", "layers.0.w", "layers.1.w", "mixing.out"]
    unused = dict.fromkeys(
        ["mixing.queries.2", "layers.2.w", "mixing.spare"], TensorMeta((4,), torch.float32, 16)
    )
    facts, wrong = explain_unused(unused, used, rename)
    assert facts == ["the model leaves out layers.2 (2 tensors of the checkpoint)"]
    assert wrong == ["mixing.spare"]
    assert explain_unused(unused, used)[1] == ["mixing.queries.2", "mixing.spare"]


class _WithSpare(Model):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].spare = nn.Linear(3, 3)


def test_weights_that_the_model_has_and_does_not_run_may_be_in_the_checkpoint(case, tmp_path):
    _, state, x, expected = case
    state |= {
        "model.layers.0.spare.weight": torch.randn(3, 3),
        "model.layers.0.spare.bias": torch.randn(3),
    }
    gm, _, _ = _load(exported(_WithSpare(), 2, 3, 5), tmp_path, state)
    assert rmse(gm(x), expected) < 1e-6
    with pytest.raises(OnboardError, match=r"no use for model\.layers\.0\.spare"):
        _load(exported(Model(), 2, 3, 5), tmp_path, state)


def test_a_weight_in_parts_that_transformers_joins_is_joined(case, tmp_path, monkeypatch):
    gm, state, x, expected = case
    joins = WeightConverter(
        ["head.upper", "head.lower"], "head.weight", operations=[Concatenate(dim=0)]
    )
    monkeypatch.setattr(
        conversion_mapping, "get_checkpoint_conversion_mapping", {"none": [joins]}.get
    )
    whole = state.pop("head.weight")
    gm, _, _ = _load(
        gm, tmp_path, state | {"head.upper": whole[:2].clone(), "head.lower": whole[2:].clone()}
    )
    assert rmse(gm(x), expected) <= 1e-6


def test_constants_of_the_graph_are_made_on_the_runs_device():
    class Ranged(nn.Module):
        def forward(self, x):
            return x * torch.arange(x.shape[2], device=x.device)

    gm, context = exported(Ranged(), 2, 3, 5), context_for(None)
    for device, moved in (("cpu", 0), ("meta", 1), ("meta", 0)):
        context.device = torch.device(device)
        gm, info, _ = apply("move_inputs_to_device", gm, context, shapes=False)
        assert info.num_matches == moved
    gm.recompile()
    assert gm(torch.empty(2, 3, 5, device="meta")).device.type == "meta"
