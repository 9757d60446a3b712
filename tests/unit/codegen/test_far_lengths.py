"""What code does differently from some token on, however far, is seen where models count positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_COUNTS = """
position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x)
"""
_FAR = "        x = torch.cat((x[:, :SPAN], x[:, SPAN:].abs()), dim=1)\n"
_POSITIONS = {
    "odd_said": {"max_position_embeddings=512": "max_position_embeddings=1024"},
    "odd_unsaid": {
        "max_position_embeddings=512, ": "",
        "        self.max_position_embeddings = max_position_embeddings\n": "",
    },
}
"""What configs say of how many positions there are."""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of models whose norm is another one from token 600 on."""
    folder = tmp_path_factory.mktemp("far")
    return run_apart(GENERATE, [_saved(folder / name, to) for name, to in _POSITIONS.items()])


def _saved(folder: Path, fields: dict[str, str]) -> Path:
    code = save_odd(folder, model=_COUNTS, head="SPAN = 600\n") / "modeling_odd.py"
    inside = "        wide = x.float()\n"
    _change(code, {inside: _FAR + inside})
    _change(folder / "configuration_odd.py", fields)
    return folder


def _change(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)


@pytest.mark.parametrize("name", _POSITIONS)
def test_a_norm_that_changes_far_behind_is_not_proven(name: str, generated: dict[str, Any]) -> None:
    assert "model.layers.0.norm1 (Norm) differs" in generated[name].get("error", "it is proven")
