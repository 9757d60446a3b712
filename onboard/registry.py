"""The model registry: `registry/models.yaml`, the composable configs beside it, and each model's
standalone config.

What an entry runs with is `onboard.composition`'s to say; how the text of `models.yaml` is edited
`registry_text`'s.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from datetime import date
from functools import lru_cache
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import Field, ValidationError, field_validator
from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter

from onboard.config import RuntimeConfig, StrictModel
from onboard.content import CONTENT_ROOT, content_path
from onboard.errors import OnboardError, UsageError
from onboard.sources.gguf_source import is_local
from onboard.untrusted.bounds import YAML_BYTES, read_text
from onboard.untrusted.yaml_text import load_yaml

HEADER = """\
# Models that were onboarded. Each entry names its configs in configs/, deep-merged from left to right.
version: "1.0"
description: Onboarded models and the configs that they run with
models:
"""
"""What `models.yaml` starts as."""

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
    """What came of the model's last run here: none yet (untested: nobody tried it), passed or
    failed.
    """
    tested: date | None = None
    """When that run ended."""
    model_file: str | None = None
    """The digest of the model file that it had."""
    architecture: str | None = None
    """The class that its config names; models of one architecture and family share a model file."""
    note: str | None = None
    """What keeps the model from running as it was released, if anything does."""
    family: str | None = None
    """Its model type, as the model file is named by it."""

    @property
    def standalone(self) -> str:
        """The name of its standalone config."""
        return f"{self.config_id}.yaml"

    @field_validator("config_id")
    @classmethod
    def _name_a_config(cls, config_id: str) -> str:
        if not _FILE_NAME.fullmatch(f"{config_id}.yaml"):
            raise ValueError(
                f"{config_id!r} is not the name of a file in configs/, without its .yaml"
            )
        return config_id

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
    """Return what tells a model file from others, the start of its sha256; empty when there is
    none.

    The prefix keeps YAML from taking digits for a number.
    """
    return f"sha256:{sha256(path.read_bytes()).hexdigest()[:16]}" if path.is_file() else ""


def identity(model: str) -> str:
    """Return what a config's `model` says: the absolute path of a local folder, or the id."""
    path = Path(model).expanduser()
    return str(path.resolve()) if is_local(model) else model


@contextmanager
def registry_lock(root: Path) -> Iterator[None]:
    """Hold the lock under which the registry and the support matrix are read, changed and
    written.
    """
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
        raise OnboardError(
            "registry/models.yaml: `models` is not a list", hint="Restore it from version control"
        )
    entries = [_entry(item) for item in models]
    names = Counter(entry.name for entry in entries)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise OnboardError(
            f"registry/models.yaml has {twice} more than once", hint="Leave one of the entries"
        )
    return entries


def load_entries(root: Path) -> list[RegistryEntry]:
    """Return the entries of the root's registry; none when it has no registry yet."""
    path = models_path(root)
    return parse_entries(_read_text(path)) if path.exists() else []


def all_entries(root: Path) -> list[RegistryEntry]:
    """Return the root's entries, and those of the shipped registry whose names it does not have."""
    own = load_entries(root)
    shipped = (
        []
        if models_path(root).resolve() == models_path(CONTENT_ROOT).resolve()
        else load_entries(CONTENT_ROOT)
    )
    known = {entry.name for entry in own}
    return [*own, *(entry for entry in shipped if entry.name not in known)]


def load_standalone(path: Path) -> RuntimeConfig:
    """Read and validate a standalone config."""
    return validated(read_config_file(path), path.name)


def config_file(name: str, root: Path) -> Path:
    """Return a file of `configs/`, the root's own before the shipped one.

    Raises `OnboardError` for one that is a link to somewhere outside of the root.
    """
    path = content_path("registry", "configs", name, root=root)
    inside = (root.resolve(), CONTENT_ROOT.resolve())
    if not any(path.resolve().is_relative_to(folder) for folder in inside):
        raise OnboardError(
            f"registry/configs/{name} is a link that leads out of {root}", hint="Put the file there"
        )
    return path


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the mapping that a config file holds."""
    if not path.exists():
        raise OnboardError(
            f"registry config {path.name} does not exist", hint=f"Expected at {path}"
        )
    return _load_yaml(_read_text(path), path.name)


class _Representer(RoundTripRepresenter):
    """Writes "null" for None; ruamel writes nothing, which reads as if something were missing."""

    def represent_none(self, data: None) -> Any:
        """Return the scalar "null"."""
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(type(None), _Representer.represent_none)


def dump_config(config: dict[str, Any], comment: str) -> str:
    """Return the YAML text of a config, under a comment line."""
    stream = StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.representer.add_representer(
        type(None), lambda made, _: made.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    yaml.dump(config, stream)
    return f"# {comment}\n{stream.getvalue()}"


def find_entry(model: str, root: Path) -> RegistryEntry | None:
    """Return the entry of a model, given as a registry name, an id or a folder; the root's before a
    shipped one.
    """
    entries = sorted(load_entries(root), key=lambda entry: entry.name != model)
    wanted = identity(model)
    by_config = (e for e in entries if _owner(config_path(root, e.config_id)) == wanted)
    return next(by_config, None) or next((e for e in all_entries(root) if e.name == model), None)


def claim_names(model: str, root: Path) -> tuple[str, str]:
    """Return the entry name and the slug for a model: its own when it is registered, free ones
    otherwise.

    The slug is the last segment of the id or path; another model that has it already makes it
    `parent--last`. Call it under `registry_lock`.
    """
    if (entry := find_entry(model, root)) and _owner(config_path(root, entry.config_id)) in (
        "",
        identity(model),
    ):
        return entry.name, entry.config_id
    local = is_local(model)
    parts = [part for part in identity(model).split("/") if part]
    for depth in range(1, len(parts) + 1):
        label = "--".join(parts[-depth:])
        if _is_free(slug(label), model, root):
            return (label if local else model), slug(label)
    raise OnboardError(
        f"every config name for {model} is taken by another model", hint="Use another --root"
    )


def _is_free(config_id: str, model: str, root: Path) -> bool:
    """Tell whether no fragment and no other model that still exists has this config name.

    The model's own, which no entry has any more, is what a lost models.yaml has left.
    """
    path = content_path("registry", "configs", f"{config_id}.yaml", root=root)
    if not path.exists():
        return True
    owner = _owner(path)
    if owner == identity(model):
        return all(entry.config_id != config_id for entry in load_entries(root))
    return bool(owner) and owner.startswith("/") and not Path(owner).exists()


def _owner(path: Path) -> str:
    """Return the model that a standalone config is for; empty for a fragment, a missing file, or
    one of elsewhere.
    """
    folder = path.parents[2].resolve()
    if not path.exists() or not path.resolve().is_relative_to(folder):
        return ""
    return str(read_config_file(path).get("model", ""))


def _entry(item: Any) -> RegistryEntry:
    try:
        return RegistryEntry.model_validate(item)
    except ValidationError as error:
        shown = textwrap.shorten(repr(item), 120)
        raise OnboardError(
            f"registry/models.yaml has a bad entry {shown}: {_first(error)}"
        ) from error


def validated(values: dict[str, Any], source: str) -> RuntimeConfig:
    """Return the configuration that a file's or a composition's values are; `source` names it in
    errors.
    """
    try:
        return RuntimeConfig.model_validate(values)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from error
    except ValidationError as error:
        raise OnboardError(
            f"{source}: {_first(error)}", hint="Correct the file under registry/configs"
        ) from error


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"


def _read_text(path: Path) -> str:
    try:
        return read_text(path, YAML_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise OnboardError(f"{path} cannot be read: {error}") from error


def _load_yaml(text: str, source: str) -> dict[str, Any]:
    document = deepcopy(_parsed(text, source))
    if not isinstance(document, dict | None):
        raise OnboardError(f"{source} holds a {type(document).__name__}, not a mapping")
    return document or {}


@lru_cache(maxsize=256)  # the configs of all entries: a model's is looked for in each of them
def _parsed(text: str, source: str) -> Any:
    return load_yaml(text, source)
