from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import (
    eager_attention_forward as gpt_oss_attention,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    eager_attention_forward,
    repeat_kv,
)

import onboard.ops
import onboard.ops.attention.attention as source
from tests.support.ops.naive import Options, attention, relative_error

ops = torch.ops.onboard


def qkv(
    batch: int = 2,
    sq: int = 5,
    sk: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    value_dim: int = 8,
):
    return (
        torch.randn(batch, sq, heads, dim),
        torch.randn(batch, sk, kv_heads, dim),
        torch.randn(batch, sk, kv_heads, value_dim),
    )


VARIANTS = {
    "plain": Options(),
    "scale": Options(scale=0.7),
    "window": Options(sliding_window=3),
    "chunks": Options(chunk_size=3),
    "window in chunks": Options(sliding_window=2, chunk_size=3),
    "cap": Options(logit_cap=0.8),
    "sinks": Options(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "slopes": Options(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.7])),
    "all": Options(
        0.7, torch.tensor([0.5, -1.0, 2.0, 0.0]), 3, 0.8, torch.tensor([0.5, 0.25, 0.125, 0.7])
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("sq", "sk"), [(1, 7), (5, 5), (3, 7), (6, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_that_of_the_element_by_element_one(
    variant: str, sq: int, sk: int, causal: bool
) -> None:
    options = VARIANTS[variant]
    q, k, v = qkv(sq=sq, sk=sk, value_dim=6)
    actual = ops.torch_attention(q, k, v, is_causal=causal, **vars(options))
    assert relative_error(actual, attention(q, k, v, options, causal=causal)) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 5, 5), (2, 4, 5, 5), (2, 1, 1, 5)])
def test_a_boolean_mask_says_what_is_allowed_and_a_float_mask_is_added(
    variant: str, causal: bool, shape: tuple
) -> None:
    options = VARIANTS[variant]
    q, k, v = qkv()
    allowed = torch.rand(shape) < 0.7
    allowed[..., 0] = True
    for mask in (allowed, torch.randn(shape), torch.zeros(shape).masked_fill(~allowed, -torch.inf)):
        actual = ops.torch_attention(q, k, v, mask, is_causal=causal, **vars(options))
        assert relative_error(actual, attention(q, k, v, options, mask, causal)) < 1e-6


def test_trap_a_forbidden_key_stays_forbidden_under_a_soft_cap() -> None:
    q, k, v = qkv()
    expected = ops.torch_attention(q[:, :2], k[:, :2], v[:, :2], logit_cap=0.1)
    v[:, 2:] = 1e6  # would show if -inf had become -cap
    assert relative_error(ops.torch_attention(q, k, v, logit_cap=0.1)[:, :2], expected) < 1e-6


def test_trap_an_allowed_position_of_a_boolean_mask_adds_nothing() -> None:
    q, k, v = qkv()
    sinks, everything = torch.randn(4), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    masked = ops.torch_attention(q, k, v, everything, is_causal=False, sinks=sinks)
    assert relative_error(masked, ops.torch_attention(q, k, v, is_causal=False, sinks=sinks)) < 1e-7


@pytest.mark.parametrize("cap", [None, 30.0])
def test_trap_fewer_queries_than_keys_are_the_last_positions(cap: float | None) -> None:
    q, k, v = qkv(sq=9, sk=9)
    whole = ops.torch_attention(q, k, v, logit_cap=cap)
    for new in (1, 4, q.shape[-1]):
        assert (
            relative_error(ops.torch_attention(q[:, -new:], k, v, logit_cap=cap), whole[:, -new:])
            < 1e-6
        )


@pytest.mark.parametrize("cap", [None, 30.0])
def test_a_query_that_sees_nothing_gives_zeros(cap: float | None) -> None:
    q, k, v = qkv(sq=5, sk=2)
    out = ops.torch_attention(q, k, v, logit_cap=cap)
    assert out[:, :3].eq(0).all()
    assert out[:, 3:].ne(0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_layout_bnsd_is_the_transpose(variant: str) -> None:
    options = vars(VARIANTS[variant])
    q, k, v = qkv(sq=3, sk=6)
    bnsd = ops.torch_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options, layout="bnsd")
    assert torch.equal(bnsd.transpose(1, 2), ops.torch_attention(q, k, v, **options))
    with pytest.raises(ValueError, match="sbnd"):
        ops.torch_attention(q, k, v, layout="sbnd")


def test_long_queries_are_worked_off_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(sq=7, sk=9)
    sinks, mask = torch.randn(4), torch.randn(2, 4, 7, 9)
    whole = ops.torch_attention(q, k, v, mask, sinks=sinks, logit_cap=5.0)
    monkeypatch.setattr(source, "SCORES_AT_ONCE", 2 * 4 * 9 * 3)  # three rows at a time
    assert (
        relative_error(ops.torch_attention(q, k, v, mask, sinks=sinks, logit_cap=5.0), whole) < 1e-7
    )


def test_each_query_may_bring_sinks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(sq=7, sk=9)
    sinks = torch.randn(2, 7, 4)
    monkeypatch.setattr(source, "SCORES_AT_ONCE", 2 * 4 * 9 * 3)  # three rows at a time
    expected = attention(q, k, v, Options(sinks=sinks))
    assert relative_error(ops.torch_attention(q, k, v, sinks=sinks), expected) < 1e-6


def hf_mask(sq: int, sk: int) -> torch.Tensor:
    return torch.full((sq, sk), torch.finfo(torch.float32).min).triu(sk - sq + 1)[None, None]


def test_attention_is_that_of_hugging_face() -> None:
    q, k, v = qkv(sq=6, sk=9)
    module = LlamaAttention(
        LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), 0
    ).eval()
    bnsd = [t.transpose(1, 2) for t in (q, k, v)]
    expected, _ = eager_attention_forward(module, *bnsd, hf_mask(6, 9), scaling=0.3)
    assert relative_error(ops.torch_attention(q, k, v, scale=0.3), expected) < 1e-6
    module.sinks = torch.randn(4)
    expected, _ = gpt_oss_attention(module, *bnsd, hf_mask(6, 9), scaling=0.3)
    assert (
        relative_error(ops.torch_attention(q, k, v, scale=0.3, sinks=module.sinks), expected) < 1e-6
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_low_precision_keeps_its_dtype(dtype: torch.dtype, cap: float | None) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    actual = ops.torch_attention(q, k, v, logit_cap=cap)
    assert actual.dtype == dtype
    assert relative_error(actual, attention(q, k, v, Options(logit_cap=cap))) < 1e-2


def test_dropout_drops_weights() -> None:
    q, k, v = qkv()
    assert ops.torch_attention(q, k, v, dropout_p=1.0, logit_cap=9.0).eq(0).all()
    assert ops.torch_attention(q, k, v, dropout_p=1.0).eq(0).all()


def test_sdpa_and_repeat_kv_are_those_of_pytorch_and_hugging_face() -> None:
    q, k, v = (t.transpose(1, 2) for t in qkv(sq=3, sk=5))
    for kwargs in (
        {"is_causal": True},
        {"attn_mask": torch.rand(2, 1, 3, 5) < 0.8},
        {"scale": 0.2},
    ):
        expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)
        assert torch.equal(ops.torch_attention_sdpa(q, k, v, enable_gqa=True, **kwargs), expected)
    for times in (1, 3):
        assert torch.equal(ops.torch_attention_repeat_kv(k, times), repeat_kv(k, times))


class Attends(torch.nn.Module):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        return ops.torch_attention(q, k, v, sinks=sinks, sliding_window=3) + ops.torch_attention(
            q, k, v
        )


def test_export_has_one_node_an_attention_and_dynamic_batch_and_sequence() -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = {name: {0: batch, 1: length} for name in "qkv"} | {"sinks": None}
    sinks = torch.randn(4)
    program = torch.export.export(Attends(), (*qkv(), sinks), dynamic_shapes=shapes)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(ops.torch_attention.default) == 2
    other = (*qkv(3, 11, 11), sinks)
    assert torch.equal(program.module()(*other), Attends()(*other))


@pytest.mark.parametrize("layout", ["bsnd", "bnsd"])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_registration_is_sound(layout: str, cap: float | None) -> None:
    args = qkv(value_dim=6) if layout == "bsnd" else tuple(t.transpose(1, 2) for t in qkv())
    torch.library.opcheck(ops.torch_attention.default, args, {"logit_cap": cap, "layout": layout})
    torch.library.opcheck(ops.torch_attention_repeat_kv.default, (args[1], 1))


def test_canonical_ops_are_what_model_files_may_use() -> None:
    names = onboard.ops.canonical_ops()
    assert {
        "torch_attention",
        "torch_rmsnorm",
        "torch_linear_simple",
        "torch_rope_with_complex_freqs",
    } <= names
    assert not {
        name
        for name in names
        if "cached" in name or "fused" in name or not name.startswith("torch_")
    } - {"all_reduce", "split_with_sizes", "view"}
    assert all(hasattr(ops, name) for name in names)


@pytest.mark.parametrize(
    "added", [{"alibi_slopes": torch.zeros(4)}, {"sinks": torch.tensor([-300.0, 0, 10, 300])}]
)
def test_large_scores_and_sinks_do_not_overflow(added: dict[str, torch.Tensor]) -> None:
    q, k, v = qkv(value_dim=6)
    options = Options(scale=100.0, **added)
    actual = ops.torch_attention(q, k, v, **vars(options))
    # Scores of some hundreds, rounded
    assert relative_error(actual, attention(q, k, v, options)) < 1e-4


def test_a_sink_beyond_every_score_takes_all() -> None:
    assert ops.torch_attention(*qkv(), sinks=torch.full((4,), 300.0)).eq(0).all()
