"""What code knows by a name: the class of a module, attention in a table, a field of all configs."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_PLAIN = "return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, position_ids)))"
_ATTN = "        self.attn = Attention(config)"
_MADE = """for i in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.norm_eps)"""


def test_the_name_of_a_modules_class_decides_a_branch(tmp_path: Path) -> None:
    block = """
if self.norm1.__class__.__name__ == "OtherNorm":
    x = self.norm1(x, x, position_ids)
if self.__class__.__name__ != "Block":
    return x
x = x + self.attn(self.norm1(x), position_ids)
return x + self.mlp(self.norm2(x))
"""
    found = run_apart(GENERATE, [save_odd(tmp_path / "odd_named", block=block)])["odd_named"]
    assert_translated(found)
    assert "__class__" not in found["text"]


def test_a_table_of_attention_that_lacks_eager_gets_torchs(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_table")
    file = folder / "modeling_odd.py"
    text = file.read_text()
    table = 'ATTENTIONS = {"sdpa": Attention}\n\n\nclass Mlp'
    text = text.replace("class Mlp", table).replace(
        _ATTN, "        self.attn = ATTENTIONS[config._attn_implementation](config)"
    )
    flag = '    base_model_prefix = "model"\n'
    file.write_text(text.replace(flag, f"{flag}    _supports_sdpa = True\n"))
    assert_translated(run_apart(GENERATE, [folder])["odd_table"])


def test_a_constructor_turns_on_what_forwards_give_beside(tmp_path: Path) -> None:
    model = """
kept = self.config.output_hidden_states
x, states = self.embed(input_ids), ()
for layer in self.layers:
    if kept:
        states += (x,)
    x = layer(x, position_ids)
return (self.norm(x), states) if kept else (self.norm(x),)
"""
    folder = save_odd(tmp_path / "odd_turned", model=model)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    assert _MADE in text
    text = text.replace(_MADE, f"{_MADE}\n        self.config.output_hidden_states = True")
    given = """given = self.model(input_ids, position_ids)
        states = given[1]
        return CausalLMOutputWithPast(logits=self.lm_head(given[0]))"""
    file.write_text(text.replace(_PLAIN, given))
    assert_translated(run_apart(GENERATE, [folder])["odd_turned"])
