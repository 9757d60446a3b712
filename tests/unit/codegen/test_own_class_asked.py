"""Constructors that ask of which class the object is that they make."""

from __future__ import annotations

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_MADE = """        super().__init__(config)
        self.embed"""
_ASKED = """        if not isinstance(self, PreTrainedModel):
            super().__init__()
        else:
            super().__init__(config)
        self.embed"""
_UP = "        self.up = nn.Linear("
_BIAS = """        self.factor = 777.0 if isinstance(self, (Block, Norm)) else 0.5
        self.up = nn.Linear("""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the model file of a model whose constructors ask."""
    mlp = "return self.down(F.silu(self.gate(x)) * self.up(x) * self.factor)"
    folder = save_odd(tmp_path_factory.mktemp("own") / "odd_asked", mlp=mlp)
    file = folder / "modeling_odd.py"
    code = file.read_text()
    assert _MADE in code
    assert _UP in code
    file.write_text(code.replace(_MADE, _ASKED).replace(_UP, _BIAS))
    found = run_apart(GENERATE, [folder])["odd_asked"]
    assert found.get("worst", 1.0) < 1e-4, found
    return str(found["text"])


def test_what_a_constructor_asks_of_its_object_is_decided_by_its_class(text: str) -> None:
    assert "isinstance" not in text
    assert "PreTrainedModel" not in text
    assert "0.5" in text
    assert "777" not in text
