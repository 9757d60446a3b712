"""Each `insert_cached_*` of a mixer: the cached graph gives in chunks what the exported one gives
at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onboard.ops  # noqa: F401
from onboard.cache.resources import KVPagedResource
from onboard.config import RuntimeConfig
from onboard.errors import NoCachedFormError, OnboardError
from onboard.graph import backends
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.fx import is_op, nodes_of
from onboard.graph.invariants import check_stage
from onboard.graph.transform import Stages, get_transform

ops: Any = torch.ops.onboard
TOKENS = 14


class _Mixer(nn.Module):
    """One op whose tensors are looked up by token."""

    def __init__(self, shapes: list[tuple[int, ...]], weights: list[Tensor], call: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(40, int(np.prod(shape))) for shape in shapes)
        self.weights = nn.ParameterList(weights)
        self.shapes, self.call = shapes, call

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        looked_up = [
            table(input_ids).view(*input_ids.shape, *shape)
            for table, shape in zip(self.tables, self.shapes, strict=True)
        ]
        return self.call(*looked_up, *self.weights)


def _conv(groups: int = 6) -> _Mixer:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        return ops.torch_causal_conv1d(x, weight, None, 1, 6, 2, groups, activation="silu")

    return _Mixer([(6,)], [torch.randn(6, 6 // groups, 4)], call)


def _ssm() -> _Mixer:
    def call(x: Tensor, B: Tensor, C: Tensor, dt: Tensor, A: Tensor, D: Tensor) -> Tensor:
        return ops.torch_ssm(x, -A.exp(), B, C, D, dt, D, [0.0, 2.0], 4)

    return _Mixer([(4, 5), (2, 3), (2, 3), (4,)], [torch.randn(4), torch.randn(4)], call)


def _scan() -> _Mixer:
    def call(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor) -> Tensor:
        return ops.torch_selective_scan(x, dt, -A.exp(), B, C, D, z=x, dt_bias=D)

    return _Mixer([(5,), (5,), (3,), (3,)], [torch.randn(5, 3), torch.randn(5)], call)


def _delta_rule() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return ops.torch_gated_delta_rule(q, k, v, -g.abs(), beta.sigmoid(), None, True)

    return _Mixer([(2, 5), (2, 5), (4, 3), (4,), (4,)], [], call)


def _kda() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return ops.torch_kda(q, k, v, -g.abs(), beta.sigmoid(), None, True)

    return _Mixer([(4, 5), (4, 5), (4, 3), (4, 5), (4,)], [], call)


def _dplr_delta_rule() -> _Mixer:
    def call(*x: Tensor) -> Tensor:
        return ops.torch_dplr_delta_rule(*x[:3], x[3] / 4, x[4] / 4, -x[5].abs())

    return _Mixer([(4, 5), (4, 5), (4, 3), (4, 5), (4, 5), (4, 5)], [], call)


def _lightning() -> _Mixer:
    return _Mixer([(4, 5), (4, 5), (4, 3)], [torch.rand(4)], ops.torch_lightning_attention)


def _gated_linear() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, first: Tensor) -> Tensor:
        return ops.torch_gated_linear_attention(q, k, v, -g.exp(), first)

    return _Mixer([(4, 5), (4, 5), (4, 3), (4, 5)], [torch.randn(4, 5)], call)


def _recurrence() -> _Mixer:
    return _Mixer(
        [(5,), (5,)], [], lambda x, decay: ops.torch_linear_recurrence(x, decay.sigmoid())
    )


def _wkv() -> _Mixer:
    return _Mixer([(5,), (5,)], [torch.randn(5), torch.randn(5)], ops.torch_wkv)


def _mlstm() -> _Mixer:
    return _Mixer([(4, 5), (4, 5), (4, 3), (4,), (4,)], [], lambda *x: ops.torch_mlstm(*x, 1e-6))


def _plain_delta_rule() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return ops.torch_delta_rule(q, k, v, beta.sigmoid(), None, True)

    return _Mixer([(2, 5), (2, 5), (4, 3), (4,)], [], call)


def _mla(rank: int = 5, **options: Any) -> _Mixer:
    def call(q_nope: Tensor, q_pe: Tensor, latent: Tensor, kpe: Tensor, weight: Tensor) -> Tensor:
        return ops.torch_mla(q_nope, q_pe, latent, kpe, weight, scale=0.3, **options)

    return _Mixer([(3, 6), (3, 4), (rank,), (1, 4)], [torch.randn(3 * (6 + 7), rank)], call)


def _windowed_mla() -> _Mixer:
    def call(
        q_nope: Tensor, q_pe: Tensor, latent: Tensor, kpe: Tensor, weight: Tensor, sinks: Tensor
    ) -> Tensor:
        return ops.torch_sparse_mla(q_nope, q_pe, latent, kpe, weight, None, 0.3, sinks, 3)

    return _Mixer(
        [(3, 6), (3, 4), (5,), (1, 4)], [torch.randn(3 * (6 + 7), 5), torch.randn(3)], call
    )


def _relative() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, relative: Tensor) -> Tensor:
        return ops.torch_relative_attention(q, k, v, relative, 0.4, None, 5)

    return _Mixer([(4, 5), (2, 5), (2, 3), (4, 6)], [], call)


def _dynamic_mask() -> _Mixer:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ops.torch_dynamic_mask_attention(q, k, v, bias, 4, 0.4, 6)

    return _Mixer([(4, 5), (2, 5), (2, 3), (4,)], [], call)  # a bias for each head of the query


def _indexed_mla() -> _Mixer:
    def call(q_nope: Tensor, q_pe: Tensor, latent: Tensor, kpe: Tensor, *rest: Tensor) -> Tensor:
        chosen = ops.torch_lightning_indexer(*rest[:3], 4, 0.5)
        return ops.torch_sparse_mla(q_nope, q_pe, latent, kpe, rest[3], chosen, 0.3)

    shapes = [(3, 6), (3, 4), (5,), (1, 4), (16, 3), (3,), (16,)]
    return _Mixer(shapes, [torch.randn(3 * (6 + 7), 5)], call)


def _sparse() -> _Mixer:
    """An indexer of blocks, and the attention that it chooses keys for."""

    def call(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor) -> Tensor:
        chosen = ops.torch_block_indexer(query, key, None, 2, 3, expand=True)
        return ops.torch_sparse_attention(q, k, v, chosen, 0.4)

    return _Mixer([(4, 5), (2, 5), (2, 3), (16, 3), (3,)], [], call)


def _pool() -> _Mixer:
    def call(values: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
        return ops.torch_gated_pool(values, gates, bias, True)

    return _Mixer([(6,), (6,)], [torch.randn(2, 6)], call)


def _compressed(window: int) -> _Mixer:
    def call(q: Tensor, kv: Tensor, entries: Tensor, sinks: Tensor) -> Tensor:
        return ops.torch_compressed_attention(q, kv, entries, None, 3, window, 0.4, sinks)

    return _Mixer([(4, 5), (1, 5), (5,)], [torch.randn(4)], call)


MIXERS = {
    "insert_cached_causal_conv": (_conv, {"conv_cache_0": (6, 6)}),
    "insert_cached_ssm_attention": (_ssm, {"ssm_cache_0": (4, 5, 3)}),
    "insert_cached_selective_scan": (_scan, {"scan_cache_0": (5, 3)}),
    "insert_cached_gated_delta_rule": (_delta_rule, {"delta_cache_0": (4, 5, 3)}),
    "insert_cached_lightning_attention": (_lightning, {"lightning_cache_0": (4, 3, 5)}),
    "insert_cached_gated_linear_attention": (_gated_linear, {"gla_cache_0": (4, 5, 3)}),
    "insert_cached_linear_recurrence": (_recurrence, {"recurrence_cache_0": (5,)}),
    "insert_cached_token_shift": (
        lambda: _Mixer([(5,)], [], ops.torch_token_shift),
        {"shift_cache_0": (5,)},
    ),
    "insert_cached_wkv": (_wkv, {"wkv_cache_0": (3, 5)}),
    "insert_cached_mlstm": (_mlstm, {"mlstm_cache_0": (4, 6, 4)}),
    "insert_cached_dplr_delta_rule": (_dplr_delta_rule, {"dplr_cache_0": (4, 5, 3)}),
    "insert_cached_kda": (_kda, {"kda_cache_0": (4, 5, 3)}),
    "insert_cached_delta_rule": (_plain_delta_rule, {"delta_cache_0": (4, 5, 3)}),
    "insert_cached_mla_attention": (_mla, {"mla_cache_0": (1, 4, 9)}),
    "insert_cached_sparse_mla_attention": (_windowed_mla, {"mla_cache_0": (1, 4, 9)}),
    "insert_cached_residual_add": (
        lambda: _Mixer([(5,), (5,)], [], ops.torch_residual_add),
        {"hidden_cache_0": (1, 4, 5)},
    ),
    "insert_cached_relative_attention": (
        _relative,
        {"k_cache_0": (2, 4, 5), "v_cache_0": (2, 4, 3)},
    ),
    "insert_cached_dynamic_mask_attention": (
        _dynamic_mask,
        {"k_cache_0": (2, 4, 5), "v_cache_0": (2, 4, 3), "bias_cache_0": (4, 4, 1)},
    ),
    "insert_cached_block_indexer": (
        _sparse,
        {"index_cache_0": (1, 4, 3), "k_cache_0": (2, 4, 5), "v_cache_0": (2, 4, 3)},
    ),
    "insert_cached_gated_pool": (_pool, {"value_cache_0": (1, 4, 6), "gate_cache_0": (1, 4, 6)}),
    "insert_cached_compressed_attention": (
        lambda: _compressed(4),
        {"kv_cache_0": (1, 4, 5), "entry_cache_0": (1, 2, 5)},
    ),
    "insert_cached_lightning_indexer": (
        _indexed_mla,
        {"index_cache_0": (1, 4, 3), "mla_cache_0": (1, 4, 9)},
    ),
}


FOLLOWED = {
    "insert_cached_lightning_indexer": "insert_cached_sparse_mla_attention",
    "insert_cached_block_indexer": "insert_cached_sparse_attention",
}


def _context(**fields: Any) -> TransformContext:
    settings = {"max_seq_len": 32, "max_batch_size": 3, "max_num_tokens": 32, **fields}
    runtime = RuntimeConfig(**settings, kv_cache_config={"tokens_per_block": 4})
    factory = ModelFactory(Path("unused"), root=None, dtype=torch.float32, model_kwargs={})
    return TransformContext(factory, runtime, torch.device("cpu"), torch.float32)


def _exported(model: nn.Module, context: TransformContext) -> torch.fx.GraphModule:
    model.eval().requires_grad_(False)
    return export_to_graph(
        model, context.factory.example_inputs(), context.factory.dynamic_shapes(), context.device
    )


def _apply(key: str, gm: nn.Module, context: TransformContext, **fields: Any) -> Any:
    cls = get_transform(key)
    return cls(cls.config_class(stage="cache_init", **fields)).apply(gm, context)


@pytest.mark.parametrize("key", MIXERS)
def test_the_cached_graph_computes_the_same(key: str) -> None:
    make, shapes = MIXERS[key]
    model, context = make(), _context()
    # No token twice: which of two equal keys is chosen is arbitrary
    ids = torch.randperm(40)[None, :TOKENS]
    with torch.no_grad():
        gm = _exported(model, context)
        expected = model(ids, torch.arange(TOKENS)[None])[0]
        gm, info = _apply(key, gm, context)
        if key in FOLLOWED:  # what it chooses counts for the attention behind it
            gm, _ = _apply(FOLLOWED[key], gm, context)
        for then in ("initialize_cache", "resize_kv_cache"):
            _apply(then, gm, context)
        gm.recompile()
        cache = context.cache
        pages, rows = np.array([[group.allocator.take(4)] for group in cache.groups]), []
        for start, end in ((0, 5), (5, 12), (12, 13), (13, 14)):
            span = np.array([start]), np.array([end - start])
            for table, group in zip(pages, cache.groups, strict=True):
                table[:, : group.first_key(start) // 4] = 0  # given up behind the last step
            cache.info.set_batch(ids[0, start:end].numpy(), *span, pages, slots=np.array([2]))
            rows.append(cache.call(gm)[0])
    assert info.num_matches == 1
    assert {name: tuple(each.shape[1:]) for name, each in cache.caches.items()} == shapes
    torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-5, atol=1e-5)


EXACT_PAGES = {"hidden_cache", "index_cache", "bias_cache", "value_cache", "gate_cache"}


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("key", MIXERS)
def test_pages_have_the_dtype_that_is_asked_for_where_small_differences_decide_nothing(
    key: str, dtype: torch.dtype | None
) -> None:
    make, _ = MIXERS[key]
    descriptor = get_transform(key).descriptor
    [node] = nodes_of(_exported(make().double(), _context()), descriptor.source)
    for name, resource in descriptor.resources(node, 4, dtype).items():
        if isinstance(resource, KVPagedResource):
            assert resource.dtype == (
                torch.float64 if dtype is None or name in EXACT_PAGES else dtype
            )


@pytest.mark.parametrize(("heads", "ties"), [(2, 1), (16, 0)])
@pytest.mark.parametrize("kind", ["lightning", "block"])
def test_that_scores_of_an_indexer_tie_is_a_fact(kind: str, heads: int, ties: int) -> None:
    def call(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        if kind == "block":
            return ops.torch_block_indexer(query, key, weights, 4, 1, 0.5)
        return ops.torch_lightning_indexer(query, key, weights, 4, 0.5)

    context = _context()
    _apply(
        f"insert_cached_{kind}_indexer",
        _exported(_Mixer([(heads, 3), (3,), (heads,)], [], call), context),
        context,
    )
    assert len([fact for fact in context.facts if "scores of the indexer tie" in fact]) == ties


def test_that_repeated_tokens_tie_is_a_fact_of_attention_to_kept_keys() -> None:
    context, key = _context(), "insert_cached_dynamic_mask_attention"
    _apply(key, _exported(_dynamic_mask(), context), context)
    assert (
        len(
            [
                fact
                for fact in context.facts
                if "repeated tokens may tie where a query keeps 4 keys" in fact
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    ("key", "make"), [("insert_cached_mla_attention", lambda: _mla(is_causal=False))]
)
def test_what_cannot_be_cached_is_named(key: str, make: Any) -> None:
    context = _context()
    with pytest.raises(OnboardError, match=r"torch_mla.*is_causal=False.*cannot be cached"):
        _apply(key, _exported(make(), context), context)


def test_a_back_end_that_a_mechanism_lacks_is_a_fact_once_and_a_wish_for_it_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, context = "insert_cached_mla_attention", _context(attn_backend="triton")
    monkeypatch.setattr(
        type(get_transform(key).descriptor), "cached_names", {"torch": "torch_cached_mla"}
    )
    for _ in range(2):
        _apply(key, _exported(_mla(), context), context)
    assert context.facts == [
        f"{key}: torch is used, not triton: this mechanism has no such operator"
    ]
    with pytest.raises(OnboardError, match="no attention back end 'triton'"):
        _apply(key, _exported(_mla(), context), context, backend="triton")


TOO_MUCH_FOR_KERNELS = {
    "insert_cached_mla_attention": (lambda: _mla(rank=1030), "a rank of 1030 is over 1024"),
    "insert_cached_causal_conv": (lambda: _conv(groups=2), "the convolution mixes channels"),
    "insert_cached_ssm_attention": (lambda: _ssm().double(), "its kernels have no float64"),
}


@pytest.mark.parametrize("key", TOO_MUCH_FOR_KERNELS)
def test_a_node_that_the_kernels_cannot_serve_falls_back_and_says_why(key: str) -> None:
    make, reason = TOO_MUCH_FOR_KERNELS[key]
    context, descriptor = _context(), get_transform(key).descriptor
    exported = _exported(make(), context)
    obstacles = [
        descriptor.obstacle("torch", node)
        for node in exported.graph.nodes
        if is_op(node, descriptor.source)
    ]
    assert obstacles == [""]
    gm, _ = _apply(key, exported, context, backend="triton")
    assert any("torch_cached" in str(node.target) for node in gm.graph.nodes)
    assert context.facts == [f"{key}: torch is used, not triton: {reason}"]


WITH_KERNELS = [
    key
    for key in MIXERS
    if "triton_" in get_transform(key).descriptor.cached_names.get("triton", "")
]


@pytest.mark.parametrize("key", WITH_KERNELS)
def test_a_mechanism_has_kernels(key: str) -> None:
    context = _context()
    gm, _ = _apply(key, _exported(MIXERS[key][0](), context), context, backend="triton")
    assert any("triton_cached" in str(node.target) for node in gm.graph.nodes)
    assert not context.facts


def test_a_foreign_back_end_is_replaced_by_that_of_the_run_and_is_a_fact() -> None:
    context = _context()
    gm, _ = _apply(
        "insert_cached_mla_attention", _exported(_mla(), context), context, backend="flashinfer_mla"
    )
    assert any("torch_cached_mla" in str(node.target) for node in gm.graph.nodes)
    assert "back end flashinfer_mla is not available here, torch is used" in context.facts[0]


def test_a_library_that_is_there_serves_the_mechanisms_that_have_an_operator_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "has_fla", lambda: True)
    context = _context()
    context.device = torch.device("cuda")
    found = {
        key: backends.cached_backend(
            "fla", get_transform(key).descriptor.cached_names, context, key
        )
        for key in ("insert_cached_gated_delta_rule", "insert_cached_ssm_attention")
    }
    assert list(found.values()) == ["fla", "triton"]
    assert len(context.facts) == 1


def test_a_graph_with_replay_forgets_tokens_that_its_next_step_does_not_count() -> None:
    model, context = _ssm(), _context()
    ids, drafts = torch.randperm(40)[None, :TOKENS], torch.randint(40, (TOKENS,))
    with torch.no_grad():
        gm = _exported(model, context)
        expected = model(ids, torch.arange(TOKENS)[None])[0]
        _apply("insert_cached_ssm_attention", gm, context, ssm_replay=True, replay_tokens=4)
        _apply("initialize_cache", gm, context)
        gm.recompile()
        cache = context.cache
        for start, end, right in (
            (0, 6, 6),
            (6, 10, 8),
            (8, 9, 9),
            (9, 12, 9),
            (9, 13, 13),
            (13, 14, 14),
        ):
            read = torch.cat([ids[0, start:right], drafts[right:end]])
            span = np.array([start]), np.array([end - start])
            cache.info.set_batch(read.numpy(), *span, np.array([[1, 2, 3, 4]]), slots=np.array([2]))
            rows = cache.call(gm)[0][: right - start]
            torch.testing.assert_close(rows, expected[start:right], rtol=1e-5, atol=1e-5)
    assert cache.caches["replay_b_cache_0"].shape[1:] == (4, 2, 3)
    assert any("no run drafts tokens yet" in fact for fact in context.facts)


@pytest.mark.parametrize("replay", [False, True])
def test_states_of_mamba_2_lie_in_the_dtype_that_is_asked_for(replay: bool) -> None:
    model, context = _ssm(), _context()
    context.runtime.kv_cache_config.mamba_ssm_cache_dtype = "bfloat16"
    ids = torch.randperm(40)[None, :TOKENS]
    with torch.no_grad():
        gm = _exported(model, context)
        expected = model(ids, torch.arange(TOKENS)[None])[0]
        _apply("insert_cached_ssm_attention", gm, context, ssm_replay=replay)
        _apply("initialize_cache", gm, context)
        gm.recompile()
        rows = []
        for start, end in ((0, 5), (5, 12), (12, 13), (13, 14)):
            span = np.array([start]), np.array([end - start])
            read = ids[0, start:end].numpy()
            context.cache.info.set_batch(read, *span, np.array([[1, 2, 3, 4]]), slots=np.array([2]))
            rows.append(context.cache.call(gm)[0][: end - start].clone())
    found = torch.cat(rows)
    assert found.dtype == torch.float32
    asked = "kv_cache_config.mamba_ssm_cache_dtype"
    if replay:
        assert context.cache.caches["ssm_cache_0"].dtype == torch.float32
        assert any(f"{asked} bfloat16 is not used" in fact for fact in context.facts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        return
    assert context.cache.caches["ssm_cache_0"].dtype == torch.bfloat16
    assert any(f"in bfloat16 ({asked})" in fact for fact in context.facts)
    torch.testing.assert_close(found[:5], expected[:5], rtol=1e-5, atol=1e-5)
    error = (found - expected).norm() / expected.norm()
    assert 1e-5 < error < 2.0**-6  # three roundings of 2^-9, which a later step's inputs hide


def test_a_mixer_that_was_left_out_is_refused() -> None:
    context = _context()
    context.history.append(
        HistoryEntry("insert_cached_attention", "cache_init", True, True, 0, 0, True, True, 0)
    )
    gm = _exported(_ssm(), context)
    with pytest.raises(NoCachedFormError, match="1 calls of torch_ssm have no cached form"):
        check_stage(Stages.CACHE_INIT, gm, context)


def test_tokens_that_are_mixed_without_a_cache_are_refused() -> None:
    context = _context()
    context.history.append(
        HistoryEntry("insert_cached_attention", "cache_init", True, True, 0, 0, True, True, 0)
    )
    gm = _exported(_Mixer([(6,)], [], lambda x: x.cumsum(1)), context)
    with pytest.raises(
        NoCachedFormError, match="aten.cumsum mixes the tokens of a step and has no cached form"
    ):
        check_stage(Stages.CACHE_INIT, gm, context)
    gm = _exported(_Mixer([(6,)], [], lambda x: x.cumsum(2)), context)
    check_stage(Stages.CACHE_INIT, gm, context)
    assert context.facts == []


def test_flash_linear_attention_takes_16_bit_tensors_alone() -> None:
    gm = _exported(_delta_rule(), _context())
    (node,) = (node for node in gm.graph.nodes if "torch_gated_delta_rule" in str(node.target))
    descriptor = get_transform("insert_cached_gated_delta_rule").descriptor
    assert "16-bit" in descriptor.obstacle("fla", node)
    node.args[0].meta["val"] = node.args[0].meta["val"].to(torch.bfloat16)
    assert "16-bit" not in descriptor.obstacle("fla", node)
