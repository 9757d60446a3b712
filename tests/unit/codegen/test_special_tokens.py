"""Tokens that code treats by themselves, whatever a small vocabulary lacks: a file that does otherwise
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_NUMBER = 210
"""The last of the vocabulary; the small one ends before."""
_MODEL = """
b, t = input_ids.shape
seen = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril()[None, None]
MASK
x = self.embed(input_ids)
for layer in self.layers:
    x = layer((x, seen), position_ids)
return self.norm(x)
"""
_BLOCK = """
x, seen = x
x = x + self.attn((self.norm1(x), seen), position_ids)
return x + self.mlp(self.norm2(x))
"""
_ATTENDED = ATTENTION.replace("b, t, _ = x.shape", "x, seen = x\nb, t, _ = x.shape").replace(
    "scores = scores.masked_fill(mask,", "scores = scores.masked_fill(~seen,"
)
MASKS = {
    "causal": "",
    "documents": f"""
row = (input_ids == {_NUMBER}).cumsum(1)
seen = seen & (row[:, None, :, None] == row[:, None, None, :])
""",
    "padding": f"seen = seen & (input_ids != {_NUMBER})[:, None, None, :]",
}
_LISTED = """
breaks = torch.isin(input_ids, torch.tensor(self.config.breaks, device=input_ids.device))
row = breaks.cumsum(1)
seen = seen & (row[:, None, :, None] == row[:, None, None, :])
"""
_EMBEDDED = """
x = self.embed(input_ids)
x = torch.where((input_ids == 210)[..., None], torch.zeros_like(x), x)
for layer in self.layers:
    x = layer(x, position_ids)
return self.norm(x)
"""
_LOGITS = "return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))"
_SUPPRESSED = f"""logits = self.lm_head(self.model(input_ids, position_ids))
        logits[..., {_NUMBER}] = -1e9
        return CausalLMOutputWithPast(logits=logits)"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of all models, in one process."""
    root = tmp_path_factory.mktemp("special")
    folders: list[Path] = []
    for key, mask in MASKS.items():
        bodies = {"attention": _ATTENDED, "block": _BLOCK, "model": _MODEL.replace("MASK", mask)}
        folders.append(save_odd(root / f"special_{key}", **bodies))
    folders.append(save_odd(root / "special_embedded", model=_EMBEDDED))
    bodies = {"attention": _ATTENDED, "block": _BLOCK, "model": _MODEL.replace("MASK", _LISTED)}
    folders.append(listed := save_odd(root / "special_listed", **bodies))
    settings = listed / "configuration_odd.py"
    text = settings.read_text().replace("norm_eps=1e-5,", "norm_eps=1e-5, breaks=(187, 203),")
    kept = "self.breaks = list(breaks)"
    settings.write_text(text.replace("self.norm_eps =", f"{kept}\n        self.norm_eps ="))
    suppressed = save_odd(root / "special_suppressed")
    file = suppressed / "modeling_odd.py"
    assert _LOGITS in file.read_text()
    file.write_text(file.read_text().replace(_LOGITS, _SUPPRESSED))
    return run_apart(GENERATE, [*folders, suppressed])


@pytest.mark.parametrize("key", ["causal", "embedded", "suppressed"])
def test_what_a_file_says_of_a_token_is_proven(made: dict[str, Any], key: str) -> None:
    found = made[f"special_{key}"]
    assert "error" not in found, found
    assert found["worst"] < 1e-5
    assert (str(_NUMBER) in found["text"]) is (key != "causal")


@pytest.mark.parametrize("key", ["documents", "padding", "listed"])
def test_a_mask_that_a_token_decides_is_not_lost(made: dict[str, Any], key: str) -> None:
    found = made[f"special_{key}"]
    kept = (
        "cumsum" in found.get("text", "")
        or "padding" in key
        and str(_NUMBER) in found.get("text", "")
    )
    assert kept or "treats some tokens by themselves" in found.get("error", ""), found
