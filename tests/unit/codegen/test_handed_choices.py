"""Mixtures whose tokens are sent to experts by what another function or method makes of the choices:
dicts, lists and masks, and experts that a module only holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.test_own_mixtures import HEAD, _computed, _found

Translate = Callable[..., tuple[Any, str, str]]

OF_EACH = """
def of_each(chosen, shares, count):
    found = {}
    for number in range(count):
        here, place = torch.nonzero(chosen == number, as_tuple=True)
        found[number] = [here, shares[here, place]]
    return found
"""
PARTS = f"""

class Holder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kept = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        raise NotImplementedError


{OF_EACH}

class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner, self.count = nn.Linear(config.size, config.experts), config.experts
        self.outer = nn.Linear(config.experts, config.experts)

    def choose(self, rows):
        logits = self.outer(self.inner(rows).tanh())
        shares, chosen = logits.sigmoid().topk(2, dim=-1)
        return logits, shares, chosen
"""
TOY = """

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.k, self.count = 2, config.experts
        self.router = Router(config)
        self.experts = Holder(config)
"""
OF_A_TABLE = """
    def forward(self, rows):
        logits, shares, chosen = self.choose(rows)
        return of_each(chosen, shares, self.count), logits
"""
OF_MASKS = """
    def forward(self, rows):
        logits, shares, chosen = self.choose(rows)
        masks = [(chosen == number) for number in range(self.count)]
        return shares, masks
"""
OF_ONE_MASK = """
    def forward(self, rows):
        logits, shares, chosen = self.choose(rows)
        return shares, F.one_hot(chosen, self.count).permute(2, 1, 0)
"""
BY_TABLE = """
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        y = torch.zeros_like(rows)
        table, logits = self.router(rows)
        for number, (here, share) in table.items():
            y.index_add_(0, here, self.experts.kept[number](rows[here]) * share[:, None])
        return y.view_as(x)
"""
BY_MASKS = """
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        shares, masks = self.router(rows)
        y = torch.zeros_like(rows)
        for mask, expert in zip(masks, self.experts.kept):
            here, place = mask.nonzero(as_tuple=True)
            if len(here):
                y[here] += expert(rows[here]) * shares[here, place, None]
        return y.view_as(x)
"""
BY_ONE_MASK = """
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        shares, mask = self.router(rows)
        y = torch.zeros_like(rows)
        for number in range(self.count):
            place, here = torch.where(mask[number])
            y.index_add_(0, here, self.experts.kept[number](rows[here]) * shares[here, place, None])
        return y.view_as(x)
"""
OF_ALL_WEIGHTS = """
    def forward(self, rows):
        logits, shares, chosen = self.choose(rows)
        gates = torch.zeros_like(logits)
        gates.scatter_(-1, chosen, shares)
        return gates
"""
BY_ALL_WEIGHTS = """
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        gates = self.router(rows)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts.kept):
            here = gates[:, number].nonzero().squeeze(-1)
            if here.numel() > 0:
                y[here] += expert(rows[here]) * gates[here, number, None]
        return y.view_as(x)
"""
IN_A_METHOD = """
    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        _, shares, chosen = self.router.choose(rows)
        masks = [chosen == number for number in range(self.count)]
        y = self.mixed(rows, masks, shares)
        return y.view_as(x)

    def mixed(self, rows, masks, shares):
        y = torch.zeros_like(rows)
        for number, mask in enumerate(masks):
            here, place = mask.nonzero(as_tuple=True)
            y.index_add_(0, here, self.one(number, rows[here]) * shares[here, place, None])
        return y

    def one(self, number, rows):
        return self.experts.kept[number](rows)
"""
MANNERS = {
    "table": (OF_A_TABLE, BY_TABLE),
    "masks": (OF_MASKS, BY_MASKS),
    "one mask": (OF_ONE_MASK, BY_ONE_MASK),
    "all weights": (OF_ALL_WEIGHTS, BY_ALL_WEIGHTS),
    "method": (OF_A_TABLE, IN_A_METHOD),
}
SIZES = {"size": 8, "inner": 12, "experts": 5}


def _text(name: str) -> str:
    router, mixture = MANNERS[name]
    return HEAD.partition("class Toy")[0] + PARTS + router + TOY + mixture


@pytest.mark.parametrize("name", MANNERS)
def test_a_mixture_takes_the_choices_themselves(name: str, translate: Translate) -> None:
    text, x = _text(name), torch.randn(2, 9, 8)
    found = _found(text, SIZES, translate, x)
    assert found is not None
    assert found.parameters["experts"] == "experts.kept"
    if handed := found.parameters.get("handed"):  # each translation has a file of its own
        stem, number = handed["file"].removesuffix(".py").rsplit("_", 1)
        handed["file"] = f"{stem}_{int(number) + 1}.py"
    forward = _computed(text, SIZES, found, translate, x)
    assert "torch.ops.onboard.torch_moe(" in forward
    assert "nonzero" not in forward


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("table", ("found[number] = [here, shares[here, place]]", "found[number] = [here, shares[here, 0]]")),
        ("table", ("share[:, None]", "share[:, None].abs().sqrt()")),
        ("masks", ("(chosen == number)", "(chosen == (number + 1) % self.count)")),
        ("one mask", ("permute(2, 1, 0)", "permute(2, 1, 0).flip(0)")),
        ("all weights", ("scatter_(-1, chosen, shares)", "scatter_(-1, chosen, shares).cumsum_(-1)")),
        ("method", ("return self.experts.kept[number](rows)", "return self.experts.kept[0](rows)")),
    ],
)  # fmt: skip
def test_what_sends_them_elsewhere_does_not(
    name: str, change: tuple[str, str], translate: Translate
) -> None:
    text = _text(name)
    assert change[0] in text
    assert _found(text.replace(*change), SIZES, translate, torch.randn(2, 9, 8)) is None


def test_a_module_that_is_called_holds_no_experts_of_its_owner(translate: Translate) -> None:
    text = _text("one mask").replace("raise NotImplementedError", "return x")
    text = text.replace("y.view_as(x)", "self.experts(y.view_as(x))")
    assert _found(text, SIZES, translate, torch.randn(2, 9, 8)) is None


WHOLE = f"""
{OF_EACH}

class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner, self.outer = nn.Linear(config.hidden_size, 5), nn.Linear(5, 5)

    def forward(self, rows, before):
        logits = self.outer(self.inner(rows).tanh())
        logits = logits if before is None else logits + before
        shares, chosen = logits.sigmoid().topk(2, dim=-1)
        return of_each(chosen, shares, 5), logits


class Holder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kept = nn.ModuleList([Expert(config) for _ in range(5)])


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router, self.experts = Router(config), Holder(config)

    def forward(self, x, before=None):
        rows = x.reshape(-1, x.shape[-1])
        table, logits = self.router(rows, before)
        y = torch.zeros_like(rows)
        for number, (here, share) in table.items():
            y.index_add_(0, here, self.experts.kept[number](rows[here]) * share[:, None])
        return y.view_as(x), logits
"""
BLOCK = """
x = x + self.attn(self.norm1(x), position_ids)
mixed, before = self.mlp(self.norm2(x), before)
return x + mixed, before
"""
LAYERS = """
x, before = self.embed(input_ids), None
for layer in self.layers:
    x, before = layer(x, position_ids, before)
return self.norm(x)
"""


def test_a_whole_model_whose_routers_hand_tables_on_is_proven(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_tables", head=WHOLE, block=BLOCK, model=LAYERS)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace("self.mlp = Mlp(config)", "self.mlp = Mixture(config)")
    before = "def forward(self, x, position_ids):\n        x = x + self"
    file.write_text(text.replace(before, before.replace("_ids", "_ids, before")))
    made = run_apart(GENERATE, [folder])["odd_tables"]
    assert made.get("error") is None
    assert made["worst"] < 1e-5
    assert made["recorded"] == []
    assert "torch_moe(" in made["text"]
    assert "nonzero" not in made["text"]
