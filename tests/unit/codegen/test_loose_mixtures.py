"""Whole models with mixtures that are no op: experts under numbered names, soft ones, as many experts as a
token's scores say, weights of what experts get.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

HEAD = """

class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count = 5
        self.gate = nn.Linear(config.hidden_size, self.count)
"""
LISTED = """
        self.experts = nn.ModuleList([Expert(config) for _ in range(self.count)])
"""
NUMBERED = """
        for i in range(self.count):
            setattr(self, f"expert_{i}", Expert(config))

    def forward(self, x):
        shares = torch.softmax(self.gate(x), dim=-1)
        return sum(shares[..., i:i + 1] * getattr(self, f"expert_{i}")(x) for i in range(self.count))
"""
NAMED = """
        self.names = []
        for i in range(self.count):
            key = f"expert{i}"
            self.add_module(key, Expert(config))
            self.names.append(key)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, chosen = torch.sigmoid(self.gate(rows)).topk(2, dim=-1)
        y = torch.zeros_like(rows)
        for number, key in enumerate(self.names):
            here, place = torch.where(chosen == number)
            if here.numel() == 0:
                continue
            y[here] += self._modules[key](rows[here]) * shares[here, place, None]
        return y.view_as(x)
"""
SOFT = f"""{LISTED}
    def forward(self, x):
        shares = torch.softmax(self.gate(x), dim=-1)
        return (torch.stack([e(x) for e in self.experts], dim=-1) * shares.unsqueeze(-2)).sum(-1)
"""
AS_MANY_AS_NEEDED = f"""{LISTED}
    def forward(self, x):
        shares = torch.sigmoid(self.gate(x))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = shares[..., number] > 0.5
            if here.any():
                y[here] += shares[here][:, number:number + 1] * expert(x[here])
        return y
"""
OF_INPUTS = f"""{LISTED}
    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        best, chosen = self.gate(rows).topk(1, dim=-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            here, place = torch.where(chosen == number)
            y.index_add_(0, here, expert(rows[here] * best.sigmoid()[here, place, None]))
        return y.view_as(x)
"""
MANNERS = {
    "numbered": (NUMBERED, "torch_moe("),
    "named": (NAMED, "torch_moe("),
    "soft": (SOFT, "torch_moe("),
    "as_many": (AS_MANY_AS_NEEDED, "masked_fill("),
    "of_inputs": (OF_INPUTS, "masked_fill("),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of one model of each manner, in one process."""
    root, folders = tmp_path_factory.mktemp("loose"), list[Path]()
    for key, (text, _) in MANNERS.items():
        folder = save_odd(root / f"loose_{key}", head=HEAD + text)
        file = folder / "modeling_odd.py"
        file.write_text(file.read_text().replace("self.mlp = Mlp(", "self.mlp = Mixture("))
        folders.append(folder)
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("manner", MANNERS)
def test_it_is_translated_and_proven(manner: str, made: dict[str, Any]) -> None:
    found = made[f"loose_{manner}"]
    assert found.get("error") is None
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    assert MANNERS[manner][1] in found["text"].replace('"', "'")
    assert "torch.where(" not in found["text"]
