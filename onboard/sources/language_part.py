"""The language model inside of a model whose towers and processor are code of its repository: a
folder of its own, in which it is a checkpoint like any other.

What is in it follows from config.json and from the weights' names and shapes; none of the code runs.
The folder has the inner config as config.json and links to the weights, which keep their names: those
of the language model begin alike, and a file beside them says how.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.sources.made_folders import kept_folders, make_whole, name_of_made
from onboard.untrusted.bounds import HEADER_BYTES, check_folder, read_json

PART_FILE = "language_part.json"
"""Beside the config of a folder that was made: where the whole model is, and its tensors' prefix."""
_KIND = "language-parts"
_COPIED = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_OF_PROCESSORS = {
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
}
_TEMPLATE, _OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
_NOT_OF_THE_MODEL = ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation")
"""How a tower's authors would have attention computed, which is no part of what it computes."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LanguagePart:
    """What a folder that was made stands for."""

    whole: Path
    """The folder of the whole model."""
    prefix: str
    """What the names of the language model's tensors begin with there."""


def part_of(folder: Path) -> LanguagePart | None:
    """Return what a folder is a part of, if it is one that was made here; a file of that name in any
    other folder says nothing.
    """
    if not (folder / PART_FILE).is_file() or folder.parent != kept_folders(_KIND):
        return None
    values = read_json(folder / PART_FILE)
    return LanguagePart(Path(values["whole"]), values["prefix"])


def inner_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the language model inside of a model that brings code and has no
    vocabulary of its own; None for any other model.
    """
    if not isinstance(config.get("auto_map"), dict):
        return None
    if "vocab_size" in config or "quantization_config" in config:
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # loads torch

    if str(config.get("model_type")) in CONFIG_MAPPING_NAMES:
        return None
    found = [each for each in config.values() if isinstance(each, dict) and _is_causal(each)]
    if len(found) != 1:
        return None
    dtype = {key: config[key] for key in ("torch_dtype", "dtype") if config.get(key)}
    inner = {key: value for key, value in found[0].items() if key not in _NOT_OF_THE_MODEL}
    return {**dtype, **inner}


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Whether a part of a config is a language model's: of transformers, or with code of its own."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own, named = config.get("auto_map"), config.get("architectures")
    if isinstance(own, dict) and "AutoModelForCausalLM" in own:
        return True
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    return known is not None and named == [known]


def language_folder(folder: Path, weights: list[str], shapes: Callable[[], Shapes]) -> Path | None:
    """Return a folder with the language model inside of the one in `folder`, whose files of weights
    are `weights`; None where there is none inside.

    `shapes` gives the weights' shapes by name, and is asked once for a model.
    """
    path = folder / "config.json"
    try:
        config = read_json(path) if path.is_file() else None
    except OnboardError:
        return None  # whoever reads it says what is wrong
    inner = inner_config(config) if isinstance(config, dict) else None
    if inner is None:
        return None
    check_folder(folder)
    files = [each for each in sorted(folder.iterdir()) if each.suffix in _COPIED and each.is_file()]
    made = kept_folders(_KIND) / name_of_made(files, [inner, str(folder), weights])
    if made.is_dir():
        return made
    if not (prefix := _prefix(shapes(), inner)):
        return None
    make_whole(made, partial(_fill, LanguagePart(folder, prefix), inner, files, weights))
    return made


def _prefix(shapes: Shapes, inner: Mapping[str, Any]) -> str:
    """Return what the language model's tensors begin with: the one tree among several that has
    tensors with a row for each word; "" if there is none.
    """
    trees = {name.partition(".")[0] for name in shapes}
    words = inner.get("vocab_size")
    found = {name.partition(".")[0] for name, shape in shapes.items() if shape[:1] == (words,)}
    return f"{found.pop()}." if len(found) == 1 and len(trees) > 1 else ""


def _fill(
    part: LanguagePart, inner: dict[str, Any], files: list[Path], weights: list[str], folder: Path
) -> None:
    for path in files:
        if path.name not in {"config.json", PART_FILE} | _OF_PROCESSORS:
            shutil.copyfile(path, folder / path.name)
    for name in weights:
        (folder / name).symlink_to(part.whole.resolve() / name)
    says = {"whole": str(part.whole), "prefix": part.prefix}
    (folder / "config.json").write_text(json.dumps(inner, indent=2), encoding="utf-8")
    (folder / PART_FILE).write_text(json.dumps(says), encoding="utf-8")
    if (old := folder / _OLD_TEMPLATE).is_file() and not (folder / _TEMPLATE).exists():
        template = read_json(old)
        text = template.get("chat_template") if isinstance(template, dict) else None
        if isinstance(text, str):
            (folder / _TEMPLATE).write_text(text, encoding="utf-8")


def stored_shapes(folder: Path, weights: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name, as the headers of safetensors files say; of files that
    are not here, or are damaged, none.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in [each for name in weights if (each := folder / name).is_file()]:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            HEADER_BYTES.check(length, path.name)
            try:
                header = json.loads(file.read(length))
                header.pop("__metadata__", None)
                found |= {name: tuple(entry["shape"]) for name, entry in header.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return {}  # whoever reads the weights says what is wrong
    return found
