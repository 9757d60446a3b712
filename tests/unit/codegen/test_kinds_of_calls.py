"""Forwards that run when they are called in one way and not in another."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_PLAIN = "return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))"
_KEEPING = """given = (self.model(input_ids, position_ids), *((input_ids,) if use_cache else ()))
        kept = given[1]
        return CausalLMOutputWithPast(logits=self.lm_head(given[0]), past_key_values=(kept,))"""


def test_a_forward_that_runs_only_where_it_keeps_something(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_keeping")
    file = folder / "modeling_odd.py"
    file.write_text(file.read_text().replace(_PLAIN, _KEEPING))
    found = run_apart(GENERATE, [folder])["odd_keeping"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    fact = "OddForCausalLM.forward fails with use_cache=False; it gets use_cache=True"
    assert fact in found["facts"]


_BLOCK = """
x, kept = x + self.attn(self.norm1(x), position_ids), x
x, kept = self.norm2(x, kept, True)
return kept + self.mlp(x)
"""
_NORM = """    def forward(self, x, before=None, both=False):
        if before is not None:
            x = x + before
        wide = x.float()
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (normed, x) if both else normed
"""


def test_what_some_calls_leave_out_has_its_default_before_one_that_is_no_none(
    tmp_path: Path,
) -> None:
    folder = save_odd(tmp_path / "odd_defaults", block=_BLOCK)
    file = folder / "modeling_odd.py"
    before, _, after = file.read_text().partition("    def forward(self, x):\n        wide")
    rest = after.partition("class Attention")[2]
    file.write_text(f"{before}{_NORM}\n\nclass Attention{rest}")
    found = run_apart(GENERATE, [folder])["odd_defaults"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "before: torch.Tensor | None = None, both: bool = False" in found["text"]
