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
