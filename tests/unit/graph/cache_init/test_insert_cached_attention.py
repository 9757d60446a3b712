from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401
from onboard.config import RuntimeConfig
from onboard.errors import NoCachedFormError, OnboardError, UsageError
from onboard.graph.cache_init.interface import cache_dtype
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.invariants import check_stage
from onboard.graph.transform import BaseTransform, Stages, get_transform

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6


class _Attention(nn.Module):
    """Attention alone: queries, keys and values are looked up by token."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q = nn.Embedding(11, HEADS * DIM)
        self.k = nn.Embedding(11, KV_HEADS * DIM)
        self.v = nn.Embedding(11, KV_HEADS * VALUE_DIM)
        self.sinks = nn.Parameter(torch.randn(HEADS)) if options.pop("with_sinks", False) else None
        self.options = options

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        heads = (*input_ids.shape, -1)
        q, k, v = (
            table(input_ids).view(*heads, dim)
            for table, dim in ((self.q, DIM), (self.k, DIM), (self.v, VALUE_DIM))
        )
        bnsd = self.options.get("layout") == "bnsd"
        if bnsd:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        options = dict(self.options)
        if options.pop("masked", False):
            options["attn_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        mixed = torch.ops.onboard.torch_attention(q, k, v, sinks=self.sinks, **options)
        return mixed.transpose(1, 2) if bnsd else mixed


def _context(**runtime: Any) -> TransformContext:
    settings = {"max_seq_len": 32, "max_batch_size": 3, "max_num_tokens": 32, **runtime}
    settings["kv_cache_config"] = {"tokens_per_block": 4, **settings.get("kv_cache_config", {})}
    factory = ModelFactory(Path("unused"), root=None, dtype=torch.float32, model_kwargs={})
    return TransformContext(factory, RuntimeConfig(**settings), torch.device("cpu"), torch.float32)


def _transform(key: str, **fields: Any) -> BaseTransform[Any]:
    cls = get_transform(key)
    return cls(cls.config_class(stage="cache_init", **fields))


def _exported(model: nn.Module, context: TransformContext) -> torch.fx.GraphModule:
    return export_to_graph(
        model, context.factory.example_inputs(), context.factory.dynamic_shapes(), context.device
    )


def _cached(model: nn.Module, context: TransformContext) -> torch.fx.GraphModule:
    gm = _exported(model.eval().requires_grad_(False), context)
    gm, info = _transform("insert_cached_attention").apply(gm, context)
    assert info.num_matches == 1
    for key in ("initialize_cache", "resize_kv_cache"):
        _transform(key).apply(gm, context)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3, "logit_cap": 2.0},
        {"sliding_window": 5},
        {"with_sinks": True},
        {"layout": "bnsd", "with_sinks": True, "sliding_window": 3},
    ],
)
def test_the_cached_graph_computes_the_same_attention(options: dict[str, Any]) -> None:
    """Prefill, then a chunk, then decode, against the module on everything at once."""
    model, context = _Attention(**options), _context()
    ids = torch.randint(0, 11, (1, 14))
    with torch.no_grad():
        expected = model(ids, torch.arange(14)[None])[0]
        gm, cache = _cached(model, context), context.cache
        pages, rows = np.array([cache.allocator.take(4)]), []
        for start, end in ((0, 5), (5, 13), (13, 14)):
            length = end - start
            cache.info.set_batch(
                ids[0, start:end].numpy(), np.array([start]), np.array([length]), pages
            )
            rows.append(cache.call(gm)[0])
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layout": "bnsd"}])
def test_caches_have_the_shapes_of_keys_and_values(options: dict[str, Any]) -> None:
    context = _context(kv_cache_config={"dtype": "bfloat16"})
    gm = _cached(_Attention(**options), context)
    pages = 1 + 3 * 8
    caches = {name: (tuple(each.shape), each.dtype) for name, each in context.cache.caches.items()}
    assert caches == {
        "k_cache_0": ((pages, KV_HEADS, 4, DIM), torch.bfloat16),
        "v_cache_0": ((pages, KV_HEADS, 4, VALUE_DIM), torch.bfloat16),
    }
    assert context.cache.bytes_per_page == 4 * KV_HEADS * (DIM + VALUE_DIM) * 2
    [node] = gm.graph.find_nodes(
        op="call_function", target=torch.ops.onboard.torch_cached_attention.default
    )
    assert node.meta["val"].shape[2:] == (HEADS, VALUE_DIM)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"is_causal": False}, "is_causal=False"), ({"masked": True}, "attn_mask=")],
)
def test_attention_that_cannot_be_cached_is_named(options: dict[str, Any], found: str) -> None:
    context = _context()
    gm = _exported(_Attention(**options), context)
    said = rf"torch_attention.*{found}.*cannot be cached, so the model cannot generate yet"
    with pytest.raises(NoCachedFormError, match=said):
        _transform("insert_cached_attention").apply(gm, context)
    assert context.cache is None


def test_an_unknown_back_end_is_refused() -> None:
    context = _context()
    gm = _exported(_Attention(), context)
    with pytest.raises(UsageError, match="no attention back end 'tritn'.*Did you mean 'triton'"):
        _transform("insert_cached_attention", backend="tritn").apply(gm, context)


def test_a_graph_without_attention_is_reported_as_skipped() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.table(input_ids)

    context = _context()
    gm = _exported(Embedding(), context)
    infos = [
        _transform(key).apply(gm, context)[1]
        for key in ("insert_cached_attention", "initialize_cache", "resize_kv_cache")
    ]
    assert infos[0].skipped
    assert infos[2].skipped


@pytest.mark.parametrize(
    ("max_tokens", "pages"), [(None, 1 + 3 * 8), (45, 1 + 12), (10_000, 1 + 3 * 8)]
)
def test_the_pool_holds_what_sequences_can_fill(max_tokens: int | None, pages: int) -> None:
    context = _context(kv_cache_config={"max_tokens": max_tokens})
    _cached(_Attention(), context)
    assert context.cache.num_pages == pages
    assert context.cache.allocator.num_usable == pages - 1
    assert context.facts == []


def test_a_pool_smaller_than_one_sequence_is_a_fact() -> None:
    context = _context(kv_cache_config={"max_tokens": 9})
    _cached(_Attention(), context)
    assert context.facts == ["the cache holds 12 tokens, less than max_seq_len=32"]


class _Convolution(nn.Module):
    """A causal convolution of embeddings: it needs the tokens before, and has no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.weight = nn.Parameter(torch.randn(6, 1, 4))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.onboard.torch_causal_conv1d(
            self.table(input_ids), self.weight, None, 1, 3, 1, 6
        )


def test_a_mixer_without_a_cached_form_is_refused() -> None:
    context = _context()
    entry = HistoryEntry("insert_cached_attention", "cache_init", True, True, 0, 0.0, True, True, 0)
    context.history.append(entry)
    with pytest.raises(OnboardError, match="1 calls of torch_causal_conv1d have no cached form"):
        check_stage(Stages.CACHE_INIT, _exported(_Convolution(), context), context)


class _Softmax(nn.Module):
    """Probabilities times values: of a vocabulary and its embedding, or of tokens and these."""

    def __init__(self, of_words: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.of_words = of_words

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        values = self.table.weight * 2 if self.of_words else x
        return torch.matmul(torch.softmax(x @ values.mT, dim=-1), values)


@pytest.mark.parametrize("of_words", [True, False])
def test_a_softmax_over_the_vocabulary_is_no_attention_without_a_cache(of_words: bool) -> None:
    context = _context()
    entry = HistoryEntry("insert_cached_attention", "cache_init", True, True, 0, 0.0, True, True, 0)
    context.history.append(entry)
    check_stage(Stages.CACHE_INIT, _exported(_Softmax(of_words), context), context)
    assert any("have no cache" in fact for fact in context.facts) is not of_words


class _Folded(_Attention):
    """Heads folded into the batch, [batch * heads, sequence, dim], as code around torch.bmm has
    them.
    """

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        batch, length = input_ids.shape
        q, k, v = (
            table(input_ids)
            .view(batch, length, KV_HEADS, -1)
            .transpose(1, 2)
            .reshape(batch * KV_HEADS, length, -1)
            for table in (self.q, self.k, self.v)
        )
        q = q[..., :DIM]
        mixed = torch.ops.onboard.torch_attention(q[None], k[None], v[None], layout="bnsd")[0]
        return mixed.view(batch, KV_HEADS, length, VALUE_DIM).transpose(1, 2)


def test_heads_folded_into_the_batch_are_heads_of_the_one_row() -> None:
    model, context = _Folded(), _context()
    ids = torch.randint(0, 11, (1, 9))
    with torch.no_grad():
        expected = model(ids, torch.arange(9)[None])[0]
        gm, cache = _cached(model, context), context.cache
        pages, rows = np.array([cache.allocator.take(3)]), []
        for start, end in ((0, 5), (5, 8), (8, 9)):
            cache.info.set_batch(
                ids[0, start:end].numpy(), np.array([start]), np.array([end - start]), pages
            )
            rows.append(cache.call(gm)[0])
    assert cache.caches["k_cache_0"].shape[1] == KV_HEADS
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "has_it"), [((8, 8), False), ((8, 9), True), ((9, 0), True)]
)
def test_a_float8_cache_needs_a_gpu_that_has_the_type(
    capability: tuple[int, int], has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    context = _context(kv_cache_config={"dtype": "float8_e4m3fn"})
    context.device = torch.device("cuda")
    if has_it:
        assert cache_dtype(context) == torch.float8_e4m3fn
    else:
        with pytest.raises(
            UsageError, match=r"needs compute capability 8\.9 and this GPU has 8\.8"
        ):
            cache_dtype(context)


def test_the_first_pool_holds_one_sequence() -> None:
    context = _context()
    gm = _exported(_Attention(), context)
    for key in ("insert_cached_attention", "initialize_cache"):
        gm, _ = _transform(key).apply(gm, context)
    assert context.cache.num_pages == 1 + 8
    assert all(len(cache) == 1 + 8 for cache in context.cache.caches.values())


def test_a_cache_keeps_what_a_window_in_chunks_sees() -> None:
    context = _context()
    _transform("insert_cached_attention").apply(
        _exported(_Attention(sliding_window=5, chunk_size=8), context), context
    )
    assert {each.sliding_window for each in context.cache.resources.values()} == {5}
