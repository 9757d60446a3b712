"""Code of omni models: positions of three axes, which text has the same, and a path of one token that
reads what a longer text left at the module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

OF_AXES = (
    ATTENTION.replace(
        "angles = position_ids[:, None, :, None].float() * inv",
        "angles = position_ids[:, :, None, :, None].float() * inv",
    )
    .replace("cos, sin = torch.cat", "all_cos, all_sin = torch.cat")
    .replace(
        "def turn(y):",
        "cos = torch.cat([part[i % 3] for i, part in enumerate(all_cos.split([1, 1, 1] * 4, -1))], -1)\n"
        "sin = torch.cat([part[i % 3] for i, part in enumerate(all_sin.split([1, 1, 1] * 4, -1))], -1)\n"
        "def turn(y):",
    )
)
MODEL = """
b, t = input_ids.shape
if self.kind == "axes" and input_ids.shape[1] != 1:
    position_ids = torch.arange(t, device=input_ids.device)WAY
    self.behind = torch.zeros(b, 1, dtype=torch.long, device=input_ids.device)
else:
    first = torch.zeros(1, dtype=torch.long, device=input_ids.device) + self.behind
    position_ids = first[None].expand(3, b, t)
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x)
"""
WAYS = {
    "viewed": ".view(1, 1, -1).expand(3, b, -1)",
    "indexed": "[None, None].expand(3, b, -1)",
    "repeated": ".unsqueeze(0).unsqueeze(0).repeat(3, b, 1)",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of a model of each way, in one process."""
    root, folders = tmp_path_factory.mktemp("axes"), list[Path]()
    for key, way in WAYS.items():
        folder = save_odd(root / f"axes_{key}", attention=OF_AXES, model=MODEL.replace("WAY", way))
        file = folder / "modeling_odd.py"
        before = "        self.embed = "
        kept = f'        self.kind, self.behind = "axes", None\n{before}'
        file.write_text(file.read_text().replace(before, kept))
        folders.append(folder)
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("way", WAYS)
def test_text_has_the_same_position_on_all_axes(way: str, made: dict[str, Any]) -> None:
    found = made[f"axes_{way}"]
    assert found.get("error") is None
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    assert "position_ids.unsqueeze(0)" in found["text"]
    assert "behind" not in found["text"]
