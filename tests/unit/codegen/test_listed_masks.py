"""Masks that layers get in a list: one of the padding, of which there is none, and a causal one."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_HEAD = """

def causal(x):
    t = x.shape[1]
    mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)
    return mask[None, None].expand(x.shape[0], 1, -1, -1)
"""
_MODEL = """
x = self.embed(input_ids)
masks = [None, causal(x)]
for layer in self.layers:
    x = layer(x, position_ids, masks)
return self.norm(x)
"""
_BLOCK = """
x = x + self.attn(self.norm1(x), position_ids, masks[1])
return x + self.mlp(self.norm2(x))
"""
_OWN = ATTENTION.replace("mask = torch.triu", "none = torch.triu").replace(
    'scores.masked_fill(mask, float("-inf"))', "scores + MASK if MASK is not None else scores"
)


def _saved(folder: Path, attention: str, block: str = _BLOCK) -> Path:
    save_odd(folder, head=_HEAD, model=_MODEL, attention=attention, block=block)
    file, old = folder / "modeling_odd.py", "def forward(self, x, position_ids):"
    file.write_text(file.read_text().replace(old, old.replace("):", ", masks=None):")))
    return folder


def test_a_mask_that_layers_get_in_a_list_is_the_causal_one(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "odd_list", _OWN.replace("MASK", "masks"))
    found = run_apart(GENERATE, [folder])["odd_list"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert "torch_attention(" in found["text"]
    assert "mask" not in found["text"].replace("attention_mask", "")


def test_the_other_item_of_such_a_list_is_no_mask(tmp_path: Path) -> None:
    """Attention without a mask sees later tokens, and is refused."""
    block = _BLOCK.replace("masks[1]", "masks[0]")
    found = run_apart(
        GENERATE, [_saved(tmp_path / "odd_none", _OWN.replace("MASK", "masks"), block)]
    )
    assert "not causal" in found["odd_none"]["error"]
