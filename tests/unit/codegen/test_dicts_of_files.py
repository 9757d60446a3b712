"""Switches in a dict of the file, as they are where nobody has turned them, and a dict of the config
among arguments of another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, assert_translated, run_apart, save_odd

_SWITCHES = """
BOOST = {"enabled": False, "wide": True, "count": 2}


def set_boost(enabled):
    BOOST["enabled"] = enabled
"""
_SOFTMAX = "y = F.softmax(scores, dim=-1) @ v\n"
_BOOSTED = f"""if BOOST["enabled"] and t == 1:
    scores[:, :, :, : BOOST["count"]] += 0.5
if BOOST["wide"]:
    v = v * 1.5
{_SOFTMAX}"""
_TURNED = f'BOOST["enabled"] = t > 4\n{_BOOSTED}'
_FIELDS = {"theta": 500.0, "unused": "text"}


def _with_switches(folder: Path, boosted: str) -> Path:
    assert _SOFTMAX in ATTENTION
    return save_odd(folder, head=_SWITCHES, attention=ATTENTION.replace(_SOFTMAX, boosted))


def _set_by_a_constructor(folder: Path) -> Path:
    file = _with_switches(folder, _BOOSTED) / "modeling_odd.py"
    old = "        self.theta = config.rope_theta"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, f'        BOOST["enabled"] = config.norm_eps > 1\n{old}'))
    return folder


def _with_a_dict(folder: Path) -> Path:
    """Return a model whose attention is made with a dict of the config, behind an item of its own."""
    save_odd(folder)
    config, code = folder / "configuration_odd.py", folder / "modeling_odd.py"
    declared = config.read_text().replace("norm_eps=1e-5,", f"norm_eps=1e-5, rotary={_FIELDS},")
    config.write_text(
        declared.replace(
            "        self.norm_eps", "        self.rotary = rotary\n        self.norm_eps"
        )
    )
    text = code.read_text()
    for old, new in (
        (
            "class Attention(nn.Module):\n    def __init__(self, config):",
            "class Attention(nn.Module):\n    def __init__(self, config, kind, theta, unused):",
        ),
        (
            "self.theta = config.rope_theta",
            "self.theta = theta if kind == 'own' else config.rope_theta",
        ),
        (
            "        self.attn = Attention(config)",
            "        given = {'kind': 'own', **config.rotary}\n        self.attn = Attention(config, **given)",
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    code.write_text(text)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dicts")
    models = [
        _with_switches(folder / "odd_off", _BOOSTED),
        _with_switches(folder / "odd_turned", _TURNED),
        _set_by_a_constructor(folder / "odd_set"),
        _with_a_dict(folder / "odd_spread"),
    ]
    return run_apart(GENERATE, models)


def test_a_branch_that_a_switch_decides_is_left_out(found: dict[str, Any]) -> None:
    assert_translated(found["odd_off"])
    assert "BOOST" not in found["odd_off"]["text"]


@pytest.mark.parametrize("name", ["odd_turned", "odd_set"])
def test_a_switch_that_the_model_turns_is_none(name: str, found: dict[str, Any]) -> None:
    assert "error" in found[name], found[name]["text"]


def test_a_dict_of_the_config_gives_arguments(found: dict[str, Any]) -> None:
    assert_translated(found["odd_spread"])
    assert "sorted(config.rotary)" in found["odd_spread"]["text"]
