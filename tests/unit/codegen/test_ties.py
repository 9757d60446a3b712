"""Blocks that several layers share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn
from transformers import PretrainedConfig

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.ties import SharedBlock, shared_blocks
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
        self.config = PretrainedConfig()
        self.all_tied_weights_keys = ties


_NAMES = [f"{index}.{name}" for index in (0, 1) for name in ("weight", "bias")]


def _ties(sources: dict[int, int]) -> dict[str, str]:
    return {
        f"layers.{i}.block.{name}": f"layers.{j}.block.{name}"
        for i, j in sources.items()
        for name in _NAMES
    }


def test_layers_that_share_the_block_of_the_first_of_them_are_found() -> None:
    assert shared_blocks(_Model(_ties({2: 1, 3: 1}))) == [SharedBlock("", "layers", "block")]
    assert shared_blocks(_Model({"lm_head.weight": "layers.1.block.0.weight"})) == []


@pytest.mark.parametrize(
    ("ties", "reason"),
    [
        (_ties({3: 1}), "layers that share 2 of block, a number of no field"),
        (_ties({3: 2}), "layers that share block in another order"),
        (dict(list(_ties({2: 1, 3: 1}).items())[1:]), "layers that share block in another order"),
    ],
)
def test_layers_that_share_anything_else_are_refused(ties: dict[str, str], reason: str) -> None:
    with pytest.raises(Untranslatable, match=reason):
        shared_blocks(_Model(ties))


class _Counted(_Model):
    """Layers that share as many blocks as the config says, in turn."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(
            _ties({i: 1 + (i - 1) % config.blocks for i in (1, 2, 3) if i > config.blocks})
        )
        self.config = config


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, int]:
        return {"others": self.others, "blocks": self.blocks}

    @staticmethod
    def from_dict(values: dict[str, int]) -> _Config:
        return _Config(**values)


@pytest.mark.parametrize("count", [1, 2])
def test_how_many_blocks_there_are_the_config_says(count: int) -> None:
    (block,) = shared_blocks(_Counted(_Config(blocks=count, others=count)))
    assert block == SharedBlock("", "layers", "block", "blocks")


def test_tied_modules_have_the_same_parameters() -> None:
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(2))
    tie_weights(second, first)
    assert [id(item) for item in first.parameters()] == [id(item) for item in second.parameters()]
    assert second[0].weight is first[0].weight
