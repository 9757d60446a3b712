from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import repeat_kv

from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.transform import Stages
from tests.support.graph.harness import (
    make_context,
    random_inputs,
    randomize,
    rmse,
    run_only,
    transform,
    worst_error,
)

ATTENTION = torch.ops.onboard.torch_attention
FRONT = [Stages.FACTORY, Stages.EXPORT, Stages.POST_EXPORT, Stages.PATTERN_MATCHER]

# transformers has no sdpa for soft-capped scores, so gemma2 is eager alone.
MODELS: list[tuple[str, str, dict[str, Any], list[int | None]]] = [
    ("llama", "eager", {}, [None, None]),
    ("llama", "sdpa", {}, [None, None]),
    ("llama", "eager", {"num_key_value_heads": 4}, [None, None]),
    ("qwen3", "eager", {}, [None, None]),
    ("qwen3", "sdpa", {}, [None, None]),
    ("mistral", "eager", {"sliding_window": 6}, [6, 6]),
    ("mistral", "sdpa", {"sliding_window": 4096}, [4096, 4096]),
    (
        "gemma2",
        "eager",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        [4, None],
    ),
]


@pytest.mark.drawn("model_type", "implementation")
@pytest.mark.parametrize(("model_type", "implementation", "config", "windows"), MODELS)
def test_plain_hugging_face_graphs_become_canonical(
    tmp_path: Path,
    model_type: str,
    implementation: str,
    config: dict[str, Any],
    windows: list[int | None],
) -> None:
    context = make_context(tmp_path, model_type, "hf", attn_implementation=implementation, **config)
    gm = run_only(context, [each.key for each in load_pipeline({}) if each.config.stage in FRONT])
    assert isinstance(gm, fx.GraphModule)
    model = context.factory.build_model("cpu")
    randomize(model, 7)
    gm.load_state_dict(model.state_dict(), strict=True, assign=True)

    calls = [arguments(node) for node in nodes_of(gm, ATTENTION)]
    assert [call["sliding_window"] for call in calls] == windows
    assert all(
        call["is_causal"] and call["attn_mask"] is None and call["layout"] == "bsnd"
        for call in calls
    )
    assert [call["logit_cap"] for call in calls] == [50.0 if model_type == "gemma2" else None] * 2
    assert all(
        call["key"].meta["val"].shape[2] == context.factory.config.num_key_value_heads
        for call in calls
    )
    assert not nodes_of(gm, torch.ops.aten.softmax, torch.ops.aten.rsqrt, torch.ops.aten.arange)
    # Some versions of transformers compute the rotary angles, in three dimensions, with a product
    # and a transpose.
    per_head = nodes_of(gm, torch.ops.aten.matmul, torch.ops.aten.transpose)
    assert not [node for node in per_head if node.meta["val"].dim() == 4]
    assert len(nodes_of(gm, torch.ops.onboard.torch_rope_with_explicit_cos_sin)) == 2
    assert not context.facts
    for batch, sequence in ((2, 21), (1, 1), (3, 11)):
        inputs = random_inputs(batch, sequence)
        with torch.no_grad():
            assert rmse(gm(*inputs), model(*inputs).logits) < 2e-6


def _heads(batch: int, sequence: int) -> dict[str, Tensor]:
    return {
        name: torch.randn(batch, sequence, count, 8)
        for name, count in (("q", 4), ("k", 2), ("v", 2))
    }


class _Eager(nn.Module):
    """Attention over [batch, sequence, heads, head_dim], written out; subclasses change the
    scores.
    """

    def scores(self, product: Tensor) -> Tensor:
        return product / math.sqrt(8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (
            q.transpose(1, 2),
            repeat_kv(k.transpose(1, 2), 2),
            repeat_kv(v.transpose(1, 2), 2),
        )
        scores = self.scores(torch.matmul(query, key.transpose(-1, -2)))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value).transpose(1, 2)


class _Unscaled(_Eager):
    def scores(self, product: Tensor) -> Tensor:
        return product


class _Capped(_Eager):
    def scores(self, product: Tensor) -> Tensor:
        return 3.0 * torch.tanh(product * 0.7 / 3.0)


class _TwoCaps(_Eager):
    def scores(self, product: Tensor) -> Tensor:
        return 3.0 * torch.tanh(product / 2.0)


EAGER = ["match_repeat_kv", "match_eager_attention", "match_grouped_attention"]


@pytest.mark.parametrize(
    ("module", "scale", "cap"),
    [(_Eager(), 1 / math.sqrt(8), None), (_Unscaled(), 1.0, None), (_Capped(), 0.7, 3.0)],
)
def test_scale_and_cap_are_read_from_the_graph(
    module: nn.Module, scale: float, cap: float | None
) -> None:
    result = transform(EAGER, module, _heads(2, 5))

    [call] = [arguments(node) for node in nodes_of(result.gm, ATTENTION)]
    assert call["scale"] == pytest.approx(scale)
    assert call["logit_cap"] == cap
    assert not call["is_causal"]
    assert result.matches["match_grouped_attention"] == 1
    assert worst_error(result, module, _heads) < 1e-6


class _Filled(nn.Module):
    """A mask as code of repositories writes it: scores of later keys are replaced."""

    def __init__(self, replace: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.replace = replace

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in (q, k, v))
        seen = (position_ids[:, :, None] >= position_ids[:, None, :])[:, None]
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(8)
        weights = F.softmax(self.replace(scores, seen), dim=-1)
        return torch.matmul(weights, value).transpose(1, 2)


def _heads_and_positions(batch: int, sequence: int) -> dict[str, Tensor]:
    heads = {name: torch.randn(batch, sequence, 4, 8) for name in "qkv"}
    return heads | {"position_ids": torch.arange(sequence).expand(batch, sequence).contiguous()}


REPLACED: list[tuple[str, Callable[[Tensor, Tensor], Tensor], bool]] = [
    ("not seen", lambda x, seen: x.masked_fill(~seen, torch.finfo(x.dtype).min), True),
    ("zeros", lambda x, seen: x.masked_fill(seen.float() == 0, -1e9), True),
    ("where", lambda x, seen: torch.where(seen, x, torch.full([], float("-inf"))), True),
    ("scaled last", lambda x, seen: x.masked_fill(~seen, -torch.inf) / 1.7, True),
    ("enlarged last", lambda x, seen: torch.where(seen, x, -torch.inf) * 1.7, True),
    ("turned round last", lambda x, seen: x.masked_fill(~seen, 1e9) * -1.7, False),
    ("counts when scaled", lambda x, seen: x.masked_fill(~seen, -1e4) * 1e-4, False),
    ("what still counts", lambda x, seen: x.masked_fill(~seen, -1.0), False),
    ("earlier keys", lambda x, seen: x.masked_fill(seen & ~seen.transpose(2, 3), -1e9), False),
]


@pytest.mark.parametrize(
    ("replace", "is_mask"), [pytest.param(*case[1:], id=case[0]) for case in REPLACED]
)
def test_masks_that_replace_scores_are_read(
    replace: Callable[[Tensor, Tensor], Tensor], is_mask: bool
) -> None:
    module = _Filled(replace)
    result = transform(["match_eager_attention"], module, _heads_and_positions(2, 5))

    calls = [arguments(node) for node in nodes_of(result.gm, ATTENTION)]
    assert [(call["is_causal"], call["attn_mask"]) for call in calls] == [(True, None)] * is_mask
    assert worst_error(result, module, _heads_and_positions) < 1e-6


class _OverQueries(_Eager):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (
            q.transpose(1, 2),
            repeat_kv(k.transpose(1, 2), 2),
            repeat_kv(v.transpose(1, 2), 2),
        )
        weights = F.softmax(torch.matmul(query, key.transpose(-1, -2)), dim=-2)
        return torch.matmul(weights, value).transpose(1, 2)


@pytest.mark.parametrize("module", [_OverQueries(), _TwoCaps()])
def test_what_is_not_attention_stays(module: nn.Module) -> None:
    result = transform(EAGER, module, _heads(2, 5))

    assert result.matches["match_eager_attention"] == 0
    assert worst_error(result, module, _heads) < 1e-6


class _Biased(_Eager):
    """A position bias is no mask that attention computes by itself: it stays an argument."""

    def scores(self, product: Tensor) -> Tensor:
        sequence = product.shape[-1]
        distance = torch.arange(sequence)[:, None] - torch.arange(sequence)
        return product * 0.3 + distance[None, None].to(product.dtype) * 0.1


def test_an_unknown_mask_stays_an_argument() -> None:
    result = transform(EAGER, _Biased(), _heads(2, 5))

    [call] = [arguments(node) for node in nodes_of(result.gm, ATTENTION)]
    assert isinstance(call["attn_mask"], fx.Node)
    assert worst_error(result, _Biased(), _heads) < 1e-6


class _SDPA(nn.Module):
    def __init__(self, grouped: bool, **options: Any) -> None:
        super().__init__()
        self.grouped = grouped
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key, value = k.transpose(1, 2), v.transpose(1, 2)
        if not self.grouped:
            key, value = repeat_kv(key, 2), repeat_kv(value, 2)
        output = F.scaled_dot_product_attention(
            q.transpose(1, 2), key, value, enable_gqa=self.grouped, **self.options
        )
        return output.transpose(1, 2)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.5}])
def test_sdpa_keeps_its_options(grouped: bool, options: dict[str, Any]) -> None:
    module = _SDPA(grouped, **options)
    keys = ["match_repeat_kv", "match_sdpa_to_torch_attention", "match_grouped_attention"]
    result = transform(keys, module, _heads(2, 5))

    [call] = [arguments(node) for node in nodes_of(result.gm, ATTENTION)]
    assert call["is_causal"] == options.get("is_causal", False)
    assert call["scale"] == options.get("scale")
    assert result.count(torch.ops.onboard.torch_attention_repeat_kv) == 0
    assert worst_error(result, module, _heads) < 1e-6


class _WithinTokens(nn.Module):
    """A token's queries attend to vectors of the same token."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_within_each_token_is_no_attention_to_tokens() -> None:
    result = transform(["match_sdpa_to_torch_attention"], _WithinTokens(), _heads(2, 5))
    assert result.matches["match_sdpa_to_torch_attention"] == 0
    assert result.count(ATTENTION) == result.count(torch.ops.aten.scaled_dot_product_attention) == 0
    assert worst_error(result, _WithinTokens(), _heads) < 1e-6
