"""Eager attention of code that takes fewer arguments than its layers hand on: PyTorch's, which users
get, takes any.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart
from tests.unit.codegen.test_no_mask_handed import saved

_FACT = "eager attention of modeling_odd is spared arguments that it does not take"


def _saved(folder: Path, argument: str) -> Path:
    file = saved(folder) / "modeling_odd.py"
    text = file.read_text().replace("scaling, **kwargs):", "scaling):")
    called = "scaling=self.size**-0.5)"
    assert called in text
    file.write_text(text.replace(called, f"{called[:-1]}, {argument})"))
    return folder


def test_it_is_spared_what_it_has_no_parameter_for(tmp_path: Path) -> None:
    found = run_apart(GENERATE, [_saved(tmp_path / "odd_spared", "position_ids=position_ids")])
    made = found["odd_spared"]
    assert made.get("error") is None, made["error"]
    assert made["worst"] < 1e-5
    assert _FACT in made["facts"]


@pytest.mark.parametrize("asked", [True, False], ids=["eager", "what is heeded"])
def test_what_would_be_another_attention_is_refused(asked: bool, tmp_path: Path) -> None:
    """A model that is to have eager attention fails, and one that tells PyTorch's what to see."""
    folder = _saved(tmp_path / "odd_heeded", "dropout=0.0" if asked else "is_causal=False")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | ({"attn_implementation": "eager"} if asked else {})
    file.write_text(json.dumps(config))
    said = str(run_apart(GENERATE, [folder])["odd_heeded"].get("error"))
    assert "unexpected keyword argument" in said
