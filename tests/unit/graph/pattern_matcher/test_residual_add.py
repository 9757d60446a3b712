"""Hidden states of chosen layers, kept for every token, are those that transformers shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onboard.errors import OnboardError, UsageError
from onboard.graph.pattern_matcher.layer_ends import layer_paths
from onboard.ops.hidden_states.residual_add import kept_hidden_states
from tests.support.graph.fusion import apply, context_for, exported
from tests.support.graph.harness import rmse
from tests.support.runtime.tiny import make_tiny

KEY = "detect_hidden_states_for_capture"
PAGE = 4
STEPS = (((0, 5), (0, 6), (0, 1)), ((5, 12), (6, 7)), ((12, 13), (7, 8), (1, 2)))
"""From where to where each step reads each sequence: a ragged prefill, chunks of the first two, a
decode step.
"""


def test_kept_rows_are_transformers_hidden_states(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, num_hidden_layers=4)
    chosen = {"enabled": True, "eagle3_layers_to_capture": [2, 0]}
    engine = model.engine(transforms={KEY: chosen}, kv_cache_config={"tokens_per_block": PAGE})
    cache, ids = engine.cache, torch.randint(90, (3, 13)).numpy()
    pages = np.arange(1, 13).reshape(3, 4)
    with torch.inference_mode():
        for step in STEPS:
            starts, ends = np.array(step).T
            tokens = np.concatenate(
                [row[start:end] for row, (start, end) in zip(ids, step, strict=False)]
            )
            cache.info.set_batch(tokens, starts, ends - starts, pages[: len(step)])
            cache.call(engine.gm)
    kept = [name for name in cache.resources if name.startswith("hidden_cache")]
    for row, table, length in zip(ids, pages, (13, 8, 2), strict=True):
        places = np.arange(length)
        slots = torch.from_numpy(table[places // PAGE] * PAGE + places % PAGE)
        states = model.hf(
            torch.from_numpy(row[None, :length]), output_hidden_states=True
        ).hidden_states
        for name, layer in zip(kept, (0, 2), strict=True):
            actual = kept_hidden_states(cache.caches[name], slots)
            assert rmse(actual, states[layer + 1][0]) <= 1e-5, (layer, length)
    row = ids[0].tolist()
    assert rmse(engine.logits(row), model.logits(row)) <= 1e-5
    assert [entry.summary for entry in engine.history if entry.key == KEY] == [
        "hidden states behind model.layers.0, model.layers.2"
    ]


class Layer(nn.Module):
    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.mix, self.scaled = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), scaled

    def forward(self, x):
        for mix in self.mix:
            x = x + mix(x).tanh()
        return x * 0.5 if self.scaled else x


class Layers(nn.Module):
    """Layers that hold a list of their own; the last of them ends with a product."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.body = nn.ModuleList(Layer(scaled=index == count - 1) for index in range(count))
        self.heads = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.heads[0](x)


def _marked(count: int, tmp_path: Path, **fields: Any) -> tuple[Any, Any]:
    gm = exported(Layers(count), 2, 3, 8)
    return apply(KEY, gm, context_for(tmp_path), **fields)[:2]


def test_the_sum_that_ends_a_layer_is_marked(tmp_path: Path) -> None:
    gm, info = _marked(9, tmp_path)
    assert layer_paths(gm) == [f"body.{index}" for index in range(9)]
    assert info.num_matches == 3
    assert info.summary == "hidden states behind body.1, body.3, body.5"
    sums = [
        str(node.target).rpartition(".")[0] for node in gm.graph.nodes if "add" in str(node.target)
    ]
    marked = {2 * layer + 1 for layer in (1, 3, 5)}  # the second sum of each
    assert [name == "onboard.torch_residual_add" for name in sums] == [
        place in marked for place in range(18)
    ]
    assert _marked(9, tmp_path, capture_hidden_states=False)[1].num_matches == 0


@pytest.mark.parametrize(
    ("chosen", "error", "problem"),
    [
        (None, UsageError, "the model has 4 layers, and what is captured by default needs 7"),
        ([0, 4], UsageError, "eagle3_layers_to_capture has 4"),
        ([-1], UsageError, "eagle3_layers_to_capture has -1"),
        ([3], OnboardError, "body.3 does not end with one residual addition.*aten.mul"),
    ],
)
def test_what_cannot_be_captured_is_named(
    tmp_path: Path, chosen: list[int] | None, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        _marked(4, tmp_path, eagle3_layers_to_capture=chosen)
