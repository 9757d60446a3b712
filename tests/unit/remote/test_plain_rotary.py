"""Rotary embeddings that transformers 4 made of a config's own fields."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from onboard.hf.old.rotary_forms import PlainRotaryEmbedding, give_plain_rotary

_PACKAGE = "code_that_turns"


class _BaseFirst(PretrainedConfig):
    """What its base's constructor would make a table of is not there yet."""

    def __init__(self, part: float = 0.5, scaling: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head_dim, self.max_position_embeddings, self.rope_theta = 16, 64, 500.0
        self.partial_rotary_factor, self.rope_scaling = part, scaling


class _BaseLast(PretrainedConfig):
    def __init__(self, part: float = 0.5, scaling: Any = None, **kwargs: Any) -> None:
        self.head_dim, self.max_position_embeddings, self.rope_theta = 16, 64, 500.0
        self.partial_rotary_factor, self.rope_scaling = part, scaling
        super().__init__(**kwargs)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (_BaseFirst(), ["LlamaRotaryEmbedding", "Gemma2RotaryEmbedding", "PhiRotaryEmbedding"]),
        (_BaseFirst(1.0), ["LlamaRotaryEmbedding", "Gemma2RotaryEmbedding", "PhiRotaryEmbedding"]),
        (_BaseLast(), ["LlamaRotaryEmbedding", "Gemma2RotaryEmbedding"]),
        (_BaseLast(1.0), []),
        (_BaseLast(scaling={"rope_type": "linear", "factor": 2.0}), []),
        (PretrainedConfig(), []),
    ],
)
def test_it_is_given_where_transformers_leaves_fields_out(
    monkeypatch: pytest.MonkeyPatch, config: Any, given: list[str]
) -> None:
    module: Any = ModuleType(f"{_PACKAGE}.modeling")
    classes: list[type] = [LlamaRotaryEmbedding, Gemma2RotaryEmbedding, PhiRotaryEmbedding]
    vars(module).update({cls.__name__: cls for cls in [*classes, CohereRotaryEmbedding]})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    facts = give_plain_rotary(_PACKAGE, config)
    assert [fact.split(" ")[0] for fact in facts] == given
    assert [cls.__name__ for cls in classes if cls is not vars(module)[cls.__name__]] == given
    assert module.CohereRotaryEmbedding is CohereRotaryEmbedding


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_it_turns_the_part_of_a_head_that_the_config_says(part: float) -> None:
    made = PlainRotaryEmbedding(_BaseFirst(part))
    positions = torch.tensor([[0, 7, 63], [5, 6, 1]])
    cos, sin = made(torch.zeros(1, dtype=torch.float64), positions)
    size = int(16 * part)
    angles = positions.double()[..., None] / 500.0 ** (torch.arange(0, size, 2).double() / size)
    both = torch.cat((angles, angles), dim=-1)
    torch.testing.assert_close(cos, both.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin, both.sin(), atol=1e-5, rtol=0)
