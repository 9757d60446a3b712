"""What transformers' attention interface is asked for, and which of it the canonical op may stand
for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from onboard.errors import OnboardError
from onboard.graph.cache_init.attention_probe import check_calls
from onboard.graph.cache_init.cached_hf import AttentionLayer
from onboard.graph.cache_init.position_probe import counts_positions
from onboard.graph.context import TransformContext
from onboard.graph.export.hf_attention import AttentionCall, attention_recorded, rule_form
from onboard.graph.export.hf_export import canonical_attention
from onboard.graph.factory import ModelFactory
from onboard.graph.pattern_matcher.masks import MaskForm
from onboard.graph.transform import Stages, get_transform
from tests.support.graph.harness import TINY, settled_config

LENGTH = 4096


def _first_four(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 4


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        (causal_mask_function, MaskForm(True)),
        (bidirectional_mask_function, MaskForm(False)),
        (sliding_window_causal_mask_function(1), MaskForm(True, 1)),
        (sliding_window_causal_mask_function(1000), MaskForm(True, 1000)),
        (sliding_window_causal_mask_function(LENGTH), MaskForm(True)),  # no sequence is longer
        (chunked_causal_mask_function(1000, torch.zeros(1, dtype=int)), None),
        (chunked_causal_mask_function(LENGTH, torch.zeros(1, dtype=int)), MaskForm(True)),
        (or_masks(causal_mask_function, _first_four), None),  # a prefix that all see
        (and_masks(causal_mask_function, _first_four), None),
        (lambda batch, head, query, key: torch.zeros(2)[key], None),  # not of indices alone
    ],
)
def test_a_masks_rule_is_known_by_what_it_allows(rule: Any, form: MaskForm | None) -> None:
    assert rule_form(rule, LENGTH) == form


def _record(
    model_type: str, **config: Any
) -> tuple[nn.Module, list[AttentionCall], torch.Tensor, torch.Tensor]:
    """Return a model, the calls of one pass, its logits with canonical attention, and its own."""
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    settings = AutoConfig.for_model(model_type, **{**TINY, **config})
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return canonical_attention(call)

    ids = torch.randint(97, (2, 13))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with attention_recorded(model, attend, LENGTH):
            actual = model(ids, use_cache=False).logits
        assert torch.equal(model(ids, use_cache=False).logits, expected)  # it is its own again
    return model, calls, actual, expected


def test_a_pass_with_canonical_attention_is_the_same_pass() -> None:
    model, calls, actual, expected = _record(
        "gemma2", sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=16
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert [(call.window, call.logit_cap, call.scale) for call in calls] == [
        (5, 3.0, 0.25),
        (None, 3.0, 0.25),
    ]
    check_calls(model, calls)


def test_sinks_are_the_modules_own() -> None:
    model, calls, actual, expected = _record(
        "gpt_oss", sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert all(call.own == {"s_aux": "sinks"} for call in calls)
    check_calls(model, calls)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda out, kwargs: out * 1.001, "computes something else"),
        (lambda out, kwargs: out[..., :1], "cannot be run by itself"),
        (lambda out, kwargs: out + 0.01 * kwargs["scaling"], "computes something else"),
    ],
)
def test_attention_that_does_more_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, problem: str
) -> None:
    model, calls, *_ = _record("llama")
    module = sys.modules[type(model).__module__]
    own = module.eager_attention_forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out, weights = own(*args, **kwargs)
        return change(out, kwargs), weights

    monkeypatch.setattr(module, "eager_attention_forward", other)
    with pytest.raises(
        OnboardError,
        match=rf"attention of model.layers.0.self_attn cannot be replaced: .*{problem}",
    ):
        check_calls(model, calls)


def test_a_mask_that_the_model_changed_is_refused() -> None:
    """A sparse indexer hides keys from the mask that it was given, as its own attention does when
    asked for eager.
    """
    sparse = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {"num_key_value_heads": 4, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    model, calls, *_ = _record("deepseek_v32", **sparse, **experts, **sizes)
    with pytest.raises(OnboardError, match="its mask depends on more than positions"):
        check_calls(model, calls)


def test_attention_without_a_mask_or_to_later_tokens_is_refused() -> None:
    model, calls, *_ = _record("llama", is_causal=False)
    with pytest.raises(
        OnboardError, match="it sees later tokens|it has no mask, so it is not causal"
    ):
        check_calls(model, calls)


def test_a_model_whose_attention_was_not_found_gets_no_caches() -> None:
    transform = get_transform("transformers_replace_cached_attn")
    context = TransformContext(None, settled_config(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(OnboardError, match="no attention layers are known"):
        transform(transform.config_class(stage=Stages.CACHE_INIT)).apply(nn.Linear(1, 1), context)


@pytest.mark.parametrize("backend", [None, "flashinfer"])
def test_every_attention_layer_gets_caches_of_its_own(backend: str | None) -> None:
    model, calls, *_ = _record("gemma2", sliding_window=5)
    factory = ModelFactory(Path("unused"), root=None, dtype=torch.float32, model_kwargs={})
    context = TransformContext(factory, settled_config(), torch.device("cpu"), torch.float32)
    context.attention = [AttentionLayer.of(call, "somewhere") for call in calls]
    transform = get_transform("transformers_replace_cached_attn")
    cached, info = transform(
        transform.config_class(stage=Stages.CACHE_INIT, backend=backend)
    ).apply(model, context)
    assert info.num_matches == 2
    foreign = (
        f"transformers_replace_cached_attn: back end {backend} is not available here, torch is used"
    )
    assert context.facts == ([] if backend is None else [foreign])
    windows = {name: each.sliding_window for name, each in context.cache.resources.items()}
    assert windows == {"k_cache_0": 5, "v_cache_0": 5, "k_cache_1": None, "v_cache_1": None}
    assert windows.keys() <= {*cached.input_names}
    pages = {(each.page_size, each.dtype) for each in context.cache.resources.values()}
    assert pages == {(context.cache.info.page_size, torch.float32)}


class _Counting(nn.Module):
    """Scales each token by what `formula` makes of its place, which the model counts itself, and of
    its position.
    """

    def __init__(
        self, formula: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: float = 1.0
    ) -> None:
        super().__init__()
        self.formula, self.size = formula, size

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        unused, places = (torch.arange(input_ids.shape[1]) for _ in range(2))
        scales = 1 + self.formula(places, position_ids) + (unused - unused)
        dtype = torch.float16 if self.size > 1 else torch.float32
        return SimpleNamespace(logits=((input_ids + 1) * scales * self.size)[..., None].to(dtype))


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        (_Counting(lambda places, positions: places), True),
        # Seen far into a text alone
        (
            _Counting(lambda places, positions: places.clamp(min=8192) / 8192),
            True,
        ),
        # Squares that float16 does not have
        (
            _Counting(lambda places, positions: places >= 8192, size=400.0),
            True,
        ),
        (_Counting(lambda places, positions: positions >= 8192), False),
    ],
)
def test_a_range_counts_positions_if_it_moves_the_logits(model: _Counting, counts: bool) -> None:
    assert counts_positions(model, 97) == counts
