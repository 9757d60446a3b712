"""Tables of positions that a function is handed in a tuple, and cuts to the length of the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_HEAD = """
from einops import rearrange, repeat


def turned(x):
    x = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), axis=-1)
    return rearrange(x, "... d j -> ... (d j)")


def rotated(x, sincos, offset=0):
    {cut}
    return x * cos + turned(x) * sin
"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
q = rotated(q, (self.sin, self.cos)).transpose(1, 2)
k = rotated(k, (self.sin, self.cos)).transpose(1, 2)
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
scores = scores.masked_fill(mask, float("-inf"))
y = F.softmax(scores, dim=-1) @ v.transpose(1, 2)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_PART = "t[offset:x.shape[1] + offset, :]"
_WIDE = 'repeat({part}, "n d -> () n () (d j)", j=2)'
CUTS = {
    "mapped": f"sin, cos = map(lambda t: {_WIDE.format(part=_PART)}, sincos)",
    "one_by_one": "\n    ".join(
        f"{key} = {_WIDE.format(part=f'sincos[{place}][: x.shape[1]]')}"
        for place, key in enumerate(("sin", "cos"))
    ),
}
_MADE = """        angles = torch.einsum(
            "i,j->ij",
            torch.arange(config.max_position_embeddings).float(),
            1.0 / 10000 ** (torch.arange(0, self.size, 2).float() / self.size),
        )
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())
"""


def _save(folder: Path, cut: str) -> Path:
    file = save_odd(folder, head=_HEAD.replace("{cut}", cut), attention=_ATTENTION) / (
        "modeling_odd.py"
    )
    text, behind = file.read_text(), "        self.theta = config.rope_theta\n"
    assert behind in text
    file.write_text(text.replace(behind, behind + _MADE))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("tables")
    return run_apart(GENERATE, [_save(folder / key, cut) for key, cut in CUTS.items()])


@pytest.mark.parametrize("name", [*CUTS])
def test_their_rows_are_those_of_the_positions(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    assert_translated(found[name])
    assert "[position_ids]" in str(found[name]["text"])
