"""Loops that are canonical ops are found by what they compute, those that are not quite are not."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from onboard.analysis.recognise.scans.scan_loops import match_loop
from onboard.analysis.recognise.scans.watch import LoopCall, loops_of, loops_watched


class _Fading(nn.Module):
    """Lightning attention, token by token, heads first; `twist` makes it something else."""

    def __init__(self, twist: float = 0.0) -> None:
        super().__init__()
        self.rates = nn.Buffer(torch.tensor([0.1, 0.9, 0.0])[:, None, None])
        self.twist = twist

    def forward(self, x: Tensor) -> Tensor:
        other, value, query = (x.tanh(), x.flip(1), x * x)
        state, pieces = torch.zeros(x.shape[0], 3, x.shape[3], x.shape[3]), []
        for i in range(x.shape[2]):
            key = other[:, :, i : i + 1]
            state = (-self.rates).exp() * state + key.transpose(-1, -2) @ value[:, :, i : i + 1]
            pieces.append((query[:, :, i : i + 1] + self.twist) @ state)
        return torch.cat(pieces, dim=2)


class _Leaking(nn.Module):
    """The linear recurrence, with a first state that may not be zero."""

    def __init__(self, first: float = 0.0) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 0:
            return self.scan(x, x.sigmoid())
        return x

    def scan(self, x: Tensor, kept: Tensor) -> Tensor:
        state, out = torch.full_like(x[:, 0], self.first), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = kept[:, i] * state + x[:, i]
            out[:, i] = state
        return out


class _Bounded(nn.Module):
    """The linear recurrence, and what it does in some turns, or with some values, alone."""

    def __init__(self, rare: str) -> None:
        super().__init__()
        self.rare, self.every = rare, 300

    def forward(self, x: Tensor) -> Tensor:
        return _WAYS[self.rare](self, x)

    def plain(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = kept[:, i] * (torch.zeros_like(state) if i == 0 else state) + x[:, i]
            out[:, i] = state
        return out

    def clamped(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = (kept[:, i] * state + x[:, i]).clamp(max=1e3)
            out[:, i] = state
        return out

    def chosen(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = kept[:, i] * state + x[:, i]
            state = torch.where(state > 1e3, state / 2, state)
            out[:, i] = state
        return out

    def asked(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for i in range(x.shape[1]):
            state = kept[:, i] * state + x[:, i]
            if state.abs().amax() > 1e3:
                state = state / 2
            out[:, i] = state
        return out

    def counted(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for i in range(x.shape[1]):
            if i % self.every == self.every - 1:
                state = torch.zeros_like(state)
            state = kept[:, i] * state + x[:, i]
            out[:, i] = state
        return out

    def chunks(self, x: Tensor) -> Tensor:
        kept, out = x.sigmoid(), torch.zeros_like(x)
        for first in range(0, x.shape[1], self.every):
            state = torch.zeros_like(x[:, 0])
            for i in range(first, min(first + self.every, x.shape[1])):
                state = kept[:, i] * state + x[:, i]
                out[:, i] = state
        return out

    def copied(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)  # a decay that keeps nothing, if it were an argument
        for i in range(x.shape[1]):
            out[:, i] = x[:, i] + 0.0
        return out

    def channels(self, x: Tensor) -> Tensor:
        kept, state, out = x.sigmoid(), torch.zeros_like(x[..., 0]), torch.zeros_like(x)
        for i in range(x.shape[-1]):
            state = kept[..., i] * state + x[..., i]
            out[..., i] = state
        return out


_WAYS = {
    name: getattr(_Bounded, name)
    for name in ("plain", "clamped", "chosen", "asked", "counted", "chunks", "copied", "channels")
}


class _Selecting(nn.Module):
    """Mamba's selective scan with its discretisation before the loop, channels first; `twist`
    makes it something else.
    """

    def __init__(self, twist: float = 0.0) -> None:
        super().__init__()
        self.rates, self.twist = nn.Buffer(torch.rand(4, 3)), twist

    def forward(self, x: Tensor) -> Tensor:
        u = x.transpose(1, 2)
        B, C = x.tanh()[..., :3], x.flip(1)[..., 1:]
        steps = nn.functional.softplus(x.flip(2)).transpose(1, 2)
        A = -(self.rates + 0.1)
        kept = (A[None, :, None] * steps[..., None]).exp()
        added = steps[..., None] * B[:, None] * u[..., None]
        state, pieces = torch.full((len(x), 4, 3), self.twist), []
        for i in range(x.shape[1]):
            state = kept[:, :, i] * state + added[:, :, i]
            pieces.append((state @ C[:, i, :, None])[:, :, 0])
        return torch.stack(pieces, dim=-1)


class _Correcting(nn.Module):
    """The delta rule, heads first, gated or not; `twist` makes it something else."""

    def __init__(self, *, gated: bool, twist: float = 0.0) -> None:
        super().__init__()
        self.gated, self.twist = gated, twist

    def forward(self, x: Tensor) -> Tensor:
        key, query = (nn.functional.normalize(each, dim=-1) for each in (x.tanh(), x.flip(1)))
        value, rate = x[..., 1:] * 2, x[..., 0].sigmoid()
        decay = -x[..., 1].exp() if self.gated else None
        state, out = torch.zeros(*x.shape[:2], 5, 4), torch.zeros_like(value)
        for i in range(x.shape[2]):
            k = key[:, :, i, :, None]
            state = state if decay is None else state * decay[:, :, i, None, None].exp()
            found = (state * k).sum(dim=-2)
            added = (value[:, :, i] - found) * (rate[:, :, i, None] + self.twist)
            state = state + k * added[:, :, None]
            out[:, :, i] = (state * query[:, :, i, :, None]).sum(dim=-2)
        return out


def _watched(model: nn.Module, *inputs: Tensor) -> list[LoopCall]:
    calls: list[LoopCall] = []
    before = sys.gettrace()
    for each in inputs:
        with loops_watched(model, calls, each.shape[1] if each.dim() == 3 else None):
            model(each)
    assert sys.gettrace() is before
    return calls


def test_a_loop_of_matrix_states_is_lightning_attention() -> None:
    calls = _watched(nn.Sequential(_Fading()), torch.randn(2, 3, 9, 4), torch.randn(1, 3, 1, 4))
    assert [(call.loop.class_name, call.loop.method, call.loop.index) for call in calls] == 2 * [
        ("_Fading", "forward", 0)
    ]
    match = match_loop(calls)
    assert match is not None
    assert (match.op, match.turned, match.result, match.joined) == (
        "torch_lightning_attention",
        ("query", "other", "value", "pieces"),
        "pieces",
        2,
    )
    assert match.arguments == ("query", "other", "value", "self.rates")


def test_a_loop_of_a_method_is_the_linear_recurrence() -> None:
    match = match_loop(_watched(_Leaking(), torch.randn(2, 9, 4), torch.randn(2, 30, 4)))
    assert match is not None
    assert (match.op, match.arguments, match.result) == (
        "torch_linear_recurrence",
        ("x", "kept"),
        "out",
    )


def test_a_loop_of_discretised_steps_is_the_selective_scan() -> None:
    match = match_loop(_watched(_Selecting(), torch.randn(2, 9, 4), torch.randn(1, 5, 4)))
    assert match is not None
    assert match.op == "torch_selective_scan"
    assert match.arguments in (("x", "steps", "A", "B", "C"), ("u", "steps", "A", "B", "C"))
    assert ("steps" in match.turned, "x" in match.turned) == (True, False)
    assert (match.result, match.joined, match.stacked) == ("pieces", 1, True)


@pytest.mark.parametrize("gated", [True, False])
def test_a_loop_that_corrects_what_it_keeps_is_the_delta_rule(gated: bool) -> None:
    calls = _watched(_Correcting(gated=gated), torch.randn(2, 3, 9, 5), torch.randn(1, 3, 1, 5))
    match = match_loop(calls)
    assert match is not None
    gates = ("decay",) if gated else ()
    assert match.op == ("torch_gated_delta_rule" if gated else "torch_delta_rule")
    assert match.arguments == ("query", "key", "value", *gates, "rate")
    assert match.turned == (*match.arguments, "out")
    assert (match.result, match.joined) == ("out", None)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (_Correcting(gated=True, twist=1e-2), (2, 3, 9, 5)),
        (_Fading(twist=1e-3), (2, 3, 9, 4)),
        (_Leaking(first=1e-2), (2, 9, 4)),
        (_Selecting(twist=1e-2), (2, 9, 4)),
    ],
    ids=["rate", "query", "state", "selected"],
)
def test_what_is_almost_an_op_is_none(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert match_loop(_watched(model, torch.randn(*shape))) is None


def test_one_call_that_differs_is_enough() -> None:
    model = _Leaking()
    calls = _watched(model, torch.randn(2, 9, 4))
    model.first = 1.0
    assert match_loop([*calls, *_watched(model, torch.randn(2, 9, 4))]) is None


@pytest.mark.parametrize("rare", list(_WAYS))
def test_a_loop_with_rare_turns_or_values_of_its_own_is_no_op(rare: str) -> None:
    """A probe of some tokens of common size never comes to them."""
    calls = _watched(_Bounded(rare), torch.randn(2, 9, 4), torch.randn(2, 30, 4))
    match = match_loop(calls)
    assert (match is not None) is (rare == "plain")


def test_loops_are_the_outermost_ones_over_ranges() -> None:
    assert [node.lineno for node in loops_of(_Leaking, "scan")]
    assert not loops_of(_Leaking, "forward")
