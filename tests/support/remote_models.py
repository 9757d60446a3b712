"""Checkpoints of models that bring their own code, and the command on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.checkpoints import save_tokenizer
from tests.support.warm import run_program

CODE = Path(__file__).parent / "remote_code"
_SAVE = """
import json, sys
from pathlib import Path
from onboard.analysis.repository import install
from onboard.analysis.tiny.loaded_config import (load_config)
from onboard.analysis.tiny.tiny_model import (build_tiny, made_with)
folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
install(folder, config)
model = build_tiny(load_config(config))
architectures = config["architectures"]
model.save_pretrained(folder / "saved")
config = made_with(model)  # the constructor may have changed the model's own
config.architectures = architectures
config.save_pretrained(folder / "saved")
"""


def save_remote(style: str, folder: Path, **fields: Any) -> Path:
    """Save a random checkpoint of a style's model with its code beside it; return the folder."""
    shutil.copytree(CODE / style, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    run_program(_SAVE, folder)
    saved = folder / "saved"
    config = json.loads((saved / "config.json").read_text())
    path.write_text(json.dumps({**config, "auto_map": json.loads(path.read_text())["auto_map"]}))
    for file in saved.glob("*.safetensors*"):
        file.rename(folder / file.name)
    shutil.rmtree(saved)
    save_tokenizer(folder)
    return folder
