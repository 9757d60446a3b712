"""The model registry: `registry/models.yaml`, the composable configs beside it, and each model's standalone config.

An entry's `yaml_extra` files are deep-merged left to right; the last one is the model's standalone config, which alone
says everything too. The text of `models.yaml` belongs to its readers: entries are added to it, nothing else moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import Field, ValidationError, field_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from onboard.config import RuntimeConfig, StrictModel, deep_merge
from onboard.content import content_path
from onboard.errors import OnboardError

HEADER = """\
# Models that were onboarded. Each entry names its configs in configs/, deep-merged from left to right.
version: "1.0"
description: Onboarded models and the configs that they run with
models:
"""
"""What `models.yaml` starts as."""

WORLD_SIZES = ((2_000_000_000, 1), (15_000_000_000, 2), (80_000_000_000, 4))
"""(parameters below, GPUs); 8 GPUs from the last bound on."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.yaml")


Status = Literal["untested", "pending", "passed", "failed"]


class RegistryEntry(StrictModel):
    """One model of the registry."""

    name: str = Field(min_length=1)
    """A Hugging Face id, or the folder's name for a local checkpoint."""
    config_id: str = Field(min_length=1)
    """`configs/<config_id>.yaml` is the model's standalone config."""
    yaml_extra: list[str]
    """Files of `configs/`, deep-merged left to right."""
    status: Status = "untested"
    """What came of the model's last run here: none yet (untested: nobody tried it), passed or failed."""
    tested: date | None = None
    """When that run ended."""
    model_file: str | None = None
    """The digest of the model file that it had."""

    def doubt(self, model_file: Path) -> str | None:
        """Return why this entry does not stand for a model that was seen to work with `model_file`; None if it does."""
        if self.status == "failed":
            return f"the run of {self.name} failed on {self.tested}"
        if self.status != "passed":
            return f"no run of {self.name} has passed (its registry entry is {self.status})"
        if self.model_file is not None and digest(model_file) not in ("", self.model_file):
            return f"{model_file.name} is not the file that the run of {self.name} passed with on {self.tested}"
        return None

    @field_validator("yaml_extra")
    @classmethod
    def _stay_in_configs(cls, names: list[str]) -> list[str]:
        for name in names:
            if not _FILE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a file in configs/")
        return names


def slug(name: str) -> str:
    """Return `name` as a file name: lower case, dots and dashes kept, everything else "_"."""
    return re.sub(r"[^a-z0-9.\-]", "_", name.lower()).lstrip(".-") or "_"


def digest(path: Path) -> str:
    """Return what tells a model file from others, the start of its sha256; empty when there is none.

    The prefix keeps YAML from taking digits for a number.
    """
    return f"sha256:{sha256(path.read_bytes()).hexdigest()[:16]}" if path.is_file() else ""


def world_size_for(num_parameters: int) -> int:
    """Return the number of GPUs that a model of this size is registered with."""
    return next((gpus for bound, gpus in WORLD_SIZES if num_parameters < bound), 8)


def identity(model: str) -> str:
    """Return what a config's `model` says: the absolute path of a local folder, or the id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


@contextmanager
def registry_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which the registry and the support matrix are read, changed and written."""
    folder = root / "registry"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        yield


def models_path(root: Path) -> Path:
    """Return the path of the registry that belongs to `root`."""
    return root / "registry" / "models.yaml"


def config_path(root: Path, config_id: str) -> Path:
    """Return where the root keeps the standalone config of an entry."""
    return root / "registry" / "configs" / f"{config_id}.yaml"


def parse_entries(text: str) -> list[RegistryEntry]:
    """Return the entries of a `models.yaml`; raise `OnboardError` when it is not one."""
    document = _load_yaml(text, "registry/models.yaml")
    models = document.get("models")
    if models is None:
        return []
    if not isinstance(models, list):
        raise OnboardError("registry/models.yaml: `models` is not a list", hint="Restore it from version control")
    return [_entry(item) for item in models]


def load_entries(root: Path) -> list[RegistryEntry]:
    """Return the entries of the root's registry; none when it has no registry yet."""
    path = models_path(root)
    return parse_entries(path.read_text(encoding="utf-8")) if path.exists() else []


def insert_entry(text: str, entry: RegistryEntry) -> str:
    """Return `text` with the entry after the last one: the difference is only added lines.

    An entry of the same name stays as it is, so that what a person changed in it survives.
    """
    if any(known.name == entry.name for known in parse_entries(text)):
        return text
    models = _models_node(text)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if models is None or not models.value:
        at, column = _empty_list_line(lines), 2
    else:
        at, column = _last_line(models) + 1, models.start_mark.column
    lines[at:at] = _render_entry(entry, column)
    return "".join(lines)


def set_fields(text: str, name: str, fields: Mapping[str, str]) -> str:
    """Return `text` with plain values for fields of the entry `name`; nothing else in it moves."""
    for key, value in fields.items():
        text = _with_field(text, name, key, value)
    return text


def _with_field(text: str, name: str, key: str, value: str) -> str:
    models = _models_node(text)
    assert models is not None, "a registry without entries"
    entry = next(node for node in models.value if _scalar(node, "name").value == name)
    old, lines = _scalar(entry, key), text.splitlines(keepends=True)
    if old is not None:
        at, (start, end) = old.start_mark.line, (old.start_mark.column, old.end_mark.column)
        lines[at] = f"{lines[at][:start]}{value}{lines[at][end:]}"
    elif entry.flow_style:
        at, end = entry.end_mark.line, entry.end_mark.column - 1
        lines[at] = f"{lines[at][:end]}, {key}: {value}{lines[at][end:]}"
    else:
        at = _last_line(entry)
        lines[at] = f"{lines[at].rstrip()}\n{' ' * entry.start_mark.column}{key}: {value}\n"
    return "".join(lines)


def _scalar(entry: Node, key: str) -> Any:
    return next((value for name, value in entry.value if name.value == key), None)


def compose_config(names: Sequence[str], root: Path) -> RuntimeConfig:
    """Deep-merge files of `configs/`, the root's own before the shipped ones, and validate the result."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = deep_merge(merged, read_config_file(content_path("registry", "configs", name, root=root)))
    return _validated(merged, ", ".join(names))


def load_standalone(path: Path) -> RuntimeConfig:
    """Read and validate a standalone config."""
    return _validated(read_config_file(path), path.name)


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping that a config file holds."""
    if not path.exists():
        raise OnboardError(f"registry config {path.name} does not exist", hint=f"Expected at {path}")
    return _load_yaml(path.read_text(encoding="utf-8"), path.name)


def dump_config(config: dict[str, Any], comment: str) -> str:
    """Return the YAML text of a config, under a comment line."""
    stream = StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.dump(config, stream)
    return f"# {comment}\n{stream.getvalue()}"


def find_entry(model: str, root: Path) -> RegistryEntry | None:
    """Return the entry of a model, given as a registry name, an id or a folder."""
    entries = sorted(load_entries(root), key=lambda entry: entry.name != model)
    wanted = identity(model)
    by_config = (e for e in entries if _owner(config_path(root, e.config_id)) == wanted)
    return next(by_config, None) or next((e for e in entries if e.name == model), None)


def claim_names(model: str, root: Path) -> tuple[str, str]:
    """Return the entry name and the slug for a model: its own when it is registered, free ones otherwise.

    The slug is the last segment of the id or path; another model that has it already makes it `parent--last`. Call it
    under `registry_lock`.
    """
    if (entry := find_entry(model, root)) and _owner(config_path(root, entry.config_id)) in ("", identity(model)):
        return entry.name, entry.config_id
    local = Path(model).expanduser().is_dir()
    parts = [part for part in identity(model).split("/") if part]
    for depth in range(1, len(parts) + 1):
        label = "--".join(parts[-depth:])
        if _is_free(slug(label), root):
            return (label if local else model), slug(label)
    raise OnboardError(f"every config name for {model} is taken by another model", hint="Use another --root")


def _is_free(config_id: str, root: Path) -> bool:
    """Tell whether no fragment and no other model that still exists has this config name."""
    path = content_path("registry", "configs", f"{config_id}.yaml", root=root)
    if not path.exists():
        return True
    owner = _owner(path)
    return bool(owner) and owner.startswith("/") and not Path(owner).exists()


def _owner(path: Path) -> str:
    """Return the model that a standalone config is for; empty for a fragment or a missing file."""
    return str(read_config_file(path).get("model", "")) if path.exists() else ""


def _entry(item: Any) -> RegistryEntry:
    try:
        return RegistryEntry.model_validate(item)
    except ValidationError as error:
        raise OnboardError(f"registry/models.yaml has a bad entry {item!r}: {_first(error)}") from error


def _validated(merged: dict[str, Any], source: str) -> RuntimeConfig:
    try:
        return RuntimeConfig.model_validate(merged)
    except ValidationError as error:
        raise OnboardError(f"{source}: {_first(error)}", hint="Correct the file under registry/configs") from error


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _load_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        document = YAML(typ="safe").load(text)
    except YAMLError as error:
        raise OnboardError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict | None):
        raise OnboardError(f"{source} holds a {type(document).__name__}, not a mapping")
    return document or {}


def _models_node(text: str) -> SequenceNode | None:
    root: Node | None = YAML().compose(StringIO(text))
    pairs = root.value if isinstance(root, MappingNode) else []
    node = next((value for key, value in pairs if key.value == "models"), None)
    if not isinstance(node, SequenceNode):
        return None
    if node.flow_style and node.value:
        raise OnboardError(
            "registry/models.yaml: `models` is a list in brackets", hint="Write one entry a line (- name: ...)"
        )
    return node


def _last_line(node: Node) -> int:
    """Return the index of the line on which a node's last scalar or closing bracket stands."""
    while isinstance(node, MappingNode | SequenceNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.line)


def _empty_list_line(lines: list[str]) -> int:
    """Return the index after the line `models:`, which an empty `[]` is taken from; add the line when there is none."""
    for index, line in enumerate(lines):
        if match := re.match(r"models:\s*(\[\s*\]|null|~)?\s*(#.*)?$", line):
            if match[1]:
                lines[index] = line.replace(match[1], "", 1).replace(": \n", ":\n")
            return index + 1
    lines.append("models:\n")
    return len(lines)


def _render_entry(entry: RegistryEntry, column: int) -> list[str]:
    stream = StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump([entry.model_dump(exclude_defaults=True)], stream)
    return [f"{' ' * column}{line[2:]}" for line in stream.getvalue().splitlines(keepends=True)]
