"""Masks that a model makes of positions and hands to its attention: windows and chunks longer than any
text that is tried first are found by the numbers of the code.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_MODEL = """
t = input_ids.shape[1]
i = torch.arange(t, device=input_ids.device)
d = i[:, None] - i[None]
seen = (d >= 0) & (TEST)
x = self.embed(input_ids)
for layer in self.layers:
    x = layer(x, position_ids, seen[None, None])
return self.norm(x)
"""
_BLOCK = """
x = x + self.attn(self.norm1(x), position_ids, seen)
return x + self.mlp(self.norm2(x))
"""
_ATTENDED = ATTENTION.replace(
    "scores = scores.masked_fill(mask,", "scores = scores.masked_fill(~seen,"
)
_SIGNATURE = "def forward(self, x, position_ids):"
MASKS = {
    "window": ("d < 480", "sliding_window=480"),
    "chunks": ("i[:, None] // 256 == i[None] // 256", "chunk_size=256"),
    "holes": ("(d < 64) | (d % 8 == 0)", None),
}
"""Name -> what a query sees, and what the op is told, if it is one."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of all models, in one process."""
    root = tmp_path_factory.mktemp("masks")
    folders = [
        save_odd(
            root / f"masked_{key}",
            attention=_ATTENDED,
            block=_BLOCK,
            model=_MODEL.replace("TEST", test),
        )
        for key, (test, _) in MASKS.items()
    ]
    for file in (folder / "modeling_odd.py" for folder in folders):
        handed = _SIGNATURE.replace("position_ids", "position_ids, seen=None")
        file.write_text(file.read_text().replace(_SIGNATURE, handed))
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("key", MASKS)
def test_a_mask_is_what_the_op_is_told(made: dict[str, Any], key: str) -> None:
    found, told = made[f"masked_{key}"], MASKS[key][1]
    if told is None:
        assert "sliding_window" not in found.get("text", "")
        return
    assert "error" not in found, found
    assert found["worst"] < 1e-5
    assert told in found["text"]
