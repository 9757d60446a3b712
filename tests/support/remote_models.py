"""Checkpoints of models that bring their own code, and the command on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

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


def quantise_in_blocks(folder: Path) -> dict[str, torch.Tensor]:
    """Give a checkpoint in one file FP8 weights in blocks of 128 x 128, as released mixtures have them;
    return the values of all its weights by name, float32.
    """
    [path] = folder.glob("*.safetensors")
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        is_linear = tensor.ndim == 2 and "proj" in name
        parts = _in_blocks(tensor.float()) if is_linear else None
        values[name] = tensor.float() if parts is None else parts[2]
        stored[name] = tensor if parts is None else parts[0]
        if parts is not None:
            stored[f"{name}_scale_inv"] = parts[1]
    save_file(stored, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return values


def _in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales [row blocks, column blocks] and values."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread
