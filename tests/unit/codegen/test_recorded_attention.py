"""Attention in recordings of real modules: as graphs, as the canonical op, and as recordings again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.cores.line_graphs import LineGraph, namespace_of
from onboard.codegen.cores.recordings import improved
from onboard.codegen.straight.recorded import recorded
from onboard.codegen.straight.straight_lines import Straight
from onboard.hf.copied_model import copied

_SIZES = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40},
    "gpt_bigcode": {"n_head": 6, "n_positions": 128},
    "gpt2": {"n_head": 6, "n_positions": 128},
    "ctrl": {"n_head": 6, "dff": 40, "n_positions": 128},
    "falcon": {"num_attention_heads": 6, "alibi": True},
}
_NAMES = {
    "hidden_size": 48,
    "n_embd": 48,
    "n_layer": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
}


def _model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    known = AutoConfig.for_model(family).to_dict()
    sizes = {key: value for key, value in _NAMES.items() if key in known}
    config = AutoConfig.for_model(family, **{**sizes, **_SIZES[family]})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return made.eval().requires_grad_(False)


def _attention(model: torch.nn.Module) -> tuple[type, Straight]:
    names = ("SelfAttention", "MultiHeadAttention", "Attention")
    cls = next(type(each) for each in model.modules() if type(each).__name__.endswith(names))
    run = recorded(copied(model), {cls}, [], positions=False)
    assert not run.failed
    return cls, run.found[cls][0][1]


@pytest.mark.parametrize("family", ["llama", "gpt_bigcode", "gpt2", "ctrl"])
def test_a_recording_of_a_module_has_the_op(family: str) -> None:
    model = _model(family)
    cls, straight = _attention(model)
    better, found = improved(straight, cls, model)
    assert [each.reason for each in found] == [""]
    targets = [line.target for line in better.lines]
    assert targets.count("torch.ops.onboard.torch_attention") == 1
    assert not [each for each in targets if "softmax" in str(each) or "matmul" in str(each)]
    _check_same(model, cls, straight, better)


def test_what_is_rounded_between_stays() -> None:
    """ALiBi in bfloat16 is no multiple of the distance."""
    model = _model("falcon")
    cls, straight = _attention(model)
    better, found = improved(straight, cls, model)
    assert better is straight
    assert "distance" in found[0].reason


def _check_same(model: torch.nn.Module, cls: type, straight: Straight, better: Straight) -> None:
    """Run both recordings on what a module is given in a run of the model."""
    module = next(each for each in model.modules() if type(each) is cls)
    kept: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: kept.append(
            {**dict(zip(_parameters(cls), args, strict=False)), **kwargs}
        ),
        with_kwargs=True,
    )
    model(input_ids=torch.randint(VOCABULARY, (3, 17)), use_cache=False)
    hook.remove()
    results = []
    for each in (straight, better):
        graph = LineGraph(each, module, namespace_of(module))
        results.append(graph.module(*(kept[0].get(name) for name in graph.inputs))[0])
    torch.testing.assert_close(*results)


def _parameters(cls: type) -> list[str]:
    return list(cls.forward.__code__.co_varnames[1:])  # type: ignore[attr-defined]
