"""Parameters that a constructor makes in half precision take the model's dtype, where no code minds."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.analysis.repository_classes import bring_up_to_date
from onboard.codegen.tidy.initial_values import without_half_dtypes
from onboard.hf.half_parameters import takes_models_dtype

CODE = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class HalfConfig(PretrainedConfig):
    model_type = "half_made"
    tie_word_embeddings = False

def plain_linear(size, width, dtype=torch.bfloat16):
    return nn.Linear(size, width, bias=False, dtype=dtype)

class Gate(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((3, size), dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.wide = plain_linear(3, 3, dtype=torch.bfloat16)
    def forward(self, x):
        CAST
        return self.wide(F.linear(x, self.weight))

class HalfLM(PreTrainedModel):
    config_class = HalfConfig
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(8, 4)
        self.gate = Gate(4)
        self.post_init()
    def forward(self, input_ids, **kwargs):
        return self.gate(self.words(input_ids))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The module of `CODE`, in a package of its own, with the line that is asked for."""
    name = f"half_made_{abs(hash(request.param))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "modeling.py").write_text(CODE.replace("CAST", request.param))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(f"{name}.modeling")
    for key in [key for key in sys.modules if key.startswith(name)]:
        del sys.modules[key]


def _gate(own: Any, dtype: torch.dtype) -> Any:
    facts = bring_up_to_date(
        own.__name__.split(".")[0], own.HalfConfig, own.HalfLM, {"model_type": "half_made"}
    )
    said = [fact for fact in facts if "half precision" in fact]
    return own.HalfLM._from_config(own.HalfConfig(), dtype=dtype), said


@pytest.mark.parametrize("own", ["x = x.float().to(torch.float32)"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_code_that_does_not_mind_gets_the_models_dtype(own: Any, dtype: torch.dtype) -> None:
    model, said = _gate(own, dtype)
    assert said == ["Gate makes parameters in half precision; they get the model's dtype"]
    assert (model.gate.weight.dtype, model.gate.scale.dtype) == (dtype, torch.float64)
    assert model.gate.wide.weight.dtype == dtype
    if dtype == torch.float32:
        assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 3)


@pytest.mark.parametrize(
    "own",
    [
        "x = x.to(self.weight.dtype)",
        "x = x.to(self.wide.weight.dtype)",
        "x = x.to(torch.bfloat16)",
        "x = x.half()",
    ],
    indirect=True,
)
def test_code_that_counts_on_it_keeps_it(own: Any) -> None:
    model, said = _gate(own, torch.float32)
    assert (model.gate.weight.dtype, said) == (torch.bfloat16, [])


@pytest.mark.parametrize("made", ["nn.Linear(3, 3)", "nn.utils.skip_init(nn.Linear, 3, 3)"])
@pytest.mark.parametrize("halved", [".half()", ".half().to(device)", ".to(device).bfloat16()"])
def test_modules_that_are_put_in_half_precision_are_made_so(made: str, halved: str) -> None:
    text = f"class Toy:\n    def __init__(self):\n        self.a = {made}{halved}\n"
    heeds = "    def forward(self, x):\n        return self.a(x.to(self.a.weight.dtype))\n"
    for code, taken in ((text, True), (text + heeds, False)):
        [toy] = ast.parse(code).body
        assert isinstance(toy, ast.ClassDef)
        assert takes_models_dtype(toy) is taken
    [other] = ast.parse(text.replace(made, "torch.ones(3)")).body
    assert isinstance(other, ast.ClassDef)
    assert not takes_models_dtype(other)


def test_model_files_name_no_dtype_then() -> None:
    tree = ast.parse(CODE)
    gate = next(
        item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == "Gate"
    )
    assert takes_models_dtype(gate)
    init: Any = gate.body[0]
    text = "\n".join(map(ast.unparse, without_half_dtypes(init.body)))
    assert "torch.empty((3, size))" in text
    assert "torch.ones(3, dtype=torch.float64)" in text
    made = ast.parse("self.a = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)").body
    assert ast.unparse(without_half_dtypes(made)[0]) == "self.a = nn.Linear(3, 3, bias=False)"
