"""What constructors of repositories' code are given and do, in small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

SETTINGS = """
class Gate(nn.Module):
    def __init__(self, size, **kwargs):
        super().__init__()
        self.scale = kwargs.get("scale", 7.0)
        self.shift = kwargs.get("shift", 0.25)
        self.noisy = kwargs.get("noisy", False)
        self.layer = nn.Linear(size, size, bias=False)
        if self.noisy:
            self.noise = nn.Linear(size, size, bias=False)
            self.noise.weight.data = torch.zeros((size, size), requires_grad=True)

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        settings = {"scale": config.scale, "noisy": config.noisy}
        self.gate = Gate(config.size, **settings)

    def forward(self, x):
        return self.gate(x)
"""


@pytest.mark.parametrize("noisy", [False, True])
def test_settings_of_the_config_may_be_given_as_keywords_that_have_no_names(
    translate: Translate, noisy: bool
) -> None:
    sizes = {"size": 3, "scale": 0.5, "noisy": noisy}
    state, _, _ = translate(SETTINGS, sizes, specialised=True)
    gates = [each for cls, each in state.translator.states.items() if cls.__name__ == "Gate"]
    ours = _made("\n\n\n".join([*map(_written, gates), _written(state)]), sizes)
    theirs = _made(SETTINGS, sizes)
    assert ours.state_dict().keys() <= theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), theirs(x))


def test_what_a_constructor_writes_into_a_buffer_is_not_dropped(translate: Translate) -> None:
    text = SETTINGS.replace(
        "self.noise.weight.data = torch.zeros((size, size), requires_grad=True)",
        "self.register_buffer('table', torch.ones(size), persistent=False)\n"
        "            self.table.data = torch.zeros(size)",
    ).replace("* self.scale", "* self.table * self.scale")
    with pytest.raises(Untranslatable):
        translate(text, {"size": 3, "scale": 0.5, "noisy": True}, specialised=True)
