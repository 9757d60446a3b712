"""Constructs that code of repositories has and transformers' own has not, in small modules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.output.printer import print_block
from tests.unit.codegen.conftest import HEAD

Translate = Callable[..., tuple[Any, str, str]]

CUT = """
class Tables(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.longest = None
        self._grow(size, length)
        self.longest = None

    def _grow(self, size, length):
        self.longest = length
        angles = torch.outer(torch.arange(length).float(), 1.0 / torch.arange(1, size + 1))
        self.register_buffer("cos", angles.cos()[None, None, :, :], persistent=False)

    def forward(self, x, length):
        if self.longest is None or length > self.longest:
            self._grow(x.shape[-1], length)
        return self.cos[:, :, :length, ...].to(dtype=x.dtype)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables = Tables(config.size, config.length)

    def forward(self, x, position_ids):
        cos = self.tables(x, length=x.shape[1])
        cos = cos.squeeze(1).squeeze(0)
        return x * USE
"""


def test_a_table_cut_to_the_text_is_looked_up_whole(translate: Translate) -> None:
    text = CUT.replace("USE", "cos[position_ids]")
    sizes = {"size": 4, "length": 32}
    state, init, forward = translate(text, sizes, position_ids=Code(name("position_ids")))
    (tables,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Tables"]
    assert tables.methods["forward"].parameters == ["x"]
    assert "cos[position_ids]" in forward
    original = _made(text, sizes)
    ours = _made(f"{_written(tables)}\n\n\n{_written(state)}", sizes)
    generator = torch.Generator().manual_seed(5)
    x, positions = torch.randn(2, 7, 4, generator=generator), torch.arange(7).expand(2, 7)
    assert torch.equal(ours(x, positions), original(x, positions))
    # A step of a text that began before: the table cut to its length would be too short.
    assert torch.equal(ours(x[:, 5:], positions[:, 5:]), original(x, positions)[:, 5:])


def test_a_table_cut_to_the_text_that_is_not_looked_up_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="no positions are looked up"):
        translate(
            CUT.replace("USE", "cos"),
            {"size": 4, "length": 32},
            position_ids=Code(name("position_ids")),
        )


def _made(text: str, config: dict[str, Any]) -> Any:
    """Return the module Toy of a text."""
    names: dict[str, Any] = {}
    exec(HEAD + text, names)
    return names["Toy"](SimpleNamespace(**config))


def _written(state: Any) -> str:
    """Return what is left of a class as text."""
    lines = [f"class {state.cls.__name__}(nn.Module):"]
    methods = {"__init__": (state.init.parameters, state.init.body)}
    methods |= {key: (each.parameters, each.body) for key, each in state.methods.items()}
    for key, (parameters, body) in methods.items():
        lines.append(f"    def {key}(self, {', '.join(parameters)}):")
        lines += ["        " + line for line in print_block(body).splitlines()]
    return "\n".join(lines)
