"""Where a model's files come from: a local folder, the Hugging Face cache, or a Hub.

The Hub's client reads `HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` itself, and falls back to its cache
when the network is down; what is left to do here is to ask for no more than needed, again where
that is worth it, and to explain failures.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from onboard.errors import NoSuchModelError, OnboardError
from onboard.sources.causal_class import CAUSAL, with_causal_class
from onboard.sources.declared_type import with_declared_type
from onboard.sources.gguf_source import (
    GGUF_FILE,
    gguf_of,
    is_gguf,
    is_local,
    only_gguf,
    prepared_folder,
)
from onboard.sources.hub_errors import explain_hub_error, first_line, patiently
from onboard.sources.language_part import language_folder, stored_shapes
from onboard.untrusted.bounds import INDEX_BYTES, check_config, check_folder, read_json

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Everything that is weights in some format, or a copy of the model for another runtime.
_WEIGHT_PATTERNS = [
    *(
        "*.safetensors",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.ggml",
        "*.npz",
        "*.ot",
    ),
    *(
        "*.onnx",
        "*.onnx_data",
        "*.tflite",
        "*.mlmodel",
        "*.pkl",
        "*.nemo",
        "*.tar",
        "*.tar.gz",
        "*.zip",
    ),
    *("onnx/*", "openvino/*", "coreml/*", "original/*", "*.mlpackage/*"),
]
_SHARD = re.compile(r"[A-Za-z0-9_.-]+\.safetensors")
_MODEL_TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_OWN_TYPE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. +-]{0,99}")
"""Those of a model that brings its own code: people call theirs `My Model 1.0`."""


class StoredTensor(NamedTuple):
    """What a safetensors header says of a tensor; `dtype` is the format's own name, "BF16"."""

    dtype: str
    shape: tuple[int, ...]


class ModelSource(Protocol):
    """A model's files, fetched no earlier than they are needed."""

    @property
    def model(self) -> str:
        """As the user gave it."""

    @property
    def revision(self) -> str | None:
        """The resolved commit, or None for a local folder."""

    def config(self) -> dict[str, Any]:
        """Return the parsed config.json."""

    def files(self) -> Path:
        """Return a folder with config, code and tokenizer; weights need not be there."""

    def weights(self) -> Path:
        """Return a folder that also has all safetensors files."""


@dataclass(frozen=True)
class LocalSource:
    """A folder on this machine, or a GGUF file."""

    model: str

    @property
    def revision(self) -> None:
        """A folder has no revision."""

    def config(self) -> dict[str, Any]:
        """Return the parsed config.json."""
        return read_config(self.files())

    def files(self) -> Path:
        """Return the folder itself; of a GGUF file one with its config and tokenizer, of a model
        whose towers are code one with the language model inside.
        """
        path = Path(self.model).expanduser().resolve()
        if (file := gguf_of(path)) is not None:
            return prepared_folder(file)
        weights = _weight_files(path)
        return language_folder(path, weights, lambda: stored_shapes(path, weights)) or path

    def weights(self) -> Path:
        """Return the same folder; raise `OnboardError` when a file of weights is missing from it."""
        return _complete(self.model, self.files())


@dataclass(frozen=True)
class HubSource:
    """An id on a Hub, or in its local cache (`offline`: only there); of a GGUF file the id with its
    name behind.
    """

    model: str
    requested: str | None = None
    """Branch, tag or commit; None: the main branch."""
    offline: bool = False

    @property
    def revision(self) -> str:
        """The commit that `requested` stands for now."""
        return self._snapshot.name

    def config(self) -> dict[str, Any]:
        """Return the parsed config.json."""
        return read_config(self.files())

    def files(self) -> Path:
        """Fetch config, code and tokenizer on the first call; return the snapshot's folder, or of a
        GGUF file, which is fetched whole, one with its config and tokenizer, or of a model whose
        towers are code one with the language model inside.
        """
        if (file := self._gguf) is not None:
            return prepared_folder(file, beside=self._snapshot)
        here, weights = self._snapshot, _weight_files(self._snapshot)
        return language_folder(here, weights, lambda: self._shapes(weights)) or here

    def _shapes(self, weights: list[str]) -> dict[str, tuple[int, ...]]:
        found = {name: tensor.shape for name, tensor in self.tensors.items()}
        return found or stored_shapes(self._snapshot, weights)

    def weights(self) -> Path:
        """Fetch the safetensors files that the index names, and no other format; return the
        snapshot's folder.
        """
        if self._gguf is not None:
            return self.files()
        # By commit, so that weights and config are of one revision even when the branch moves on in
        # between.
        self._fetch(self.revision, allow_patterns=_weight_files(self._snapshot))
        return _complete(self.model, self.files())

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors by name, from the headers that the Hub serves; empty when it is not asked, or
        has none.

        Raises:
            OnboardError: a header is damaged, or the Hub failed.
        """
        from huggingface_hub import constants, get_safetensors_metadata
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HTTPError,
            NotASafetensorsRepoError,
            SafetensorsParsingError,
        )

        if self.offline or constants.HF_HUB_OFFLINE:
            return {}
        try:
            files = patiently(
                lambda: get_safetensors_metadata(self.repository, revision=self.revision)
            ).files_metadata.values()
            return {
                name: StoredTensor(str(info.dtype), tuple(info.shape))
                for file in files
                for name, info in file.tensors.items()
            }
        except (NotASafetensorsRepoError, EntryNotFoundError):
            return {}
        except SafetensorsParsingError as error:
            raise OnboardError(
                f"{self.model} has a damaged safetensors file ({first_line(error)})"
            ) from error
        except (OSError, ValueError, HTTPError) as error:
            raise explain_hub_error(error, self) from error

    @property
    def repository(self) -> str:
        """The id alone."""
        return "/".join(self.model.split("/")[:2]) if is_gguf(self.model) else self.model

    @cached_property
    def _gguf(self) -> Path | None:
        """The GGUF file that was named, or the only one of a repository that has no config.json."""
        name: str | None = self.model.removeprefix(f"{self.repository}/")
        if not is_gguf(self.model):
            has_config = (self._snapshot / "config.json").is_file()
            name = None if has_config else only_gguf(self._names(), self.model)
        if name is None:
            return None
        file = self._fetch(self.revision, allow_patterns=[name]) / name
        if ".." in Path(name).parts or not file.is_file():
            raise NoSuchModelError(f"{self.repository} has no file {name}", hint="Check its name")
        return file

    def _names(self) -> list[str]:
        """Return the names of the repository's files; offline of those that are here."""
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HTTPError

        if self.offline or constants.HF_HUB_OFFLINE:
            here = self._snapshot
            return [path.relative_to(here).as_posix() for path in here.rglob("*.gguf")]
        try:
            return list(HfApi().list_repo_files(self.model, revision=self.revision))
        except (OSError, ValueError, HTTPError) as error:
            raise explain_hub_error(error, self) from error

    @cached_property
    def _snapshot(self) -> Path:
        return self._fetch(self.requested, ignore_patterns=_WEIGHT_PATTERNS)

    def _fetch(self, revision: str | None, **patterns: list[str]) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError

        try:
            return Path(
                patiently(
                    lambda: snapshot_download(
                        self.repository,
                        revision=revision,
                        local_files_only=self.offline,
                        **patterns,
                    )
                )
            )
        except (OSError, ValueError, HTTPError) as error:
            raise explain_hub_error(error, self) from error


def is_config_file(model: str) -> bool:
    """Tell whether what was given as a model is a file such as config.json."""
    return Path(model).expanduser().is_file() and not is_gguf(model)


@contextmanager
def as_folder(model: str) -> Iterator[str]:
    """Yield what was given as a model; for a file such as config.json a folder that has it under
    that name.
    """
    path = Path(model).expanduser()
    if not is_config_file(model):
        yield model
        return
    with TemporaryDirectory(prefix="onboard-") as folder:
        shutil.copyfile(path, Path(folder, "config.json"))
        read_config(Path(folder))
        yield folder


def open_source(model: str, *, revision: str | None = None, offline: bool = False) -> ModelSource:
    """Return the source for a local folder or an id; nothing is fetched yet."""
    if is_local(model):
        if revision is not None:
            raise OnboardError(
                f"{model} is a local folder and has no revision {revision!r}",
                hint="Omit --revision",
            )
        return LocalSource(model)
    if Path(model).expanduser().exists():
        raise NoSuchModelError(f"{model} is a file", hint="Give the folder that holds config.json")
    is_id = model.count("/") < 2 or is_gguf(model)
    if model.startswith(("/", ".", "~")) or not is_id or not model.strip():
        raise NoSuchModelError(
            f"there is no folder {model!r}", hint="Give a model's folder or an id such as org/name"
        )
    return HubSource(model, revision, offline)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json; raise `OnboardError` unless it is an object with a usable
    `model_type`, of its own or of the config class that its `auto_map` names.
    """
    path = folder / "config.json"
    try:
        config = read_json(path, values=None)
        check_folder(folder)
    except FileNotFoundError:
        raise OnboardError(
            f"{folder} has no config.json", hint="Give a model in Hugging Face format"
        ) from None
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise OnboardError(f"{path} cannot be read ({reason})") from error
    if not isinstance(config, dict):
        raise OnboardError(
            f"{path} holds a {type(config).__name__}, not an object", hint="Fetch the model again"
        )
    config = with_declared_type(config, folder)
    if "model_type" not in config:
        raise OnboardError(
            f"{path} has no model_type, and its auto_map names no config class that declares one",
            hint="Only models in Hugging Face transformers format work",
        )
    # The type names files and classes later on, so that nothing but a plain name may pass.
    names = _OWN_TYPE if _brings_code(config) else _MODEL_TYPE
    if not isinstance(config["model_type"], str) or not names.fullmatch(config["model_type"]):
        raise OnboardError(
            f"{path} has model_type {config['model_type']!r:.80}, which is not a name",
            hint="Do not trust it",
        )
    check_config(config, path)
    return with_own_type(config)


OWN_CODE = "_own_code"
"""What a model type ends with where transformers has another class of that type."""


def with_own_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json under a model type of its own, if `auto_map` names the class of
    the language model and transformers has one of the same type, or the type is no name.

    They are two architectures: what is known of one must never be taken for the other's.
    """
    config = with_causal_class(config)
    if not _brings_code(config):
        return dict(config)
    model_type = _plain_type(str(config.get("model_type")))
    known = known_type(model_type) == model_type
    return {**config, "model_type": f"{model_type}{OWN_CODE}" if known else model_type}


def _brings_code(config: Mapping[str, Any]) -> bool:
    auto_map = config.get("auto_map")
    return isinstance(auto_map, dict) and CAUSAL in auto_map


def _plain_type(model_type: str) -> str:
    """Return a model type of people's own as a name that files and classes can have: spaces and
    points are underscores in it, and no digit comes first.
    """
    plain = re.sub("[^A-Za-z0-9_-]+", "_", model_type)
    return f"_{plain}" if plain[:1].isdigit() else plain


def known_type(model_type: str) -> str | None:
    """Return the model type of transformers that a type is, or is the own type of; None for one
    that transformers does not know.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = model_type.removesuffix(OWN_CODE)
    return known if known in CONFIG_MAPPING_NAMES else None


def _weight_files(folder: Path) -> list[str]:
    return shard_names(folder) or [WEIGHTS_FILE]


def shard_names(folder: Path) -> list[str]:
    """Return the file names that the folder's safetensors index lists, sorted; empty without an
    index.
    """
    path = folder / WEIGHTS_INDEX
    if not path.is_file():
        return []
    try:
        weight_map = read_json(path, INDEX_BYTES, values=None)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise OnboardError(
            f"{path} is not an index of safetensors files", hint="Fetch the model again"
        ) from error
    if stray := [name for name in names if not _SHARD.fullmatch(str(name))]:
        raise OnboardError(
            f"{path} names {stray[0]!r}, which is no safetensors file beside it",
            hint="Do not trust it",
        )
    return names


def has_weights(folder: Path) -> bool:
    """Tell whether all safetensors files are in the folder."""
    return not _missing(folder)


def _missing(folder: Path) -> list[str]:
    names = shard_names(folder)
    if not names and (folder / GGUF_FILE).is_file():
        return []
    return [name for name in names or [WEIGHTS_FILE] if not (folder / name).is_file()]


def _complete(model: str, folder: Path) -> Path:
    missing = _missing(folder)
    if missing == [WEIGHTS_FILE]:
        raise OnboardError(
            f"{model} has no safetensors weights (no {WEIGHTS_FILE} in {folder})",
            hint="Save the model with save_pretrained, which writes safetensors",
        )
    if missing:
        raise OnboardError(
            f"{model} lacks {_listing(missing)}, which its index names",
            hint="Fetch the model again",
        )
    return folder


def _listing(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"
