"""The folder that a GGUF file is read from: the file under one name, its config, its tokenizer.

What stands beside the file comes first; what is missing is made of the file's metadata. The folder
is kept in the user's cache, and made again when one of the files has changed.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.sources.file_config import config_of
from onboard.sources.gguf_header import read_header
from onboard.sources.made_folders import kept_folders, make_whole, name_of_made
from onboard.untrusted.bounds import check_folder
from onboard.untrusted.silence import silence

GGUF_FILE = "model.gguf"
"""Its name in the folder that is made."""
TOKENIZER_ERROR = "tokenizer_error.txt"
_ENDING = ".gguf"
_TOWERS = "mmproj"
"""What names of files of towers for images begin with."""
_WEIGHTS = re.compile(r"model.*\.safetensors(\.index\.json)?")
"""What a model's own weights are called, unlike those of an adapter or a matrix of importance."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")


def is_gguf(model: str) -> bool:
    """Tell whether a model is named as a GGUF file: "folder/model.gguf", "org/name/model.gguf"."""
    return model.lower().endswith(_ENDING)


def is_local(model: str) -> bool:
    """Tell whether a model is named as a folder of this machine, or a GGUF file of it."""
    path = Path(model).expanduser()
    return path.is_dir() or (is_gguf(model) and path.is_file())


def gguf_of(path: Path) -> Path | None:
    """Return the GGUF file that a path is, or that a folder without weights in safetensors has; else
    None.
    """
    if not path.is_dir():
        return path
    names = [each.name for each in path.iterdir()]
    if any(_WEIGHTS.fullmatch(name) for name in names):
        return None
    found = only_gguf(names, str(path))
    return None if found is None else path / found


def only_gguf(files: list[str], model: str) -> str | None:
    """Return the one GGUF file among a folder's files; None without one; `OnboardError` for
    several.
    """
    found = sorted(
        name for name in files if is_gguf(name) and not Path(name).name.startswith(_TOWERS)
    )
    if len(found) > 1:
        raise OnboardError(
            f"{model} has {len(found)} GGUF files: {', '.join(found[:8])}",
            hint=f"Name one of them: {model}/{found[0]}",
        )
    return found[0] if found else None


def prepared_folder(file: Path, beside: Path | None = None) -> Path:
    """Return a folder with config, tokenizer and weights of a GGUF file; other files than the weights
    come from the folder `beside`, by default that of the file.

    Raises `OnboardError` for a damaged file, and one whose config is nowhere.
    """
    check_folder(beside or file.parent)
    header = read_header(file)
    others = {
        path.name: path
        for path in sorted((beside or file.parent).iterdir())
        if path.suffix in _BESIDE and path.is_file()
    }
    made = {} if "config.json" in others else config_of(header)
    folder = kept_folders("gguf") / name_of_made((file, *others.values()), made)
    if not folder.is_dir():
        make_whole(folder, partial(_fill, file=file, others=others, made=made))
    return folder


def _fill(folder: Path, file: Path, others: dict[str, Path], made: dict[str, Any]) -> None:
    (folder / GGUF_FILE).symlink_to(file.resolve())
    for name, path in others.items():
        shutil.copyfile(path, folder / name)
    if made:
        (folder / "config.json").write_text(json.dumps(made, indent=2), encoding="utf-8")
    if not any(name in others for name in _VOCABULARIES):
        _convert_tokenizer(folder)


def _convert_tokenizer(folder: Path) -> None:
    """Write the tokenizer that transformers makes of the file's metadata, or why it makes none."""
    from transformers import AutoTokenizer

    try:
        with silence():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, gguf_file=GGUF_FILE, local_files_only=True, trust_remote_code=False
            )
        tokenizer.save_pretrained(folder)
    except Exception as error:  # whatever its conversion does with a vocabulary
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        (folder / TOKENIZER_ERROR).write_text(reason, encoding="utf-8")
