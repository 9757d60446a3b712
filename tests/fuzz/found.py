"""Inputs that drawing has found to end otherwise than they may: each is asked again, in `make test`.

The files of a kind's input, one value of them changed to what was drawn, made as small as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.fuzz.kinds import CORPUS, Files, checkpoint, configs, in_model
from tests.fuzz.mutations import as_json


def header(change: Callable[[dict[str, Any]], object]) -> Files:
    """A checkpoint with another header of its weights."""
    files = checkpoint()
    data = files["model.safetensors"]
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    change(document)
    text = as_json(document)
    changed = len(text).to_bytes(8, "little") + text + data[8 + length :]
    return in_model(**files | {"model.safetensors": changed})


def source(**texts: str) -> Files:
    """A repository with other code."""
    files = {path.name: path.read_bytes() for path in CORPUS.glob("source/*.py")}
    files["config.json"] = as_json(configs()["own_code"])
    return in_model(**files | {f"{name}.py": text.encode() for name, text in texts.items()})


def config(of: str, **fields: Any) -> Files:
    """A checkpoint with another config."""
    text = as_json(configs()[of] | fields)
    return in_model(**checkpoint() | {"config.json": text})


FOUND: dict[str, tuple[str, Callable[[], Files]]] = {
    "a shape that is infinite": (
        "safetensors",
        lambda: header(lambda tensors: tensors["lm_head.weight"].update(shape=[float("inf"), 16])),
    ),
    "a field that transformers logs the config of": (
        "config",
        lambda: config("gemma3", sub_configs=None),
    ),
    "a model type that is a list, of code with an inner model": (
        "config",
        lambda: config("own_code", model_type=[]),
    ),
    "a module of a long name": (
        "source",
        lambda: source(modeling_tiny=f"from {'t' * 3000}ransformers import x\n"),
    ),
}
"""What it was -> its kind, and its files."""
