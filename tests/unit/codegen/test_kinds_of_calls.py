"""Forwards that run when they are called in one way and not in another."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, assert_translated, run_apart, save_odd

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


_CACHED = """past = None
        if use_cache and not isinstance(past, Cache):
            past = DynamicCache.from_legacy_cache(past)
        before = 0 if past is None else past.get_seq_length()
        given = (self.model(input_ids[:, before:], position_ids), *((past,) if use_cache else ()))
        return CausalLMOutputWithPast(logits=self.lm_head(given[0]), past_key_values=given[1])"""


def test_a_cache_made_of_what_was_given_is_empty(tmp_path: Path) -> None:
    head = "from transformers.cache_utils import Cache, DynamicCache"
    folder = save_odd(tmp_path / "odd_legacy", head=head)
    file = folder / "modeling_odd.py"
    file.write_text(file.read_text().replace(_PLAIN, _CACHED))
    found = run_apart(GENERATE, [folder])["odd_legacy"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "Cache" not in found["text"].replace("use_cache", "")


def test_a_forward_whose_first_argument_is_another(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_mode")
    file = folder / "modeling_odd.py"
    given, other = "input_ids, position_ids=None, attention_mask", "mode=None, input_ids=None, "
    text = file.read_text()
    assert given in text
    file.write_text(text.replace(given, f"{other}position_ids=None, attention_mask"))
    assert_translated(run_apart(GENERATE, [folder])["odd_mode"])


_CHOSEN = 'scores = scores.masked_fill(mask, float("-inf"))'
_LONGEST = "        self.theta = config.rope_theta"


def test_a_table_as_long_as_another_field_says(tmp_path: Path) -> None:
    """Both fields are as many positions in the model that is proven, behind the number of the code."""
    masked = "scores = torch.where(self.hidden[:t, :t], float('-inf'), scores)"
    attention = ATTENTION.replace(_CHOSEN, masked).replace(
        "mask = ", "if t > 256: k = k + 0.0\nmask = "
    )
    folder = save_odd(tmp_path / "odd_context", attention=attention)
    file = folder / "modeling_odd.py"
    table = "torch.ones(config.n_ctx, config.n_ctx, dtype=torch.bool).triu(1)"
    made = f"{_LONGEST}\n        self.register_buffer('hidden', {table}, persistent=False)"
    file.write_text(file.read_text().replace(_LONGEST, made))
    sizes = folder / "config.json"
    sizes.write_text(sizes.read_text().replace("{", '{"n_ctx": 512, ', 1))
    assert_translated(run_apart(GENERATE, [folder])["odd_context"])
