"""Repositories as other people's editors and scripts leave them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd


def test_marks_of_editors_names_of_other_repositories_and_lists_of_tokens(tmp_path: Path) -> None:
    """A byte order mark and ends of lines of Windows, code that auto_map names elsewhere and that lies
    here, too, and as many tokens at which texts end as layers.
    """
    folder = save_odd(tmp_path / "odd_saved")
    for file in folder.glob("*.py"):
        file.write_text(file.read_text(), encoding="utf-8-sig", newline="\r\n")
    config = json.loads((folder / "config.json").read_text())
    named = {key: f"someone/their-model--{name}" for key, name in config["auto_map"].items()}
    tokens = [*range(2, 2 + config["num_hidden_layers"])]
    changed = config | {"auto_map": named, "eos_token_id": tokens}
    (folder / "config.json").write_text(json.dumps(changed))
    found = run_apart(GENERATE, [folder])["odd_saved"]
    assert found["worst"] <= 1e-5, found
