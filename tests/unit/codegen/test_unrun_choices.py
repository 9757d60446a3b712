"""Modules that nothing runs keep their weights where the config chooses their classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_MADE = "        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)\n"
_GATE = """

class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


class Gate(nn.Module):
    def __init__(self, size, inputs, scaled):
        super().__init__()
        self.inputs = inputs
        self.norm = Scale(size) if scaled and "a" in self.inputs else nn.Identity()
        self.linear = nn.Linear(size, 3)

    def forward(self, x):
        return self.linear(self.norm(x))
"""


@pytest.mark.parametrize(("scaled", "wanted"), [(True, True), (False, False)])
def test_a_class_that_the_config_chooses_is_made_though_nothing_runs_it(
    scaled: bool, wanted: bool, tmp_path: Path
) -> None:
    folder = save_odd(tmp_path / "odd_gate")
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    made = f"{_MADE}        self.gate = Gate(config.hidden_size, config.inputs, config.scaled)\n"
    code.write_text(code.read_text().replace(_MADE, made) + _GATE)
    fields = f"norm_eps=1e-5, inputs=('a', 'b'), scaled={scaled}, "
    kept = "        self.inputs, self.scaled = inputs, scaled\n        self.norm_eps"
    text = config.read_text().replace("norm_eps=1e-5, ", fields, 1)
    config.write_text(text.replace("        self.norm_eps", kept, 1))
    found = run_apart(GENERATE, [folder])["odd_gate"]
    assert found.get("error") is None
    assert ("class Scale" in found["text"]) is wanted
    assert "class Identity" not in found["text"]
