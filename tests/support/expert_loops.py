"""Mixtures of experts in the manners of public repositories: modules in a list, to which loops send
tokens. `Mixture` has what they share; each class has a loop of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(inner, hidden, bias=bias)
        self.w3 = nn.Linear(hidden, inner, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PlainExpert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.fc_in = nn.Linear(hidden, inner)
        self.fc_out = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc_out(F.gelu(self.fc_in(x)))


class Mixture(nn.Module):
    def __init__(self, experts: int = 6, k: int = 2, hidden: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([self.make(hidden, inner) for _ in range(experts)])

    def make(self, hidden: int, inner: int) -> nn.Module:
        return Expert(hidden, inner)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(self.gate(x).softmax(dim=-1), self.k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


class Masked(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                tokens = mask.any(dim=-1).nonzero().flatten()
                y.index_add_(0, tokens, expert(flat[tokens]) * weights[mask].view(-1, 1))
        return y.view(x.shape)


class OneHot(Mixture):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, size = hidden_states.shape
        hidden_states = hidden_states.view(-1, size)
        logits = self.gate(hidden_states)
        weights, selected = torch.topk(F.softmax(logits, dim=1), self.k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        final = torch.zeros((batch * length, size), dtype=hidden_states.dtype)
        mask = F.one_hot(selected, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in range(len(self.experts)):
            layer = self.experts[number]
            idx, top_x = torch.where(mask[number])
            if top_x.shape[0] == 0:
                continue
            state = hidden_states[None, top_x].reshape(-1, size)
            final.index_add_(0, top_x, layer(state) * weights[top_x, idx, None])
        return final.reshape(batch, length, size), logits


class Counted(Mixture):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x.view(-1, x.shape[-1]))
        if not self.training:
            y = self.infer(x.view(-1, x.shape[-1]), chosen, weights).view(x.shape)
        return y

    @torch.no_grad()
    def infer(self, x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        counts: Any = ids.new_zeros((ids.shape[0], len(self.experts)))
        counts.scatter_(1, ids, 1)
        counts = counts.sum(dim=0).cpu().numpy()
        order = ids.view(-1).argsort()
        tokens = x[order // ids.shape[1]]
        outputs, start = [], 0
        for i, count in enumerate(counts):
            if count == 0:
                continue
            outputs.append(self.experts[i](tokens[start : start + count]))
            start += count
        outs = torch.cat(outputs, dim=0)
        back = torch.empty_like(outs)
        back[order] = outs
        return (back.view(*ids.shape, -1) * weight.unsqueeze(-1)).sum(dim=1)


class Flat(Mixture):
    """Choices and weights one after the other, and a branch for training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x.view(-1, x.shape[-1]))
        flat = chosen.view(-1)
        if self.training:
            rows = x.view(-1, x.shape[-1]).repeat_interleave(self.k, dim=0)
            y = torch.empty_like(rows)
            for i, expert in enumerate(self.experts):
                y[flat == i] = expert(rows[flat == i])
            return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).view(x.shape)
        return self.infer(x.view(-1, x.shape[-1]), flat, weights.view(-1, 1)).view(x.shape)

    def infer(self, x: torch.Tensor, flat: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros_like(x)
        order = flat.argsort()
        ends = flat.bincount().cpu().numpy().cumsum(0)
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            tokens = order[start:end] // self.k
            out = self.experts[i](x[tokens])
            out.mul_(weights[order[start:end]])
            cache.scatter_reduce_(0, tokens.view(-1, 1).repeat(1, x.shape[-1]), out, reduce="sum")
        return cache


class PlainBiased(Masked):
    def make(self, hidden: int, inner: int) -> nn.Module:
        return PlainExpert(hidden, inner)


class Biased(Masked):
    def make(self, hidden: int, inner: int) -> nn.Module:
        return Expert(hidden, inner, bias=True)


class Crowded(Mixture):
    """No mixture of ours: an expert takes a few tokens and drops others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            tokens = mask.any(dim=-1).nonzero().flatten()[:4]
            y.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens].max(-1).values[:, None])
        return y.view(x.shape)


class Squared(Mixture):
    """No mixture of ours: the weights count twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            tokens = mask.any(dim=-1).nonzero().flatten()
            y.index_add_(0, tokens, expert(flat[tokens]) * weights[mask].view(-1, 1) ** 2)
        return y.view(x.shape)


class Dispatched(Mixture):
    """A place in each expert's buffer for every token, and masks of these places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        gates = self.gate(flat).softmax(dim=-1)
        chosen = F.one_hot(gates.argmax(dim=-1), len(self.experts))
        chosen = self.with_room(chosen)
        places = F.one_hot(((chosen.cumsum(0) - 1) * chosen).sum(-1), len(flat)).float()
        weights = torch.einsum("se,sc->sec", gates * chosen, places)
        mask = weights.bool()
        buffers = torch.einsum("sec,sm->ecm", mask.to(x.dtype), flat)
        outs = torch.stack([expert(buffers[i]) for i, expert in enumerate(self.experts)])
        return torch.einsum("sec,ecm->sm", weights, outs).view(x.shape)

    def with_room(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen


class Dropped(Dispatched):
    """A buffer of three places: whoever comes later goes to no expert."""

    def with_room(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen * (chosen.cumsum(0) <= 3)


class Ranked(Mixture):
    """Every expert computes every token, with the shares of those that count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(dim=-1)
        least = shares.topk(self.k, dim=-1).values[..., -1:]
        shares = shares * (shares >= least)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        outs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outs * shares.unsqueeze(-2)).sum(dim=-1)


class Listed(nn.Module):
    """The weights of all experts in one module, which computes one of them."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        self.gates, self.ups, self.downs = (
            nn.ParameterList([torch.randn(shape) / 3 for _ in range(experts)]) for shape in shapes
        )

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y = F.silu(F.linear(x, self.gates[number])) * F.linear(x, self.ups[number])
        return F.linear(y, self.downs[number])


class Stacked(nn.Module):
    """The same as stacks, which are multiplied from the right."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, hidden, inner) / 3)
        self.w2 = nn.Parameter(torch.randn(experts, inner, hidden) / 3)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, inner) / 3)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return (F.silu(x @ self.w1[number]) * (x @ self.w3[number])) @ self.w2[number]


class Flattened(nn.Module):
    """The same as matrices one below the other."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.experts, self.inner, self.hidden = experts, inner, hidden
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.randn(experts * inner, hidden) / 3) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        w1, w2, w3 = (
            w.view(self.experts, self.inner, self.hidden)[number]
            for w in (self.w1, self.w2, self.w3)
        )
        return (F.silu(x @ w1.t()) * (x @ w3.t())) @ w2


class Waving(Listed):
    """No experts that the op has: another activation."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        y = F.linear(x, self.gates[number]).sin() * F.linear(x, self.ups[number])
        return F.linear(y, self.downs[number])


class OneModule(Mixture):
    """Sends sorted tokens to experts by their number, and multiplies what these make."""

    def __init__(self, kind: type[nn.Module], scale: float) -> None:
        super().__init__()
        self.experts = kind(6, 8, 12)  # type: ignore[assignment]
        self.scale, self.unused = scale, 0.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        order = chosen.flatten().argsort()
        tokens = order // self.k
        counts = chosen.flatten().bincount(minlength=6).tolist()
        parts = flat[tokens].split(counts)
        outs = torch.cat([self.experts(part, i) for i, part in enumerate(parts) if len(part)])
        outs = outs * (weights.flatten()[order].view(-1, 1) * self.scale)
        y = torch.zeros_like(flat).index_add(0, tokens, outs)
        return y.view(x.shape)


class SortedBeside(Mixture):
    """Tokens sorted by expert, whose outputs are scattered onto what a shared expert gave."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Expert(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        shared = self.shared(flat)
        order = torch.argsort(chosen.view(-1), stable=True)
        of_them, expert_of = weights.view(-1)[order], chosen.view(-1)[order]
        places = (order // self.k).unsqueeze(-1).expand(-1, flat.shape[-1])
        given = torch.gather(flat, dim=0, index=places)
        made = torch.zeros_like(given)
        for i in range(len(self.experts)):
            mask = expert_of == i
            if mask.any():
                made[mask] = self.experts[i](given[mask])
        made = made * of_them.unsqueeze(-1)
        y = shared.scatter_add(dim=0, index=places, src=made)
        return y.view(x.shape)
