"""Attention found by what it computes: ways to write it, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from onboard.codegen.cores.double_runs import DoubleRuns, inputs_of
from onboard.codegen.cores.replace import CoreFinding, replace_attention

HEADS, DIM = 4, 6
LOW = torch.finfo(torch.float32).min
Way = Callable[..., Any]


def made(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a factory of tensors with sizes that the tracer has as nodes."""
    proxies: list[fx.Proxy] = []
    fx.node.map_aggregate(
        (args, kwargs), lambda x: proxies.append(x) if isinstance(x, fx.Proxy) else x
    )
    return proxies[0].tracer.create_proxy("call_function", function, args, kwargs)


class Block(nn.Module):
    """Queries, keys and values of some heads, and a way to attend."""

    def __init__(self, way: Way, key_heads: int = HEADS) -> None:
        super().__init__()
        self.way, self.key_heads = way, key_heads
        self.queries = nn.Linear(24, HEADS * DIM)
        self.keys = nn.Linear(24, key_heads * DIM)
        self.values = nn.Linear(24, key_heads * DIM)
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        self.register_buffer("slopes", slopes)
        self.register_buffer("sinks", torch.tensor([0.5, -1.0, 2.0, 0.0]))
        self.one = nn.Parameter(torch.zeros(()))
        self.zeros = nn.Parameter(torch.zeros(HEADS, 64, 64))
        self.register_buffer("seen", torch.tril(torch.ones(64, 64, dtype=torch.bool)))
        self.register_buffer("ones", torch.tril(torch.ones(1, 1, 64, 64)))

    def forward(self, x: Tensor, *inputs: Tensor) -> Any:
        b, t = x.shape[0], x.shape[1]
        q = self.queries(x).view(b, t, HEADS, DIM).transpose(1, 2)
        k = self.keys(x).view(b, t, self.key_heads, DIM).transpose(1, 2)
        v = self.values(x).view(b, t, self.key_heads, DIM).transpose(1, 2)
        return self.way(self, q, k, v, x, *inputs)


class OneInput(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, mask)


class NoInput(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


def samples(mask: Callable[[int, int], Tensor] | None, longest: int = 4200) -> Any:
    def inputs(batch: int, length: int) -> Sequence[Any] | None:
        if length > longest:
            return None
        x = torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(length))
        return (x,) if mask is None else (x, mask(batch, length))

    return inputs


def replaced(
    way: Way, key_heads: int = HEADS, mask: Any = None, longest: int = 4200
) -> tuple[fx.GraphModule, list[CoreFinding]]:
    """Trace a way, replace attention in it, and compare with the original in float64 at other
    lengths.
    """
    torch.manual_seed(0)
    block = (NoInput if mask is None else OneInput)(way, key_heads)
    before, gm = traced(block), traced(block)
    given = samples(mask, longest)
    found = replace_attention(gm, given)
    for dims in ((2, 1), (1, 5), (3, 19), (2, 40)):
        inputs = given(*dims)
        torch.testing.assert_close(
            in_double(gm, inputs), in_double(before, inputs), rtol=1e-9, atol=1e-9
        )
    return gm, found


class Leaves(fx.Tracer):
    """Buffers are nodes, too."""

    proxy_buffer_attributes = True
    param_shapes_constant = False


def traced(block: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(block, Leaves().trace(block))


def in_double(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    *nodes, output = gm.graph.nodes
    values = DoubleRuns(gm, other_weights=False).run(nodes, inputs_of(gm, inputs))
    return fx.node.map_arg(output.args[0], values.__getitem__)


def joined(o: Tensor) -> Tensor:
    return o.transpose(1, 2).flatten(2)


def causal(t: Any) -> Any:
    return made(torch.ones, t, t, dtype=torch.bool).tril()


def positions(t: Any) -> Any:
    return made(torch.arange, t)


def masked(s: Any) -> Any:
    return s.masked_fill(~causal(s.shape[-1]), float("-inf"))


def four_dims(batch: int, length: int) -> Tensor:
    return torch.full((batch, 1, length, length), LOW).triu(1)


WAYS: dict[str, tuple[Way, dict[str, Any], dict[str, Any]]] = {}
"""Name: a way, how it is traced, and the settings that must be found."""


def way(found: dict[str, Any] | None = None, **options: Any) -> Callable[[Way], Way]:
    def add(function: Way) -> Way:
        WAYS[function.__name__] = function, options, found or {}
        return function

    return add


@way({"scale": DIM**-0.5})
def handed_mask(m: Any, q: Any, k: Any, v: Any, x: Any, mask: Any) -> Any:
    s = q @ k.transpose(2, 3) * DIM**-0.5 + mask
    w = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
    return joined(w @ v), w


WAYS["handed_mask"][1]["mask"] = four_dims


@way()
def added_product(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    """baddbmm with alpha and beta on heads in the batch, ALiBi handed as bias."""
    b, t = x.shape[0], x.shape[1]
    bias = (m.slopes[:, None] * positions(t))[None].expand(b, -1, -1).reshape(b * HEADS, 1, t)
    flat = [each.reshape(b * HEADS, t, DIM) for each in (q, k, v)]
    s = bias.baddbmm(flat[0], flat[1].transpose(1, 2), beta=1.0, alpha=1 / math.sqrt(DIM))
    w = masked(s.view(b, HEADS, t, t)).softmax(-1).view(b * HEADS, t, t)
    return torch.bmm(w, flat[2]).view(b, HEADS, t, DIM).transpose(1, 2).reshape(b, t, 24)


@way(key_heads=1)
def one_key_head(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    k, v = k.squeeze(1), v.squeeze(1)
    s = torch.einsum("bhid,bjd->bhij", q * DIM**-0.5, k)
    return joined(torch.einsum("bhij,bjd->bhid", masked(s).softmax(-1), v))


@way()
def mask_by_cumsum(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = made(torch.ones, x.shape[1]).cumsum(0) - 1
    s = (q @ k.mT) / math.sqrt(DIM)
    return joined(torch.where(p[None] > p[:, None], LOW, s).softmax(-1) @ v)


@way()
def alibi_of_the_mask(m: Any, q: Any, k: Any, v: Any, x: Any, mask: Any) -> Any:
    a = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
    bias = (m.slopes[..., None] * a)[:, :, None]
    return joined(masked(q @ k.transpose(-1, -2) / math.sqrt(DIM) + bias).softmax(-1) @ v)


WAYS["alibi_of_the_mask"][1]["mask"] = lambda batch, length: torch.ones(batch, length)


@way()
def bounded_behind_the_mask(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = masked(q @ k.transpose(2, 3) * DIM**-0.5)
    s = torch.clamp(s, min=LOW)
    return joined(s.softmax(-1) @ v)


@way(longest=64)
def multiplied_mask(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    t = x.shape[1]
    seen = m.ones[:, :, :t, :t]
    s = q @ k.transpose(2, 3) / DIM**0.5
    return joined((s * seen - 1e4 * (1 - seen)).softmax(-1) @ v)


@way()
def less_the_largest(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = masked(q @ k.transpose(2, 3) * 0.125).float()
    e = (s - s.amax(-1, keepdim=True)).exp()
    return joined((e / e.sum(-1, keepdim=True)).to(v.dtype) @ v)


@way()
def divided_at_last(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    e = torch.exp(q @ k.transpose(2, 3) * DIM**-0.5) * causal(x.shape[1])
    return joined((e @ v) / e.sum(-1, keepdim=True))


@way()
def positions_before_heads(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    q, k, v = (each.permute(2, 0, 1, 3) for each in (q, k, v))
    s = torch.einsum("ibhd,jbhd->bhij", q, k) / math.sqrt(DIM)
    o = torch.einsum("bhij,jbhd->ibhd", masked(s).softmax(-1), v)
    return o.reshape(x.shape[1], x.shape[0], 24).transpose(0, 1)


@way()
def keys_turned_early(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    k = k.permute(0, 1, 3, 2).contiguous()
    return joined(masked(torch.matmul(q * (1 / DIM), k)).softmax(dim=-1).matmul(v))


def repeated(k: Any, n: int) -> Any:
    b, h, t, d = k.shape[0], k.shape[1], k.shape[2], k.shape[3]
    return k[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)


@way(key_heads=2)
def repeated_by_expansion(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = q @ repeated(k, 2).transpose(2, 3) * DIM**-0.5
    return joined(masked(s).softmax(-1) @ repeated(v, 2))


@way(key_heads=2)
def repeated_by_index(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    k, v = k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]
    return joined(masked(q @ k.transpose(2, 3) * DIM**-0.5).softmax(-1) @ v)


@way(key_heads=2)
def interleaved_heads(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    return joined(masked(q @ k.transpose(2, 3) * DIM**-0.5).softmax(-1) @ v)


@way(key_heads=2)
def grouped_queries(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    b, t = x.shape[0], x.shape[1]
    s = torch.einsum("bkgid,bkjd->bkgij", q.view(b, 2, 2, t, DIM), k) * DIM**-0.5
    o = torch.einsum("bkgij,bkjd->bikgd", masked(s).softmax(-1), v)
    return o.reshape(b, t, 24)


@way()
def torchs_function(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@way({"sliding_window": 9}, key_heads=2)
def torchs_function_in_a_window(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    d = positions(x.shape[1])[:, None] - positions(x.shape[1])[None]
    seen = (d >= 0) & (d < 9)
    return joined(F.scaled_dot_product_attention(q, k, v, seen, scale=0.3, enable_gqa=True))


@way({"sliding_window": 301})
def wide_window(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    d = positions(x.shape[1])[:, None] - positions(x.shape[1])[None]
    s = (q @ k.transpose(2, 3)).masked_fill((d < 0) | (d > 300), LOW)
    return joined(s.softmax(-1) @ v)


@way({"chunk_size": 16})
def chunks(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    seen = (p[:, None] >= p) & (p[:, None] // 16 == p // 16)
    s = q @ k.transpose(2, 3) * DIM**-0.5
    return joined(torch.where(seen, s, float("-inf")).softmax(-1) @ v)


@way({"logit_cap": 30.0})
def soft_cap(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = 30.0 * torch.tanh(q @ k.transpose(2, 3) * DIM**-0.5 / 30.0)
    return joined(masked(s).softmax(-1) @ v)


@way()
def alibi_of_distances(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    bias = -(p[:, None] - p).abs() * m.slopes.view(-1, 1, 1)
    return joined(masked((q @ k.transpose(2, 3) + bias) / math.sqrt(DIM)).softmax(-1) @ v)


@way()
def sinks(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = masked(q @ k.transpose(2, 3) * DIM**-0.5)
    extra = m.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
    w = torch.cat([s, extra], dim=-1).softmax(-1)
    return joined(w[..., :-1] @ v)


@way()
def one_in_the_denominator(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = masked(q @ k.transpose(2, 3) * DIM**-0.5)
    most = s.amax(-1, keepdim=True).clamp(min=0)
    e = (s - most).exp()
    return joined((e / ((-most).exp() + e.sum(-1, keepdim=True))) @ v)


@way()
def sums_of_products(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) * DIM**-0.5
    return joined((masked(s).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3))


@way(key_heads=1)
def queries_as_rows(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    b, t = x.shape[0], x.shape[1]
    rows = joined(q).reshape(b, t * HEADS, DIM)
    s = (rows @ k.squeeze(1).transpose(1, 2)).view(b, t, HEADS, t) * DIM**-0.5
    s = torch.where(causal(t).unsqueeze(1), s, LOW)
    w = s.softmax(-1).view(b, t * HEADS, t)
    return (w @ v.squeeze(1)).view(b, t, 24)


@way({"scale": 1.0})
def learned_scale(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(q @ k.transpose(2, 3) / DIM * m.one.exp()).softmax(-1) @ v)


@way(longest=64)
def kept_mask(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    t = x.shape[1]
    return joined(s.masked_fill(m.seen[:t, :t] == 0, -1e9).softmax(-1) @ v)


@pytest.mark.parametrize("name", WAYS)
def test_attention_is_found_however_it_is_written(name: str) -> None:
    function, options, expected = WAYS[name]
    gm, found = replaced(function, **options)
    assert [each.reason for each in found] == [""]
    assert expected.items() <= found[0].settings.items()
    ops = [node for node in gm.graph.nodes if "torch_attention" in str(node.target)]
    assert len(ops) == 1
    assert "softmax" not in gm.code or name == "handed_mask"


FOOLING: dict[str, tuple[Way, dict[str, Any], str]] = {}
"""Name: what looks like attention, how it is traced, and a word of the reason."""


def fooling(reason: str, **options: Any) -> Callable[[Way], Way]:
    def add(function: Way) -> Way:
        FOOLING[function.__name__] = function, options, reason
        return function

    return add


def scores(q: Any, k: Any) -> Any:
    return q @ k.transpose(2, 3) * DIM**-0.5


@fooling("depends on the tokens")
def bias_of_tokens(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined((masked(scores(q, k)) + 0 * x.mean(-1)[:, None, None]).softmax(-1) @ v)


@fooling("scale")
def scale_of_length(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    q = q * made(math.log, x.shape[1] + 1)
    return joined(masked(scores(q, k)).softmax(-1) @ v)


@fooling("canonical op")
def scale_of_long_texts(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(scores(q, k) * made(max, x.shape[1], 50) / 50).softmax(-1) @ v)


@fooling("later tokens")
def first_sees_all(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    seen = (p[:, None] >= p) | (p[:, None] == 0)
    return joined(torch.where(seen, scores(q, k), LOW).softmax(-1) @ v)


@fooling("canonical op")
def last_of_long_sees_all(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    seen = (p[:, None] >= p) | (p[:, None] == 500)
    return joined(torch.where(seen, scores(q, k), LOW).softmax(-1) @ v)


@fooling("")
def softmax_over_queries(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(scores(q, k)).softmax(-2) @ v)


@fooling("")
def every_other_key(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    d = p[:, None] - p
    return joined(torch.where((d >= 0) & (d % 2 == 0), scores(q, k), LOW).softmax(-1) @ v)


@fooling("")
def values_by_position(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    w = masked(scores(q, k)).softmax(-1)
    return joined((w * (positions(x.shape[1]) + 1.0)) @ v)


@fooling("canonical op")
def largest_scores(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = masked(scores(q, k))
    least = s.topk(made(min, 40, x.shape[1]), dim=-1)[0][..., -1:]
    return joined(s.masked_fill(s < least, LOW).softmax(-1) @ v)


@fooling("canonical op")
def bound_of_large_scores(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(scores(q, k).clamp(-50, 50)).softmax(-1) @ v)


@fooling("canonical op")
def bound_of_huge_scores(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(scores(q, k).clamp(-5e4, 5e4)).softmax(-1) @ v)


@fooling("decides")
def bound_of_small_parts(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = (scores(q, k) / 1e5).clamp(-3, 3) * 1e5
    return joined(masked(s).softmax(-1) @ v)


@fooling("decides")
def window_in_small_parts(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1]) * 0.01
    return joined(masked(torch.where(p[:, None] - p < 3.0, scores(q, k), LOW)).softmax(-1) @ v)


@fooling("6000")
def window_too_long(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    return joined(masked(torch.where(p[:, None] - p < 6000, scores(q, k), LOW)).softmax(-1) @ v)


@fooling("90", longest=64)
def window_beyond_all_texts(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    return joined(masked(torch.where(p[:, None] - p < 90, scores(q, k), LOW)).softmax(-1) @ v)


@fooling("differs between")
def one_text_of_a_batch(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    row = positions(x.shape[0])[:, None, None, None]
    s = masked(scores(q, k)) + row * positions(x.shape[1])
    return joined(s.softmax(-1) @ v)


@fooling("distance")
def bias_by_square(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    p = positions(x.shape[1])
    return joined(masked(scores(q, k) - (p[:, None] - p) ** 2).softmax(-1) @ v)


@fooling("slopes")
def slopes_of_nothing(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    h = 2.0 ** -(positions(HEADS * (x.shape[1] // x.shape[1]) * 2)[::2] + 1)
    bias = h.view(-1, 1, 1) * positions(x.shape[1])
    return joined(masked(scores(q, k) + bias * 1.5).softmax(-1) @ v)


@fooling("")
def dropped_weights(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(F.dropout(masked(scores(q, k)).softmax(-1), 0.1, True) @ v)


@fooling("")
def mixed_heads(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    w = masked(scores(q, k)).softmax(-1)
    return joined((w + w.roll(1, 1) * 0.01) @ v)


@fooling("")
def rectified(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(masked(scores(q, k).relu()).softmax(-1) @ v)


@fooling("")
def learned_bias(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    t = x.shape[1]
    return joined(masked(scores(q, k) + m.zeros[:, :t, :t]).softmax(-1) @ v)


@fooling("no numbers")
def zero_is_masked(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    s = scores(q, k).tril()
    return joined(s.masked_fill(s == 0, float("-inf")).softmax(-1) @ v)


@fooling("later tokens")
def all_see_all(m: Any, q: Any, k: Any, v: Any, x: Any) -> Any:
    return joined(scores(q, k).softmax(-1) @ v)


@pytest.mark.parametrize("name", FOOLING)
def test_what_is_something_else_stays(name: str) -> None:
    function, options, reason = FOOLING[name]
    torch.manual_seed(0)
    gm = traced(NoInput(function))
    before = gm.code
    found = replace_attention(gm, samples(None, **options))
    assert [each.replaced for each in found] == [False]
    assert reason in found[0].reason
    assert "torch_attention" not in gm.code
    assert gm.code == before
