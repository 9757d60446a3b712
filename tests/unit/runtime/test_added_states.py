"""What a text model adds between its layers is measured; any other effect of its arguments is
refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.runtime.multimodal.added_states import added_states


class Text(nn.Module):
    """A text model with a forward pass that takes `more` of one kind or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.LayerNorm(4, device="meta")

    def forward(self, inputs_embeds: torch.Tensor, more: torch.Tensor | None = None) -> Any:
        hidden = inputs_embeds
        if more is not None and self.kind == "before all":
            hidden = hidden + more
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, more) if self.kind == "into layers" else layer(hidden)
            if more is None or index == 1:
                continue
            if self.kind == "behind layers":
                hidden = hidden + (index + 1) * more
            if self.kind == "a factor":
                hidden = hidden * more
        if self.kind == "always":
            hidden = hidden * 2
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


def states(kind: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    embeds, more = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(1))
    handed = {"inputs_embeds": embeds, "more": more}
    text = Text(kind)
    try:
        return more[0], added_states(text, "layers", handed, ["more"])
    finally:
        assert not any("forward" in vars(module) for module in text.modules())


def test_what_is_added_behind_layers_is_found_at_the_last_one_too() -> None:
    more, [first, second, last] = states("behind layers")
    torch.testing.assert_close(first, more)
    torch.testing.assert_close(last, 3 * more)
    assert not second.any()


@pytest.mark.parametrize("kind", ["before all", "into layers", "a factor", "always"])
def test_another_effect_is_refused(kind: str) -> None:
    with pytest.raises(OnboardError):
        states(kind)
