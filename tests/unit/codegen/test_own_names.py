"""Names that repositories' files import in other ways, and classes of named tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

BARE = """
import torch as th
import torch.nn.functional as functional
from math import sqrt
from torch import arange, cat as joined, float32
from torch.nn import Linear
from torch.nn.functional import softmax


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = Linear(config.size, config.size)
        self.scale = 1 / sqrt(config.size)

    def forward(self, x):
        steps = arange(x.shape[-1], dtype=float32)
        both = joined((self.proj(x) * self.scale, th.cos(steps).expand(x.shape)), dim=-1)
        return softmax(functional.silu(both), dim=-1)
"""


def test_what_is_imported_by_its_own_name_is_pytorchs(translate: Translate) -> None:
    state, init, forward = translate(BARE, {"size": 4}, specialised=True)
    written = _written(state)
    assert "nn.Linear(" in init
    assert "math.sqrt(" in init
    for usual in ("torch.arange(", "torch.cat(", "torch.cos(", "F.softmax(", "F.silu("):
        assert usual in forward
    text = f"import torch.nn.functional as F\n\n\n{written}"
    original, ours = _made(BARE, {"size": 4}), _made(text, {"size": 4})
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(ours(x), original(x))


OF_NUMPY = """
import numpy as np


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = 1 / np.sqrt(config.size)
        steps = np.arange(config.size, dtype=np.float64)
        table = torch.tensor(steps, dtype=torch.float64) * np.pi
        self.register_buffer("table", table.cos().to(torch.float32), persistent=False)

    def forward(self, x):
        return x * self.table * self.scale
"""


def test_what_numpy_computes_in_a_constructor_torch_and_math_do(translate: Translate) -> None:
    state, init, _ = translate(OF_NUMPY, {"size": 6}, specialised=True)
    assert "np." not in init
    for usual in ("math.sqrt(", "torch.arange(", "torch.float64", "math.pi"):
        assert usual in init
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(7))
    ours, original = _made(_written(state), {"size": 6}), _made(OF_NUMPY, {"size": 6})
    torch.testing.assert_close(ours(x), original(x))
    with pytest.raises(Untranslatable, match="arange without a dtype"):
        translate(OF_NUMPY.replace(", dtype=np.float64", ""), {"size": 6}, specialised=True)


NAMED = """
from typing import NamedTuple, Optional


class Pair(NamedTuple):
    hidden: torch.Tensor
    kept: Optional[torch.Tensor] = None


class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, keep=False):
        y = self.proj(x)
        if keep:
            return Pair(y, kept=x)
        return Pair(hidden=y)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)

    def forward(self, x):
        first = self.part(x)
        y, nothing = self.part(first.hidden, keep=False)
        if first.kept is not None or nothing is not None:
            y = y * 2
        return y + self.part(y)[0] + self.part(y, keep=True).kept
"""


def test_named_tuples_are_tuples_whose_items_have_names(translate: Translate) -> None:
    state, _, forward = translate(NAMED, {"size": 4}, specialised=True)
    assert "Pair" not in forward
    states = [each for each in state.translator.states.values() if each.cls.__name__ == "Part"]
    written = "\n\n\n".join(map(_written, [*states, state]))
    original, ours = _made(NAMED, {"size": 4}), _made(written, {"size": 4})
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6))
    assert torch.equal(ours(x), original(x))


APART = """
class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.window = config.window
        self.fast = False
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        if self.fast and self.window is not None:
            x = x * self.window
        READS
        return self.proj(x)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)

    def forward(self, x):
        return x + self.part(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        for index, layer in enumerate(self.layers):
            layer.part.window = config.window if index % 2 == 1 else None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_what_a_constructor_sets_of_some_layers_alone_may_be_there_unread(
    translate: Translate,
) -> None:
    _assert_same(APART.replace("READS", ""), translate)


@pytest.mark.parametrize(
    "reads",
    [
        "x = x if self.window is None else x[:, -self.window :]",
        "if self.window:\n            x = x * 2",
        "x = x * (self.window or 1)",
    ],
)
def test_what_a_constructor_sets_of_some_layers_alone_is_no_value(
    reads: str, translate: Translate
) -> None:
    with pytest.raises(Untranslatable, match=r"Part.window, which layer.part.window = ... changes"):
        translate(
            APART.replace("READS", reads), {"size": 4, "layers": 3, "window": 2}, specialised=True
        )


@pytest.mark.parametrize(
    "reads", ["if self.window:\n            x = x * 2", "x = x * (self.window or 1)"]
)
def test_what_a_constructor_gives_modules_that_set_none_of_it_stays(
    reads: str, translate: Translate
) -> None:
    text = APART.replace("READS", reads)
    _assert_same(text.replace("        self.window = config.window\n", ""), translate)


def _assert_same(text: str, translate: Translate) -> None:
    """Assert that the file written from code of three layers computes what the code does."""
    fields = {"size": 4, "layers": 3, "window": 2}
    state, _, _ = translate(text, fields, specialised=True)
    written = [_written(each) for each in reversed(state.translator.states.values())]
    original, ours = _made(text, fields), _made("\n\n\n".join(written), fields)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(7))
    assert torch.equal(ours(x), original(x))
