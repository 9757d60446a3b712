"""Functions of the repository whose names its callers give to values, or that have one name in two modules."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

_HEAD = """
def spread(x, scale):
    for _ in range(2):
        wide = x.float()
        if x.shape[-1] > 7:
            scale = scale + wide.square().mean(dim=-1, keepdim=True)
        x = (wide / (1.0 + scale)).to(x.dtype)
    return x


spread_of_rows = spread
"""
_MLP = """
spread = self.gate(x)
first = spread_of_rows(spread, 0.5)
return self.down(first * self.up(spread_of_rows(x, 0.25)))
"""


def test_a_value_has_the_name_of_a_function_that_its_caller_calls(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_hidden", head=_HEAD, mlp=_MLP)
    found = run_apart(GENERATE, [folder])["odd_hidden"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    assert found["text"].count("spread_of(") == 3


def test_functions_of_two_modules_have_one_name(tmp_path: Path) -> None:
    head = _HEAD + "from .helpers_odd import spread as spread_of_others\n"
    mlp = _MLP.replace("spread_of_rows(x, 0.25)", "spread_of_others(x, 0.25)")
    folder = save_odd(
        tmp_path / "odd_names",
        head=head,
        mlp=mlp.replace("spread = ", "gates = ").replace("(spread,", "(gates,"),
    )
    other = _HEAD.partition("spread_of_rows")[0].replace("1.0 + scale", "2.0 + scale")
    (folder / "helpers_odd.py").write_text(other)
    found = run_apart(GENERATE, [folder])["odd_names"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
