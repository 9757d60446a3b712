"""Code and config of a model, from a clone of its repository, into a folder."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.collection.table import table
from scripts.flat_packages import flat_package

_WORDS = 60
"""Tokens that the tokenizer of small checkpoints has."""
_BASE_FIELDS = {
    *("architectures", "auto_map", "model_type", "attn_implementation", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "transformers_version", "torch_dtype"),
    "_name_or_path",
}
"""Fields of config.json that the base of a config class takes."""


def fill(clones: Path, out: Path, *names: str) -> None:
    """Write code and config of the named models, or of all."""
    for name, entry in table().items():
        if not names or name in names:
            _fill_one(clones, out / name, entry)


def _fill_one(clones: Path, folder: Path, entry: dict[str, Any]) -> None:
    clone = clones / entry["repository"].replace("/", "+")
    git_folder = clone / "repo" if (clone / "repo").is_dir() else clone
    renamed = entry.get("rename", {})
    modules = {
        Path(file).stem: Path(renamed.get(file, file)).stem
        for file in entry["files"]
        if file.endswith(".py")
    }
    of_config, _, _ = entry["config"].get("auto_map", {}).get("AutoConfig", "").partition(".")
    modules.setdefault(of_config or "-", of_config)
    for file in entry["files"]:
        path = f"{entry['path']}/{file}" if "path" in entry else file
        command = ["git", "-C", str(git_folder), "show", f"{entry['commit']}:{path}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        target = folder / renamed.get(file, file)
        target.parent.mkdir(parents=True, exist_ok=True)
        own = text.removeprefix("\ufeff")  # which transformers takes for a part of the code
        target.write_text(_with_neighbours(own, modules), encoding="utf-8")
    if "modules" in entry:
        _fill_flat(git_folder, folder, entry)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config.pop("quantization_config", None)
    config |= entry["config"]
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if config.get(name) is not None and config[name] > _WORDS:
            config[name] = token
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_config_class(folder, config)


def _fill_flat(git_folder: Path, folder: Path, entry: dict[str, Any]) -> None:
    """Write the modules of a package that an entry names, and what they import of it, in one folder."""

    @functools.cache
    def read(path: str) -> str | None:
        place = f"{entry['commit']}:{entry['path']}/{path}"
        command = ["git", "-C", str(git_folder), "show", place]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if found.returncode else found.stdout

    folder.mkdir(parents=True, exist_ok=True)
    package, installed = Path(entry["path"]).name, entry.get("installed", ())
    for name, text in flat_package(read, package, entry["modules"], installed).items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_config_class(folder: Path, config: dict[str, Any]) -> None:
    """Write the config class that auto_map names, where the repository has the model's file alone:
    it takes the fields of its config.
    """
    module, _, name = config["auto_map"].get("AutoConfig", "").partition(".")
    if not name or (folder / f"{module}.py").exists():
        return
    fields = {key: value for key, value in config.items() if key not in _BASE_FIELDS}
    taken = "".join(f", {key}={value!r}" for key, value in fields.items())
    lines = [
        "from transformers import PretrainedConfig",
        "",
        f"class {name}(PretrainedConfig):",
        f"    model_type = {config['model_type']!r}",
        '    keys_to_ignore_at_inference = ["past_key_values"]',
        "",
        f"    def __init__(self{taken}, **kwargs):",
        *(f"        self.{key} = {key}" for key in fields),
        "        super().__init__(**kwargs)",
    ]
    (folder / f"{module}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_neighbours(text: str, modules: dict[str, str]) -> str:
    """Import modules of the same folder, by their new names, and transformers by its name where a
    file is from its own tree, as code on the Hub does: config classes, too, that are not beside it.
    """
    for old, new in modules.items():
        dots = r"\.+" if old in sys.stdlib_module_names else r"\.*"
        here = rf"^([ \t]*)from (?!transformers\b){dots}(?:\w+\.)*{old} import"
        text = re.sub(here, rf"\1from .{new} import", text, flags=re.M)
    text = re.sub(r"^([ \t]*)from \.\.\.(?=\w)", r"\1from transformers.", text, flags=re.M)
    own = "|".join(modules) or "-"
    absent = rf"^from \.(?!(?:{own})\b)(configuration_(\w+)) import"
    return re.sub(absent, r"from transformers.models.\2.\1 import", text, flags=re.M)
