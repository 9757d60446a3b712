"""Sizes of the checkpoint that code has as numbers, too: small models keep them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.support.remote_models import CODE
from tests.support.warm import run_program

SIZES = """
import json, sys
from pathlib import Path
from onboard.analysis.repository import install
from onboard.analysis.tiny.loaded_config import (load_config)
from onboard.analysis.tiny.tiny_model import (build_tiny)
from onboard.errors import OnboardError
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    install(folder, config)
    try:
        made = build_tiny(load_config(config)).config
    except OnboardError as error:
        print(error)
    else:
        print(made.intermediate_size, made.vocab_size == config["vocab_size"])
"""


def _checkpoint(folder: Path, said: int, written: int, *, cuts: bool = False) -> str:
    """Write one of `fused2023` whose config has another width than the number in its code, and whose
    logits are cut to as many tokens as there are words.
    """
    shutil.copytree(CODE / "fused2023", folder, ignore=shutil.ignore_patterns("__pycache__"))
    code = folder / "modeling_boreal.py"
    text = code.read_text()
    wide = "self.down_proj = nn.Linear(intermediate_size"
    assert wide in text
    text = text.replace(wide, f"self.down_proj = nn.Linear({written}")
    whole = "logits = self.lm_head(hidden_states)"
    assert whole in text
    if cuts:
        text = text.replace(whole, f"{whole}[:, : self.config.vocab_size]")
    code.write_text(text)
    path = folder / "config.json"
    sizes = {"intermediate_size": said, "vocab_size": 9000, "model_type": folder.name}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return str(folder)


def test_a_size_that_code_has_as_a_number_stays(tmp_path: Path) -> None:
    folders = [_checkpoint(tmp_path / f"wide{said}", said, 176) for said in (176, 192)]
    folders.append(_checkpoint(tmp_path / "cut96", 96, 96, cuts=True))
    kept, refused, cut = run_program(SIZES, *folders).strip().splitlines()
    assert kept == "176 False"  # and no other field of the checkpoint's
    assert "the model's own code fails on a small model of this config" in refused
    assert cut == "96 True"  # no text is as long as the checkpoint's vocabulary
