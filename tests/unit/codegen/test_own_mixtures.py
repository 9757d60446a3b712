"""Mixtures that people write for themselves: however the experts lie and tokens are sent to them, the
model file has one op.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.analysis.blocks.spec_mixtures import MixtureParameters
from onboard.analysis.recognise.mixtures import probe_mixture
from onboard.analysis.recognise.recorder import ModuleCall
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

HEAD = """
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(config.size, config.inner),
            nn.ReLU(),
            nn.Linear(config.inner, config.size),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return self.net(x)


class Fused(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.both = nn.Linear(config.size, 2 * config.inner)
        self.last = nn.Linear(config.inner, config.size)

    def forward(self, x):
        value, gate = self.both(x).chunk(2, dim=-1)
        return self.last(F.silu(gate) * value)


class Normed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inward = nn.Linear(config.size, config.inner)
        self.outward = nn.Linear(config.inner, config.size)

    def forward(self, x):
        return self.outward(F.normalize(F.relu(self.inward(x)) ** 3, dim=-1))


class Wider(Normed):
    def __init__(self, config):
        super().__init__(config)
        self.outward = nn.Linear(config.inner, config.width)


class Scaled(Expert):
    def forward(self, x, share):
        return share * self.net(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.k, self.count = 2, config.experts
        self.gate = nn.Linear(config.size, config.experts, bias=False)
"""
IN_SEQUENCE = """
        self.experts = nn.ModuleList([
            nn.Sequential(
                nn.Linear(config.size, config.inner), nn.GELU(), nn.Linear(config.inner, config.size)
            )
            for _ in range(config.experts)
        ])

    def forward(self, x):
        values, chosen = torch.topk(self.gate(x), self.k, dim=-1)
        rows = x.reshape(-1, x.shape[-1])
        flat, gates = chosen.reshape(-1), torch.softmax(values, dim=-1).reshape(-1)
        tokens = torch.arange(rows.shape[0]).unsqueeze(1).expand(-1, self.k).reshape(-1)
        sent = rows[tokens]
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            selected = flat == number
            if selected.any():
                mixed.index_add_(0, tokens[selected], gates[selected, None] * expert(sent[selected]))
        mixed = mixed.view_as(x)
        return mixed
"""
OF_ALL = """
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        values, chosen = self.gate(x).topk(self.k, dim=-1)
        shares = torch.full_like(self.gate(x), float("-inf")).scatter(-1, chosen, values)
        shares = F.softmax(shares, dim=-1)
        y = torch.zeros_like(x)
        rows = x.view(-1, x.size(-1))
        of_rows = shares.view(-1, shares.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (chosen == i).any(dim=-1)
            flat = mask.view(-1)
            if flat.any():
                y[mask] += expert(rows[flat]) * of_rows[flat, i].unsqueeze(1)
        return y
"""
STACKED = """
        e, h, i = config.experts, config.size, config.inner
        self.first = nn.Parameter(torch.randn(e, i, h) / 3)
        self.up = nn.Parameter(torch.randn(e, i, h) / 3)
        self.last = nn.Parameter(torch.randn(e, h, i) / 3)
        self.shared = nn.Parameter(torch.randn(2, h, h) / 3)

    def one(self, x, first, up, last):
        return (F.silu(x @ first.T) * (x @ up.T)) @ last.T

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        out = torch.zeros(rows.shape[0], rows.shape[1])
        for e in range(2):
            out += rows @ self.shared[e]
        weights, chosen = torch.topk(F.softmax(self.gate(rows), dim=-1), self.k, dim=-1)
        flat, of_flat = chosen.view(-1), weights.view(-1)
        tokens = torch.arange(rows.shape[0]).unsqueeze(1).expand(-1, self.k).reshape(-1)
        order = flat.argsort(stable=True)
        tokens, of_flat = tokens[order], of_flat[order]
        counts = torch.bincount(flat[order], minlength=self.count).tolist()
        start = 0
        for e in range(self.count):
            if counts[e] == 0:
                continue
            end = start + counts[e]
            here = tokens[start:end]
            made = self.one(rows[here], self.first[e], self.up[e], self.last[e])
            out.index_add_(0, here, made * of_flat[start:end].unsqueeze(-1))
            start = end
        return out.view(x.shape)
"""
GATHERED = """
        e, h, i = config.experts, config.size, config.inner
        self.inward = nn.Parameter(torch.randn(e, h, i) / 3)
        self.outward = nn.Parameter(torch.randn(e, i, h) / 3)

    def forward(self, x):
        best, chosen = self.gate(x).topk(self.k, dim=-1)
        shares = F.softmax(best, dim=-1)
        h = F.gelu(torch.einsum("btd,edh->bteh", x, self.inward))
        y = torch.einsum("bteh,ehd->bted", h, self.outward)
        y = torch.gather(y, 2, chosen.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
        y = (y * shares.unsqueeze(-1)).sum(dim=2)
        return y
"""
FUSED = """
        self.experts = nn.ModuleList([Fused(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        shares, chosen = self.gate(rows).sigmoid().topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for n in range(rows.shape[0]):
            for place in range(self.k):
                expert = self.experts[chosen[n, place].item()]
                y[n] += shares[n, place] * expert(rows[n : n + 1])[0]
        return y.view_as(x)
"""
UNWEIGHTED = """
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        _, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), k=self.k, dim=-1)
        outs = torch.zeros_like(x)
        for number in range(self.count):
            mask = (chosen == number).any(dim=-1)
            if mask.any():
                outs[mask] += self.experts[number](x[mask])
        return outs
"""
OF_ANY_CLASS = """
        self.experts = nn.ModuleList([Normed(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.gate(rows).sigmoid().topk(self.k, dim=-1)
        y = rows * 0.5
        for number, expert in enumerate(self.experts):
            here, place = torch.where(chosen == number)
            if here.numel() == 0:
                continue
            y.index_add_(0, here, expert(rows[here]) * share[here, place, None])
        return y.view_as(x)
"""
OF_ANOTHER_WIDTH = """
        self.width = config.width
        self.experts = nn.ModuleList([Wider(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        share, chosen = self.gate(rows).sigmoid().topk(self.k, dim=-1)
        y = torch.zeros((rows.shape[0], self.width), dtype=rows.dtype, device=rows.device)
        for number, expert in enumerate(self.experts):
            here, place = torch.where(chosen == number)
            if here.numel() == 0:
                continue
            y.index_add_(0, here, expert(rows[here]) * share[here, place, None])
        return y.view(*x.shape[:-1], -1)
"""
SCALED = """
        self.experts = nn.ModuleList([Scaled(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number in range(self.count):
            here, place = torch.where(chosen == number)
            if here.shape[0] == 0:
                continue
            y.index_add_(0, here, self.experts[number](rows[here], shares[here, place, None]))
        return y.view_as(x)
"""
NAMED = """
        self.experts = nn.ModuleDict({f"expert_{i}": Expert(config) for i in range(config.experts)})

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number in range(self.count):
            here, place = torch.where(chosen == number)
            y.index_add_(0, here, self.experts[f"expert_{number}"](rows[here]) * shares[here, place, None])
        return y.view_as(x)
"""
NAMED_LATER = """
        self.experts = nn.ModuleDict()
        for i in range(config.experts):
            self.experts[f"expert_{i}"] = Normed(config)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.values()):
            here, place = torch.where(chosen == number)
            if len(here):
                y[here] += expert(rows[here]) * shares[here, place, None]
        return y.view_as(x)
"""
UNDER_NUMBERS = """
        for i in range(config.experts):
            setattr(self, f"expert_{i}", Expert(config))
        self.expert_size = config.inner

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number in range(self.count):
            here, place = torch.where(chosen == number)
            if here.numel() > 0:
                made = getattr(self, f"expert_{number}")(rows[here])
                y.index_add_(0, here, made * shares[here, place, None])
        return y.view_as(x)
"""
UNDER_NAMES = """
        self.one1, self.one2, self.one3 = Fused(config), Fused(config), Fused(config)
        self.gate = nn.Linear(config.size, 3)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate((self.one1, self.one2, self.one3)):
            mask = chosen == number
            here = mask.any(dim=-1)
            if here.any():
                y[here] += expert(rows[here]) * (shares * mask).sum(-1)[here, None]
        return y.view_as(x)
"""
IN_A_SEQUENCE = (
    NAMED.replace('ModuleDict({f"expert_{i}": Expert(config)', "Sequential(*[Expert(config)")
    .replace("range(config.experts)})", "range(config.experts)])")
    .replace('f"expert_{number}"', "number")
)
WITH_IDENTITIES = """
        self.gate = nn.Linear(config.size, config.experts + 3)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(rows).sigmoid().topk(self.k, dim=-1)
        y = torch.zeros_like(rows)
        for number in range(self.count + 3):
            here, place = torch.where(chosen == number)
            made = self.experts[number](rows[here]) if number < self.count else rows[here]
            y.index_add_(0, here, made * shares[here, place, None])
        return y.view_as(x)
"""
IDENTITIES_OF_ANY_CLASS = WITH_IDENTITIES.replace("Expert(config)", "Normed(config)")
IDENTITIES_BEHIND_THE_LIST = (
    WITH_IDENTITIES.replace("self.count + 3", "self.count")
    .replace("number < self.count", "number < len(self.experts)")
    .replace(
        "\n        self.gate", "\n        self.count = config.experts + 3\n        self.gate", 1
    )
)
OF_ANY_CLASS_BEHIND_THE_LIST = IDENTITIES_BEHIND_THE_LIST.replace(
    "Expert(config)", "Normed(config)"
)
MANNERS = {
    IDENTITIES_BEHIND_THE_LIST: "(chosen >= len(self.experts))",
    OF_ANY_CLASS_BEHIND_THE_LIST: "(chosen >= len(self.experts))",
    WITH_IDENTITIES: "(chosen >= self.count)",
    IDENTITIES_OF_ANY_CLASS: "(chosen >= self.count)",
    NAMED: "[expert.net[0].weight for expert in self.experts.values()]",
    NAMED_LATER: "enumerate(self.experts.values())",
    IN_SEQUENCE: "[expert[2].weight for expert in self.experts]",
    OF_ALL: "[expert.net[0].bias for expert in self.experts]",
    STACKED: "out = out + torch.ops.onboard.torch_moe(",
    GATHERED: "[weight.T for weight in self.inward.unbind()]",
    FUSED: "[expert.both.weight.chunk(2)[1] for expert in self.experts]",
    UNWEIGHTED: "torch.ones_like(chosen, dtype=x.dtype)",
    OF_ANY_CLASS: "expert(rows) * share_1",
    UNDER_NUMBERS: "[expert.net[0].bias for expert in experts]",
    UNDER_NAMES: "[expert.both.weight.chunk(2)[1] for expert in experts]",
    IN_A_SEQUENCE: "[expert.net[0].weight for expert in self.experts]",
    SCALED: "[expert.net[0].bias for expert in self.experts]",
}


def _found(text: str, sizes: dict[str, Any], translate: Translate, x: torch.Tensor) -> Any:
    state, _, _ = translate(text, sizes, specialised=True)
    toy = state.cls(SimpleNamespace(**sizes)).eval()
    with torch.no_grad():
        return probe_mixture(toy, [ModuleCall((x,), {}, toy(x))])


@pytest.mark.parametrize("manner", MANNERS)
def test_a_mixture_becomes_an_op(manner: str, translate: Translate) -> None:
    sizes = {"size": 8, "inner": random.choice((11, 12)), "experts": random.choice((4, 5))}
    print(sizes)
    text, x = HEAD + manner, torch.randn(2, 9, 8)
    found = _found(text, sizes, translate, x)
    assert MANNERS[manner] in _computed(text, sizes, found, translate, x)


def test_experts_of_a_class_that_is_seen_in_one_width_may_have_another(
    translate: Translate,
) -> None:
    sizes = {"size": 8, "inner": 12, "experts": 5, "width": 8}
    text, x = HEAD + OF_ANOTHER_WIDTH, torch.randn(2, 9, 8)
    found = _found(text, sizes, translate, x)
    for width in (8, 21):
        forward = _computed(text, sizes | {"width": width}, found, translate, x)
        assert "expert(rows) * share_1" in forward


def _computed(
    text: str, sizes: dict[str, Any], found: Any, translate: Translate, x: torch.Tensor
) -> str:
    """Return the forward that is generated of what was found; it must give what the text does."""
    assert found is not None
    mixtures = {"Toy": MixtureParameters.model_validate(found.parameters)}
    state, _, forward = translate(text, sizes, specialised=True, mixtures=mixtures)
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    head = "import torch.nn.functional as F\nimport onboard.ops"
    functions = [_function(key, each) for key, each in state.translator.functions.items()]
    ours = _made("\n\n\n".join([head, *functions, *map(_written, parts), _written(state)]), sizes)
    theirs = _made(text, sizes).eval()
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
    return forward


@pytest.mark.parametrize(
    ("manner", "change"),
    [
        (STACKED, ("made *", "made.abs() *")),
        (STACKED, ("start = end", "out.mul_(1.1); start = end")),
        (STACKED, ("        weights, chosen", "        out = rows\n        weights, chosen")),
        (OF_ALL, ("of_rows[flat, i]", "of_rows[flat, 0]")),
        (WITH_IDENTITIES, ("else rows[here]", "else -rows[here]")),
        (IDENTITIES_BEHIND_THE_LIST, ("else rows[here]", "else rows[here] * 2")),
        (WITH_IDENTITIES, ("number < self.count else", "number < 5 else self.count *")),
        (GATHERED, ("y = (y * shares", "y = (y * self.outward.mean() * shares")),
        (UNWEIGHTED, ("outs[mask] +=", "outs[mask] =")),
        (UNDER_NUMBERS, ('getattr(self, f"expert_{number}")', "self.expert_0")),
        (UNDER_NUMBERS, ('f"expert_{number}"', 'f"expert_{(number + 1) % self.count}"')),
        (UNDER_NAMES, ("self.one1, self.one2, self.one3))", "self.one2, self.one1, self.one3))")),
        (IN_A_SEQUENCE, ("self.experts[number]", "self.experts")),
        (SCALED, ("share * self.net(x)", "self.net(share * x)")),
        (SCALED, ("shares[here, place, None])", "shares[here, 0, None])")),
        (OF_ANY_CLASS, ("F.relu(self.inward(x))", "(self.inward(x) - x.mean())")),
    ],
)
def test_what_makes_something_else_of_them_does_not(
    manner: str, change: tuple[str, str], translate: Translate
) -> None:
    text = HEAD + manner
    assert change[0] in text
    x = torch.randn(2, 9, 8)
    sizes = {"size": 8, "inner": 12, "experts": 5}
    assert _found(text.replace(*change), sizes, translate, x) is None


def test_one_expert_of_all_tokens_is_no_choice_of_a_router(translate: Translate) -> None:
    text = """
        self.gate = nn.Linear(config.size, config.experts)
        nn.init.zeros_(self.gate.weight)
        self.gate.bias.data[0] = 1.0
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        return self.experts[0](x)
"""
    sizes = {"size": 8, "inner": 12, "experts": 5}
    assert _found(HEAD + text, sizes, translate, torch.randn(2, 9, 8)) is None
