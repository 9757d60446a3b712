"""What constructors ask of texts that a config holds, as kinds of RoPE: model files ask it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

_ASKED = {
    "begins": 'kind.startswith("dynamic")',
    "parts": 'kind.partition("-")[2] == "yarn"',
    "matches": 're.match(r"^dynamic-(\\w+)$", kind).group(1) == "yarn"',
    "is_whole": 're.fullmatch(r"\\w+-yarn", kind) and not re.search("linear", kind)',
    "ends": 'kind.upper().strip().removesuffix("YARN") == "DYNAMIC-"',
}


def _asking(folder: Path, asked: str) -> Path:
    """Return the folder of a model whose base of RoPE depends on a text of its config."""
    save_odd(folder, head="import re\n")
    config, model = folder / "configuration_odd.py", folder / "modeling_odd.py"
    text = config.read_text().replace("norm_eps=1e-5,", 'norm_eps=1e-5, kind="dynamic-yarn",')
    config.write_text(
        text.replace("        self.norm_eps", "        self.kind = kind\n        self.norm_eps")
    )
    made = f"        kind = config.kind\n        self.theta = 500.0 if {asked} else 1e6"
    model.write_text(model.read_text().replace("        self.theta = config.rope_theta", made))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base: Path = tmp_path_factory.mktemp("asked")
    return run_apart(GENERATE, [_asking(base / name, asked) for name, asked in _ASKED.items()])


@pytest.mark.parametrize("name", _ASKED)
def test_a_text_is_asked(found: dict[str, Any], name: str) -> None:
    assert found[name].get("worst", 1.0) < 1e-5, found[name].get("error")
    assert "config.kind" in found[name]["text"]
