"""Tables of modules that a constructor adds to."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_PARTS = ("embed", "layers", "norm")
_MADE = """
        self.parts = nn.ModuleDict({'embed': nn.Embedding(config.vocab_size, config.hidden_size)})
        if config.rope_theta > 1e9:
            self.parts.update({'other': Norm(config.hidden_size, config.norm_eps)})
        self.parts.update({
            'layers': nn.ModuleList([Block(config, i) for i in range(config.num_hidden_layers)]),
            'norm': Norm(config.hidden_size, config.norm_eps),
        })
        self.post_init()"""
_MODEL = """
x = self.parts["embed"](input_ids)
for layer in self.parts.layers:
    x = layer(x, position_ids)
return self.parts["norm"](x)
"""


def test_a_table_of_modules_that_more_are_put_into(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_table", model=_MODEL)
    file = folder / "modeling_odd.py"
    before, of_model = file.read_text().split("class OddModel")
    made, behind = of_model.split("self.post_init()", 1)
    lines = made.rstrip().splitlines()
    kept = [line for line in lines if not any(f"self.{part} =" in line for part in _PARTS)]
    file.write_text(f"{before}class OddModel" + "\n".join(kept) + _MADE + behind)
    found = run_apart(GENERATE, [folder])["odd_table"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    assert "other" not in found["text"]
