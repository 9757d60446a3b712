"""Tables that code makes anew for texts beyond the number of positions, where no text goes: what they
hold may depend on their length, as ALiBi's slopes do in some code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
scores = q @ k.transpose(2, 3) / math.sqrt(self.size) + position_ids
y = F.softmax(scores, dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
HEAD = """

def slopes_of(heads, longest):
    wider = torch.tensor(longest) / 90
    wider = wider.masked_fill(wider < 1.0, 1.0) ** 0.25
    return [2.0 ** (-8.0 * (k + 1) / heads) / wider for k in range(heads)]


def mask_of(x, heads, longest):
    slopes = torch.Tensor(slopes_of(heads, longest))
    places = torch.arange(longest) - longest + 1
    places = places.unsqueeze(0).unsqueeze(0).expand(heads, -1, -1)
    diagonal = torch.diag(places[0])
    places = places - diagonal.unsqueeze(0).unsqueeze(0).transpose(-1, -2)
    biases = (slopes.unsqueeze(1).unsqueeze(1) * places).view(heads, 1, longest)
    hidden = torch.triu(torch.zeros([longest, longest]).float().fill_(float("-inf")), 1)
    return hidden.unsqueeze(0) + biases
"""
MODEL = """
x = self.embed(input_ids)
mask = self.mask(x, input_ids.shape[1])
for layer in self.layers:
    x = layer(x, mask)
return self.norm(x)
"""
METHOD = """
    def mask(self, x, length):
        if self.first:
            self.first = False
            self.register_buffer("hidden", mask_of(x, self.heads, self.longest).to(x), persistent=False)
        if length > self.longest:
            self.longest = length
            self.register_buffer("hidden", mask_of(x, self.heads, self.longest).to(x), persistent=False)
        return self.hidden[: self.heads, :length, :length]

"""


def _made(folder: Path, longest: str) -> dict[str, str]:
    save_odd(folder, head=HEAD, attention=ATTENTION, model=MODEL)
    file = folder / "modeling_odd.py"
    before, forward = (
        "        self.embed = ",
        "    def forward(self, input_ids, position_ids=None):",
    )
    kept = f"        self.longest = {longest}\n        self.first = True\n"
    kept += f"        self.heads = config.num_attention_heads\n{before}"
    text = (
        file.read_text()
        .replace(before, kept)
        .replace(forward, f"{METHOD.lstrip(chr(10))}{forward}")
    )
    file.write_text(text)
    found: dict[str, str] = run_apart(GENERATE, [folder])[folder.name]
    return found


def test_a_table_of_all_positions_is_not_made_anew(tmp_path: Path) -> None:
    found = _made(tmp_path / "longest", "config.max_position_embeddings")
    assert found.get("error") is None
    assert float(found["worst"]) < 1e-5
    assert found["text"].count("slopes_of(") == 2
    assert "nn.Buffer(" in found["text"]


@pytest.mark.parametrize("longest", ["config.max_position_embeddings // 8", "20"])
def test_a_model_whose_table_is_that_of_its_longest_text_yet_is_refused(
    longest: str, tmp_path: Path
) -> None:
    found = _made(tmp_path / "shorter", longest)
    assert "other logits" in found["error"]
