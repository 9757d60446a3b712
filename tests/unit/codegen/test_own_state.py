"""What repositories' code keeps between calls, or in objects that are no modules, in small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

KEPT_TABLE = """
table = None

def angles(length, size):
    global table
    if table is None or table.shape[0] < length:
        table = torch.outer(torch.arange(2 * length).float(), 1.0 / torch.arange(1, size + 1))
    return torch.sin(table[:length]), torch.cos(table[:length])


def paired(m):
    rows = m.shape[0]
    return m.view(-1, 1).repeat(1, 2).view(rows, -1)


def turned(x, both):
    sin, cos = map(lambda t: paired(t)[None, : x.shape[1], None, :], both)
    return x * cos + x.flip(-1) * sin


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, position_ids):
        return turned(x, angles(x.shape[1], self.size))
"""


def test_a_table_that_a_function_keeps_in_its_module_is_made_at_each_call(
    translate: Translate,
) -> None:
    given = Code(name("position_ids"))
    state, _, _ = translate(
        KEPT_TABLE, {"size": 3}, specialised=True, counts_positions=True, position_ids=given
    )
    functions = state.translator.functions.items()
    written = "\n".join(_function(key, each) for key, each in functions)
    assert "global" not in written
    x = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(9))
    ours = _made(f"{written}\n\n\n{_written(state)}", {"size": 3})
    positions = torch.arange(7).expand(2, 7)
    expected = _made(KEPT_TABLE, {"size": 3})(x, positions)
    assert torch.allclose(ours(x[:, :2], positions[:, :2]), expected[:, :2])
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 3:], positions[:, 3:]), expected[:, 3:])


def test_a_global_that_begins_as_something_is_refused(translate: Translate) -> None:
    text = KEPT_TABLE.replace("table = None\n", "table = torch.ones(2, 3)\n")
    with pytest.raises(Untranslatable, match="the global table"):
        translate(
            text,
            {"size": 3},
            specialised=True,
            counts_positions=True,
            position_ids=Code(name("position_ids")),
        )


SEQUENCE = """
class First(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.words, config.size)

    def forward(self, ids):
        return self.table(ids)


class Layer(nn.Module):
    def __init__(self, config, index=None):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, other=None):
        return x + self.proj(x if other is None else other)


class Last(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.Linear(config.size, 2)

    def forward(self, x):
        return self.norm(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        modules = [First(config)]
        modules += [Layer(config, index=i) for i in range(config.layers)]
        modules.append(Last(config))
        self.layers = nn.Sequential(*modules)

    def forward(self, x):
        x = self.layers[0](x)
        for module in self.layers[1:-1]:
            x = module(x, other=None)
        return self.layers[-1](x)
"""


def test_a_sequence_of_different_modules_is_taken_apart(translate: Translate) -> None:
    config = {"size": 4, "words": 9, "layers": 3}
    state, init, forward = translate(SEQUENCE, config, specialised=True)
    assert "*[Layer(" in init
    assert "module(x)" in forward
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    written = "\n\n\n".join(map(_written, (*parts, state)))
    ours, original = _made(written, config), _made(SEQUENCE, config)
    ours.load_state_dict(original.state_dict())
    x = torch.arange(9)[None]
    assert torch.equal(ours(x), original(x))


@pytest.mark.parametrize("place", ["1", "-2", "config_index"])
def test_a_place_in_a_sequence_may_have_any_class_where_it_cannot_be_told(
    place: str, translate: Translate
) -> None:
    text = SEQUENCE.replace("self.layers[-1](x)", f"self.layers[{place}](x, x)")
    text = text.replace("config_index", "x.shape[0]")
    with pytest.raises(Untranslatable):
        translate(text, {"size": 4, "words": 9, "layers": 3}, specialised=True)


def test_what_a_method_gives_a_constructor_is_written_into_it(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.size = config.size
        self.register_buffer("factors", self._factors(device), persistent=False)

    def _factors(self, device):
        return 1.0 / torch.arange(1, self.size + 1, device=device)

    def forward(self, x):
        again = self._factors(x.device)
        return x * self.factors + again
"""
    config = {"size": 6}
    state, init, _ = translate(text, config, specialised=True)
    assert "_factors" not in init
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(_made(_written(state), config)(x), _made(text, config)(x))


def test_rows_of_tables_keep_the_shape_that_code_asks_for(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, position_ids):
        t = torch.arange(x.shape[1])
        table = torch.outer(t, 1.0 / torch.arange(1, self.size + 1)).cos()[0:]
        length, half = table.shape
        rows = table[: x.shape[1]]
        return x[..., : half * 2] * torch.cat((rows, rows), dim=-1) * table.size(1) * table.size(-1)
"""
    config, given = {"size": 3}, Code(name("position_ids"))
    state, _, _ = translate(
        text, config, specialised=True, counts_positions=True, position_ids=given
    )
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(5).expand(2, 5)
    ours, expected = _made(_written(state), config), _made(text, config)(x, positions)
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 2:], positions[:, 2:]), expected[:, 2:])
