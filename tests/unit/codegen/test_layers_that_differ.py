"""The translator on layers of several kinds: what a condition says of the modules inside, and what
it leaves open.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onboard.analysis.recognise.probe import probe_rope, probe_rotary
from onboard.analysis.recognise.recorder import FunctionCall
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.mechanisms.order import MECHANISMS
from onboard.codegen.translate.output.printer import print_block

_COUNT = itertools.count()
HEAD = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, mask=None, **kwargs):
        return self.proj(x), x + 1


class Slim(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(config.size))

    def forward(self, x, cache=None, **kwargs):
        return self.gain * x


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.kind = config.kinds[index]
        if self.kind == "wide":
            self.mixer = Wide(config)
        else:
            self.mixer = Slim(config)
        if self.kind == "slim":
            self.norm = nn.LayerNorm(config.size)

"""
TAIL = """

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


@pytest.fixture
def layer_forward(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that translates `Layer` with the given forward: what is left of that."""

    def run(forward: str) -> str:
        path = tmp_path / f"toy_layers_{next(_COUNT)}.py"
        body = "".join(f"    {line}\n" for line in forward.strip().splitlines())
        path.write_text(HEAD + body + TAIL, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        config = SimpleNamespace(attribute_map={}, size=4, kinds=["wide", "slim"])
        model = module.Toy(config)
        model.config = config
        translator = Translator(model, mechanisms=MECHANISMS)
        (state,) = translator.reached(
            translator.construct(
                module.Toy, Args([Config(name("config"), translator.config)], {}, [])
            )
        )
        translator._method(state, "forward", Args([], {"x": Code(name("x"))}, []))
        return print_block(translator.states[module.Layer].methods["forward"].body)

    return run


def test_under_a_condition_a_submodule_is_what_it_is_there(
    layer_forward: Callable[[str], str],
) -> None:
    left = layer_forward("""
def forward(self, x):
    if self.kind == "wide":
        y, extra = self.mixer(x, mask=None)
        y = y + extra
    else:
        y = self.mixer(x, cache=None)
    return x + y
""")
    assert "if self.kind == 'wide':\n    y, extra = self.mixer(x)" in left
    assert "else:\n    y = self.mixer(x)" in left


def test_one_call_may_give_a_tensor_here_and_a_tuple_there(
    layer_forward: Callable[[str], str],
) -> None:
    left = layer_forward("""
def forward(self, x):
    y = self.mixer(x)
    if self.kind == "wide":
        y, _ = y
    return x + y
""")
    assert left == "y = self.mixer(x)\nif self.kind == 'wide':\n    y, _ = y\nreturn x + y"


def test_an_attribute_that_some_layers_have_is_asked_for_and_equal_sides_are_one(
    layer_forward: Callable[[str], str],
) -> None:
    left = layer_forward("""
def forward(self, x, mask=None):
    if hasattr(self, "norm"):
        x = self.norm(x)
    if self.kind == "wide":
        x = x.relu()
    else:
        x = x.relu()
    return x
""")
    assert left == "if hasattr(self, 'norm'):\n    x = self.norm(x)\nreturn x.relu()"


@pytest.mark.parametrize("heads_first", [True, False])
def test_rope_by_complex_numbers_is_recognised_in_either_layout(heads_first: bool) -> None:
    q, k = (torch.randn(2, 7, heads, 8) for heads in (3, 2))
    angles = torch.rand(2, 7, 4) * 6
    freqs = torch.polar(torch.full_like(angles, 1.3), angles)
    outputs = [
        torch.view_as_real(
            torch.view_as_complex(x.view(2, 7, -1, 4, 2)) * freqs.unsqueeze(2)
        ).flatten(3)
        for x in (q, k)
    ]
    tensors = [x.transpose(1, 2) if heads_first else x for x in (q, k, *outputs)]
    found = probe_rope(FunctionCall("rotate", [*tensors[:2], freqs], tensors[2:]))
    assert found is not None
    assert found.parameters == {
        "op": "torch_rope_with_complex_freqs",
        "unsqueeze_dim": 1 if heads_first else 2,
    }
    assert probe_rope(FunctionCall("rotate", [*tensors[:2], freqs.conj()], tensors[2:])) is None
    assert probe_rotary(freqs)
    assert not probe_rotary(freqs + 0.1)
