"""Where a model's layers lie, in lists that hold other modules, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.layer_modules import layer_kinds


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 9)


class _Model(nn.Module):
    def __init__(self, modules: list[nn.Module], kind: type[nn.Sequential] | type[nn.ModuleList]):
        super().__init__()
        self.config = PretrainedConfig(num_hidden_layers=2)
        self.mlp = nn.Sequential(nn.Linear(4, 4))
        self.trunk = kind(*modules) if kind is nn.Sequential else kind(modules)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize(
    ("modules", "path"),
    [
        (lambda: [nn.Embedding(9, 4), _Layer(), _Layer(), _Head()], "trunk.1"),
        (lambda: [_Layer(), _Layer(), _Head()], "trunk.0"),
        (lambda: [_Layer(), _Layer()], "trunk.0"),
    ],
)
def test_layers_are_found_beside_other_modules(modules: Any, path: str, kind: Any) -> None:
    model = _Model(modules(), kind)
    recording: Any = SimpleNamespace(attention=[], modules={})
    (found,) = layer_kinds(model, model, recording, set(), [])
    assert found.path == path
    assert found.layers == [0, 1]


def test_a_larger_list_that_nothing_runs_has_no_layers() -> None:
    model = _Model([_Layer(), _Layer()], nn.ModuleList)
    model.heads = nn.ModuleList([_Layer(), _Layer(), _Layer()])
    recording: Any = SimpleNamespace(attention=[], modules={"trunk.0": [], "trunk.0.first": []})
    (found,) = layer_kinds(model, model, recording, set(), [])
    assert found.path == "trunk.0"
