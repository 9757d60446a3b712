"""What mixes the tokens of a row outside of the canonical ops is found, however it is written, and
nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim

import onboard.ops  # noqa: F401
from onboard.graph.cache_init.token_mixing import _close, token_mixing
from onboard.graph.export.to_graph import export_to_graph

ops: Any = torch.ops.onboard
WIDTH = 6
Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Inner(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        # Small, as a fresh model's may be
        self.weight = nn.Parameter(1e-6 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return self.body(x, position_ids, self.weight)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.inner = Inner(body)
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(input_ids), position_ids))


def exported(model: nn.Module, device: str = "cpu") -> fx.GraphModule:
    model.eval().requires_grad_(False)
    ids = torch.zeros(2, 7, dtype=torch.int64, device=device)
    dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = {"input_ids": dynamic, "position_ids": dynamic}
    return export_to_graph(
        model, {"input_ids": ids, "position_ids": ids}, shapes, torch.device("cpu")
    )


def conv(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    kernel = weight[:, None, :2]
    return F.conv1d(F.pad(x.transpose(1, 2), (1, 0)), kernel, groups=WIDTH).transpose(1, 2) + x


def shift(x: Tensor, *_: Tensor) -> Tensor:
    return x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)


def shift_back(x: Tensor, *_: Tensor) -> Tensor:
    return x + torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), dim=1)


def counted(x: Tensor, *_: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1], device=x.device)[None, :, None]


def chosen(x: Tensor, *_: Tensor) -> Tensor:
    return x.gather(1, x.topk(1, dim=1).indices.expand_as(x))


def plain_attention(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x @ weight, x.transpose(1, 2)).softmax(-1), x)


def small_share(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    return x + x.mean(dim=1, keepdim=True) * weight[0]


MIXING: dict[str, tuple[Body, str]] = {
    "conv": (conv, "pad"),
    "shift": (shift, "slice"),
    "shift back": (shift_back, "slice"),
    "roll": (lambda x, *_: x.roll(1, dims=1), "roll"),
    "cumsum": (lambda x, *_: x.cumsum(1), "cumsum"),
    "mean": (small_share, "mean"),
    "maximum": (lambda x, *_: x - x.amax(dim=(1, 2), keepdim=True), "amax"),
    "softmax": (lambda x, *_: x.softmax(1), "softmax"),
    "sort": (lambda x, *_: x.sort(dim=1).values, "sort"),
    "flip": (lambda x, *_: x.flip(1), "flip"),
    "chosen": (chosen, "topk"),
    "attention": (plain_attention, "softmax"),
    "counted": (counted, "arange"),
    "last": (lambda x, *_: x * x[:, -1:], "select|slice"),
    "one row": (lambda x, *_: x.reshape(1, -1, WIDTH).cumsum(1).view_as(x), "cumsum"),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_found_and_named(name: str) -> None:
    body, op = MIXING[name]
    found = token_mixing(exported(Model(body)), torch.device("cpu"))
    assert found is not None
    target, _, path = str(found).partition(" in ")
    assert any(word in target for word in op.split("|")), found
    assert path == "inner"


def routed(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    """Tokens sorted by their expert, as grouped products want them, and back."""
    rows = x.reshape(-1, WIDTH)
    order = (rows @ weight).argmax(-1).argsort()
    out = torch.zeros_like(rows).index_add(0, order, rows[order].sin())
    return out.view_as(x)


def positions(x: Tensor, position_ids: Tensor, weight: Tensor) -> Tensor:
    return x + position_ids[..., None] + (torch.arange(WIDTH) * weight[0])


def canonical(x: Tensor, position_ids: Tensor, weight: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3))
    out = ops.torch_attention(heads, heads, heads, None, 0.0, True, 0.5)
    return (out.flatten(2) * weight[0]).softmax(-1) + x.transpose(1, 2).square().transpose(1, 2)


def topk(x: Tensor, _: Tensor, weight: Tensor) -> Tensor:
    scores = (x @ weight).sigmoid()
    best, chosen = scores.view(-1, WIDTH).topk(2, dim=-1)
    mask = torch.zeros_like(scores.view(-1, WIDTH)).scatter(
        1, chosen, best / best.sum(-1, keepdim=True)
    )
    return mask.view_as(x) * x


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("body", "dtype"),
    [(routed, FLOAT), (positions, FLOAT), (canonical, FLOAT), (topk, FLOAT), (canonical, HALF)],
)
def test_what_keeps_tokens_apart_passes(body: Body, dtype: torch.dtype) -> None:
    model = Model(body).to(dtype)
    assert token_mixing(exported(model), torch.device("cpu")) is None


LATE = torch.clamp((torch.arange(512) + 1) / 128, min=1.0)
"""Factors that are 1 for the first tokens."""


class Tabled(nn.Module):
    """A model with a table of numbers and one of factors, which both begin with equal ones."""

    def __init__(self, at: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.late = nn.Embedding(6, WIDTH)
        self.register_buffer("factors", LATE)
        self.register_buffer("numbers", torch.arange(512) // 100)
        self.at = at

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.at(self, self.embed(input_ids), position_ids)


def _late_count(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return x * torch.clamp(torch.arange(1, x.shape[1] + 1) / 128, min=1.0)[:, None]


def _late_sum(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    counted = torch.ones(x.shape[1], dtype=torch.int64).cumsum(0)
    return torch.where((counted > 100)[:, None], x * 2, x)


@pytest.mark.parametrize(
    "at",
    [
        lambda model, x, _: x * model.factors[: x.shape[1], None],
        lambda model, x, _: x + model.late(model.numbers[: x.shape[1]]),
        _late_count,
        _late_sum,
    ],
    ids=["factors", "numbers", "count", "sum"],
)
def test_a_table_read_by_the_place_in_the_row_is_found_where_its_first_rows_are_equal(
    at: Any,
) -> None:
    assert token_mixing(exported(Tabled(at)), torch.device("cpu")) is not None


@pytest.mark.parametrize(
    "at",
    [
        lambda model, x, positions: x * model.factors[positions][..., None],
        lambda model, x, positions: x + model.late(model.numbers[positions]),
        lambda model, x, _: x[:, torch.arange(x.shape[1])],
    ],
    ids=["factors", "numbers", "picked"],
)
def test_a_table_read_by_positions_keeps_tokens_apart(at: Any) -> None:
    assert token_mixing(exported(Tabled(at)), torch.device("cpu")) is None


def test_weights_need_not_be_loaded() -> None:
    with torch.device("meta"):
        gm = exported(Model(conv), "meta")
    assert "pad" in str(token_mixing(gm, torch.device("cpu")))


class Experts(nn.Module):
    """A stack of matrices that would take terabytes, of which a canonical op reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(shift)
        self.stack = nn.Parameter(torch.empty(1 << 36, WIDTH, WIDTH, device="meta"))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.inner.embed(input_ids)
        x = ops.torch_linear_simple(x, self.stack[5].mT, None)
        return self.inner.head(self.inner.inner(x, position_ids))


def test_what_is_made_of_weights_alone_has_no_values_where_only_canonical_ops_read_it() -> None:
    model = Experts()
    assert "slice" in str(token_mixing(exported(model, "meta"), torch.device("cpu")))


class Gathered(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.head = nn.Linear(WIDTH, 40)
        self.after = after

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_gather_indices: Tensor
    ) -> Tensor:
        hidden = self.embed(input_ids) + position_ids[..., None]
        return self.after(
            self.head(ops.gather_logits_before_lm_head(hidden[:1], logits_gather_indices))
        )


def test_the_weight_of_the_logits_is_not_made_up_and_mixing_after_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    rand = torch.rand
    monkeypatch.setattr(
        torch, "rand", lambda shape, **options: made.append(tuple(shape)) or rand(shape, **options)
    )
    for after, mixes in (
        (torch.tanh, False),
        (lambda logits: logits - logits.amax(1, keepdim=True), True),
    ):
        model = Gathered(after).eval().requires_grad_(False)
        ids, few = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        inputs = {"input_ids": ids, "position_ids": ids, "logits_gather_indices": few}
        shapes = {
            name: dict.fromkeys(range(value.dim()), Dim.DYNAMIC) for name, value in inputs.items()
        }
        gm = export_to_graph(model, inputs, shapes, torch.device("cpu"))
        assert (token_mixing(gm, torch.device("cpu")) is not None) == mixes
    assert (40, WIDTH) not in made


def test_rounding_is_no_mixing_where_most_values_are_zeros() -> None:
    """As of the experts of a mixture that compute for every token, and count for few."""
    values = torch.zeros(15, 40)
    values[3] = 10 * torch.randn(40)
    rounded = values * (1 + 3e-7)
    assert _close(values, rounded)
    assert _close(torch.zeros(4), torch.zeros(4))
    assert not _close(values, values.roll(1))
    assert not _close(values, values + 1e-2)
