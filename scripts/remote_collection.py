"""Small checkpoints of models with code of their own, as public repositories have it.

    python scripts/remote_collection.py fill CLONES OUT [NAME ...]
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py weights OUT NAME ...
    PYTHONPATH=<transformers of their year> python scripts/remote_collection.py judge OUT NAME LOGITS

`remote_collection.yaml` names repository, path and commit of each. CLONES is a folder with a git
repository `<owner>+<name>` of each, which the reader has cloned: nothing is fetched here, and none
of the files become part of this project. `fill` writes code and a small config; `weights` writes
random weights, from the repository's own class, with the transformers that it was written for;
`judge` writes the logits of that class for the tokens in LOGITS (`ids`) beside them (`logits`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".yaml")
_WORDS = 60
"""Tokens that the tokenizer of small checkpoints has."""
_NEIGHBOUR = re.compile(r"^from ((?:configuration|modeling|utils_quant|quantizer)\w*) import", re.M)


def table() -> dict[str, dict[str, Any]]:
    """Return what is known of each model of the collection."""
    import yaml

    return dict(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def fill(clones: Path, out: Path, *names: str) -> None:
    """Write code and config of the named models, or of all."""
    for name, entry in table().items():
        if not names or name in names:
            _fill_one(clones, out / name, entry)


def _fill_one(clones: Path, folder: Path, entry: dict[str, Any]) -> None:
    clone = clones / entry["repository"].replace("/", "+")
    git_folder = clone / "repo" if (clone / "repo").is_dir() else clone
    for file in entry["files"]:
        path = f"{entry['path']}/{file}" if "path" in entry else file
        command = ["git", "-C", str(git_folder), "show", f"{entry['commit']}:{path}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        target = folder / entry.get("rename", {}).get(file, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_NEIGHBOUR.sub(r"from .\1 import", text), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config.pop("quantization_config", None)
    config |= entry["config"]
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if config.get(name) is not None and config[name] > _WORDS:
            config[name] = token
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def weights(out: Path, *names: str) -> None:
    """Write random weights of the named models."""
    for name in names:
        try:
            _save_weights(out / name)
        except Exception as error:  # the next one may work
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")


def _save_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = _own_model(folder)
    generator = torch.Generator().manual_seed(1)
    seen: dict[int, str] = {}
    tensors = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(tensor), key) == key:
            if key in parameters:
                tensor.data.copy_(_random(key, tensor, generator))
            tensors[key] = tensor.detach().float().contiguous().clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    print(folder.name, len(tensors), "tensors")


def _random(key: str, tensor: Any, generator: Any) -> Any:
    import torch

    if tensor.dim() > 1:
        return torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    center = 0.0 if key.endswith("bias") else 1.0
    return torch.randn(tensor.shape, generator=generator) * 0.3 + center


def judge(out: Path, name: str, logits: Path) -> None:
    """Add the logits [batch, length, vocabulary] of the repository's own class to a file."""
    import torch
    from safetensors.torch import load_file, save_file

    model = _own_model(out / name)
    own = model.state_dict()
    loaded = load_file(str(out / name / "model.safetensors"))
    missing = [
        key for key in model.load_state_dict(loaded, strict=False).missing_keys if key in own
    ]
    print("not in the file:", missing)
    model.tie_weights()
    ids = load_file(str(logits))["ids"]
    with torch.no_grad():
        values = model.float().eval()(input_ids=ids, use_cache=False).logits
    save_file({"ids": ids, "logits": values.float().contiguous()}, str(logits))


def _own_model(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    config.torch_dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    return model.float().eval()


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    folders = 2 if command == "fill" else 1
    arguments: list[Any] = [Path(item) for item in rest[:folders]] + rest[folders:]
    if command == "judge":
        arguments[2] = Path(arguments[2])
    commands: dict[str, Any] = {"fill": fill, "weights": weights, "judge": judge}
    commands[command](*arguments)
