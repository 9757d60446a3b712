from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama import modeling_llama as llama

from onboard.analysis.analyze import analyze
from onboard.analysis.recognise.recorder import NAME, _copied, mapped, record
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import prompt
from onboard.analysis.tiny.tiny_sizes import REACHED, WINDOW
from onboard.errors import OnboardError
from onboard.ops.rope.rope import complex_freqs
from onboard.testing import Call
from tests.support.families import config_dict


class _OwnOutput(BaseModelOutput):
    def __init__(self, beside: torch.Tensor | None = None, **fields: torch.Tensor) -> None:
        super().__init__(**fields)
        self.beside = beside


class _State:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def test_an_object_is_a_tuple_of_what_it_keeps_unless_it_keeps_itself() -> None:
    first, second = torch.randn(2), torch.randn(3)
    given = _State(first=first, inner=_State(second=second, name="x"), count=3)
    [one, two, count] = _copied((given, 1))[0]
    assert count == 3
    for mine, other in ((one, first), (two, second)):
        assert torch.equal(mine, other)
    given.inner.owners = [given]
    assert _copied((given, 1))[0] is given


def test_an_output_class_with_a_constructor_of_its_own_is_copied() -> None:
    given = _OwnOutput(torch.ones(1), last_hidden_state=torch.ones(2))
    made = _copied(given)
    given.last_hidden_state.zero_()
    assert type(made) is _OwnOutput
    assert torch.equal(made[0], torch.ones(2))
    assert torch.equal(made.last_hidden_state, torch.ones(2))
    assert torch.equal(made.beside, torch.ones(1))


@pytest.mark.parametrize("order", ["side by side", "halves"])
def test_tables_that_hold_each_frequency_twice(order: str) -> None:
    angles = torch.randn(2, 7, 4)
    twice = (
        angles.repeat_interleave(2, -1)
        if order == "side by side"
        else torch.cat((angles, angles), -1)
    )
    torch.testing.assert_close(
        complex_freqs(twice.cos(), twice.sin()), torch.polar(torch.ones_like(angles), angles)
    )


def test_a_block_that_takes_a_complex_freqs_is_replayed_with_one() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor, position_embeddings: torch.Tensor) -> torch.Tensor:
            return position_embeddings * x[0, 0, 0]

    angles = torch.randn(2, 7, 4).repeat_interleave(2, -1)
    tables = (angles.cos(), angles.sin())
    call = Call(
        {"x": torch.full((2, 7, 8), 3.0), "position_embeddings": tables},
        [3 * table for table in tables],
    )
    ((actual, expected),) = call.replay(Turned())
    assert actual.is_complex()
    assert actual.shape == (2, 7, 4)
    torch.testing.assert_close(actual, expected)


def test_what_attention_gets_is_seen() -> None:
    recording = record(build_tiny(load_config(config_dict("gemma2"))), prompt(0))
    assert [call.window for call in recording.attention] == [WINDOW, None]
    assert all(call.mask_is_causal for call in recording.attention)
    assert {call.keywords["softcap"] for call in recording.attention} == {REACHED}
    assert recording.attention[0].path == "model.layers.0.self_attn"
    assert (recording.attention[0].heads, recording.attention[0].kv_heads) == (4, 2)


def test_a_window_that_the_mask_does_not_have_is_seen() -> None:
    model = build_tiny(load_config(config_dict("qwen2")))
    before, after = record(model, prompt(0)), []
    for window in (WINDOW, 21):  # the second one is as long as the text
        model.model.layers[1].self_attn.sliding_window = window
        after.append([call.mask_is_causal for call in record(model, prompt(0)).attention])
    assert all(call.mask_is_causal and call.window is None for call in before.attention)
    assert after == [[True, False], [True, True]]


def test_functions_that_constructors_chose_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny(load_config(config_dict("llama")))
    for layer in model.model.layers:
        layer.mlp.turned = llama.rotate_half
    monkeypatch.setattr(
        llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.turned(self.up_proj(x)))
    )
    calls = [call for call in record(model, prompt(0)).helpers if call.name == "rotate_half"]
    sizes = {call.arguments["x"].shape[-1] for call in calls}
    assert model.config.intermediate_size in sizes
    assert all(layer.mlp.turned is llama.rotate_half for layer in model.model.layers)


def test_the_recorder_leaves_no_trace() -> None:
    model = build_tiny(load_config(config_dict("llama")))
    before = model(**prompt(0), use_cache=False).logits
    record(model, prompt(0))
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(**prompt(0), use_cache=False).logits, before)


def test_a_mask_that_is_not_causal_is_refused() -> None:
    with pytest.raises(OnboardError, match="the mask of .*self_attn is not causal"):
        analyze({**config_dict("gemma3_text"), "use_bidirectional_attention": True}, model="x")


def test_parameters_are_counted_once_when_tied() -> None:
    sizes = {"model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    assert (
        analyze({**sizes, "tie_word_embeddings": True}, model="x").num_parameters
        == 3200 + layer + 32
    )
    assert (
        analyze({**sizes, "tie_word_embeddings": False}, model="x").num_parameters
        == 6400 + layer + 32
    )


def test_attention_that_is_told_to_be_causal_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "transformers.models.llama.modeling_llama"
    monkeypatch.setattr(f"{module}.create_causal_mask", lambda *_, **__: None)
    model = build_tiny(load_config(config_dict("llama")))
    for told in (True, False):
        recording = record(model, {**prompt(0), "is_causal": told})
        assert {call.mask_is_causal for call in recording.attention} == {told}


def test_keys_behind_the_text_that_a_mask_hides_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = llama.create_causal_mask
    monkeypatch.setattr(
        llama,
        "create_causal_mask",
        lambda **given: nn.functional.pad(masks(**given), (0, 1), value=-1e9),
    )
    recording = record(build_tiny(load_config(config_dict("llama"))), prompt(0))
    assert [call.mask_is_causal for call in recording.attention] == [True, True]


def test_code_that_takes_attention_by_names_that_it_knows_alone_keeps_its_own() -> None:
    model = build_tiny(load_config(config_dict("llama")))
    asked: list[str] = []

    def chosen(module: nn.Module, args: object, kwargs: object) -> None:
        asked.append(module.config._attn_implementation)
        if asked[-1] not in ("eager", "sdpa"):
            raise ValueError(f"Unsupported attention: {asked[-1]}")

    inputs = prompt(0)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
    attention = next(x for x in model.modules() if type(x) is llama.LlamaAttention)
    attention.register_forward_pre_hook(chosen, with_kwargs=True)
    recording = record(model, inputs)
    assert recording.attention == []
    assert (asked[0], asked[1]) == (NAME, model.config._attn_implementation)
    torch.testing.assert_close(recording.logits, expected)


def test_what_code_puts_at_an_output_stays_in_a_copy() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(2))
    output.beside = ["kept"]  # type: ignore[attr-defined]
    made = mapped(lambda item: item + 1, output)
    assert made.beside == ["kept"]
    assert torch.equal(made.last_hidden_state, torch.full((2,), 2.0))
