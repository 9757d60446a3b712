"""Blocks that several layers share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from onboard.codegen.translate.ties import SharedBlock, shared_blocks
from onboard.codegen.translate.values import Untranslatable
from onboard.modeling import tie_weights


class _Layer(nn.Module):
    def __init__(self, with_block: bool) -> None:
        super().__init__()
        if with_block:
            self.block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


class _Model(nn.Module):
    def __init__(self, ties: dict[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(index > 0) for index in range(4)])
        self.config = SimpleNamespace(to_dict=dict)
        self.all_tied_weights_keys = ties


_NAMES = [f"{index}.{name}" for index in (0, 1) for name in ("weight", "bias")]


def _ties(sources: dict[int, int]) -> dict[str, str]:
    return {f"layers.{i}.block.{name}": f"layers.{j}.block.{name}" for i, j in sources.items() for name in _NAMES}


def test_layers_that_share_the_block_of_the_first_of_them_are_found() -> None:
    assert shared_blocks(_Model(_ties({2: 1, 3: 1}))) == [SharedBlock("", "layers", "block")]
    assert shared_blocks(_Model({"lm_head.weight": "layers.1.block.0.weight"})) == []


@pytest.mark.parametrize("ties", [_ties({3: 1}), _ties({3: 2}), dict(list(_ties({2: 1, 3: 1}).items())[1:])])
def test_layers_that_share_anything_else_are_refused(ties: dict[str, str]) -> None:
    with pytest.raises(Untranslatable, match="layers that share block in turn"):
        shared_blocks(_Model(ties))


def test_tied_modules_have_the_same_parameters() -> None:
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))
    tie_weights(second, first)
    assert [id(item) for item in first.parameters()] == [id(item) for item in second.parameters()]
    assert second[0].weight is first[0].weight
