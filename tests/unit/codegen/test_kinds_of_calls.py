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
