"""What functions of modeling code return as masks."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.recognise.mask_makers import _own_files, mask_makers
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.tiny.tiny_sizes import VOCABULARY


def pair(slen: int, padding: torch.Tensor | None, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of padding, and which tokens each token sees."""
    rows = torch.arange(slen)
    seen = (rows <= rows[:, None]) & (rows > rows[:, None] - window)
    return torch.ones(2, slen) == 1 if padding is None else padding, seen.repeat(2, 1, 1)


def added(length: int, shown: int | None) -> torch.Tensor:
    """Return a mask that is added to scores, of which each token sees the last `shown` tokens."""
    ones = torch.ones(1, 1, length, length, dtype=torch.bool)
    hidden = ones.triu(1) if shown is None else ones.triu(1) | ones.tril(-shown)
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


def no_rows(length: int) -> torch.Tensor:
    """Return what an expert computes that no token has chosen, [0, length]."""
    return torch.zeros(0, length)


class Masking(nn.Module):
    """Makes masks, and uses none."""

    def __init__(self, window: int, shown: int | None = None) -> None:
        super().__init__()
        self.config = PretrainedConfig(sliding_window=5)
        self.window, self.shown = window, shown
        self.head = nn.Embedding(VOCABULARY, 8)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> object:
        pair(input_ids.shape[1], attention_mask, self.window)
        no_rows(input_ids.shape[1])
        if self.shown:
            added(input_ids.shape[1], self.shown)
        return type("Output", (), {"logits": self.head(input_ids)})


def test_a_pair_of_masks_is_known_by_what_it_holds() -> None:
    assert mask_makers(Masking(window=1000)) == {"pair": ["ones", "seen"]}


def test_a_mask_with_a_window_is_none() -> None:
    assert mask_makers(Masking(window=5)) == {}


@pytest.mark.parametrize(
    ("shown", "kinds"),
    [(1000, ["added"]), (5, ["window"]), (6, ["window+1"]), (4, None), (7, None)],
)
def test_an_added_mask_may_have_the_window_of_the_config(
    shown: int, kinds: list[str] | None
) -> None:
    assert mask_makers(Masking(window=5, shown=shown)).get("added") == kinds


def test_all_files_of_a_repository_may_make_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PACKAGE, f"{PACKAGE}.modeling_x", f"{PACKAGE}.masks"):
        module = ModuleType(name)
        module.__file__ = f"/there/{name.rpartition('.')[2]}.py"
        monkeypatch.setitem(sys.modules, name, module)
    model = Masking(window=5)
    assert _own_files(model) == {__file__}
    monkeypatch.setattr(Masking, "__module__", f"{PACKAGE}.modeling_x")
    assert _own_files(model) == {"/there/modeling_x.py", "/there/masks.py"}
