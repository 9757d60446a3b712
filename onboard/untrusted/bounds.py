"""How much a model's files, a registry or a configuration may make us read, parse, build or
allocate.

All of it comes from elsewhere. Each bound is well above what the largest models have, and is
checked before the work is done; what passes it is refused in one line, with what was found and what
the limit is. docs/security.md says which test holds which.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Bound:
    """The most that there may be of something."""

    most: int
    unit: str
    why: str
    """What the number comes from."""

    def check(self, found: int, source: object) -> None:
        """Raise `OnboardError` when `found` is more; `source` names what has it."""
        if found > self.most:
            raise self.refusal(f"{source} has {found:,} {self.unit}")

    def refusal(self, found: str) -> OnboardError:
        """Return the error for what was found."""
        return OnboardError(
            f"{found}; at most {self.most:,} are taken", hint=f"Its bound: {self.why}"
        )


CONFIG_BYTES = Bound(_MIB, "bytes", "a config of all sizes in use has some ten thousand")
CODE_BYTES = Bound(
    _MIB, "bytes", "parsing Python takes 500 times its memory; modeling files have 300,000"
)
CODE_FILES = Bound(64, "files of Python", "repositories of models have up to a dozen")
HEADER_BYTES = Bound(32 * _MIB, "bytes of header", "it has room for 300,000 tensors")
GGUF_TENSORS = Bound(65_536, "tensors", "experts are stacked; the largest files have some thousand")
GGUF_VALUES = Bound(4096, "keys", "files have some fifty")
GGUF_STRING = Bound(_MIB, "bytes", "the longest text is a chat template")
INDEX_BYTES = Bound(64 * _MIB, "bytes", "it has room for 600,000 tensors")
YAML_BYTES = Bound(4 * _MIB, "bytes", "reading a MiB of YAML takes seconds")
GRAMMAR_BYTES = Bound(256 * 1024, "bytes", "schemas of tools have some thousand")
TEXT_BYTES = Bound(_MIB, "bytes", "templates and prompts have some thousand")
VOCABULARY_BYTES = Bound(512 * _MIB, "bytes", "the largest vocabularies take 40 million")
ARTIFACT_BYTES = Bound(64 * _MIB, "bytes", "what phases leave for one another is far smaller")
FILES = Bound(100_000, "files", "a checkpoint of a thousand shards has not a tenth of them")

DIMENSIONS = Bound(16, "dimensions", "weights have five at the most")
DEPTH = Bound(64, "levels", "configs nest six deep, and parsers recurse")
VALUES = Bound(50_000, "values", "writing and reading that many takes half a minute")
YAML_VALUES = Bound(400_000, "values", "aliases let a few lines stand for any number of them")

INTEGER = Bound(2**63 - 1, "", "sizes have 64 bits")
LAYERS = Bound(1024, "layers", "the deepest models have 130; building takes 20 s for a thousand")
PARTS = Bound(65_536, "parts", "what is built one by one; the widest mixtures have 512 experts")
WIDTH = Bound(2**24, "wide or long", "the largest vocabularies have a million entries")
MODULES = Bound(200_000, "modules", "a thousand experts in each of sixty layers have fewer")

BATCH = Bound(65_536, "sequences at a time", "every one has rows of the host's memory")
STEP = Bound(2**22, "tokens in a step", "every one has rows of the host's memory")
SEQUENCE = Bound(2**27, "tokens of a sequence", "the longest contexts have ten million")
TOKENS = Bound(2**40, "cached tokens", "a rack of devices holds a billion")
PAGE = Bound(2**16, "tokens of a page", "kernels have pages of 16 to 1024")
CAPTURES = Bound(1024, "captured batch sizes", "each is a graph in the device's memory")
ADAPTERS = Bound(64, "adapters", "every step of a layer looks at each of them")
DRAFTS = Bound(32, "tokens of a draft", "few of so many are right")
LORA_RANK = Bound(512, "for a rank", "adapters in use have 8 to 256")
DEVICES = Bound(4096, "devices", "a model's configuration names at most some dozen")
OUTPUTS = Bound(16_384, "outputs of a prompt", "each is a request of its own")

TEMPLATE_SECONDS = Bound(10, "seconds", "rendering one takes milliseconds")
TEMPLATE_BYTES = Bound(512 * _MIB, "bytes", "rendering one takes a few thousand")
RUN_SECONDS = Bound(12 * 3600, "seconds", "a run of a model that fits takes an hour or two")

_FILE_BOUNDS = (
    (re.compile(r"config\.json|generation_config\.json|.*_config\.json"), CONFIG_BYTES),
    (re.compile(r".*\.safetensors\.index\.json"), INDEX_BYTES),
    (re.compile(r".*\.py"), CODE_BYTES),
    (re.compile(r".*\.jinja|chat_template\.json|prompts\.txt"), TEXT_BYTES),
    (re.compile(r".*\.(json|txt|model|tiktoken|vocab)"), VOCABULARY_BYTES),
)
"""By name, what of a checkpoint is read whole; tokenizer_config.json may list added tokens."""
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LARGE_CONFIGS = frozenset({"tokenizer_config.json"})

_COUNTS = (
    (re.compile(r"(.*_)?(layers?|depths?|blocks|stages)"), LAYERS),
    (re.compile(r"(.*_)?(experts|heads?|groups|codebooks|quantizers|channels)"), PARTS),
    (re.compile(r".*_(size|dim|rank|inner)|d_[a-z]+|n_(embd|inner)|dim"), WIDTH),
    (re.compile(r"max_(.*_)?positions?(_embeddings)?|n_(positions|ctx)|max_seq_len"), SEQUENCE),
)
"""Keys of a config, wherever they stand in it, whose numbers say how often something is built, and
how wide or long it is.
"""
_SIZES = frozenset({"hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"})
"""Of which a negative one, as others have for "none", means nothing."""
_POSITIONS = "max_position_embeddings"


def read_file(path: Path, bound: Bound) -> bytes:
    """Return a regular file's content; raise `OnboardError` for one that is none, or too large.

    `OSError` is the caller's to explain. A FIFO is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        require_regular(path, os.fstat(descriptor))
        data = file.read(bound.most + 1)
        if len(data) > bound.most:
            size = max(len(data), os.fstat(descriptor).st_size)
            bound.check(size, path)
    return data


def read_text(path: Path, bound: Bound) -> str:
    """Return a file's text, which is UTF-8; raise `ValueError` for one that is not."""
    return read_file(path, bound).decode("utf-8")


def read_json(path: Path, bound: Bound = CONFIG_BYTES, values: Bound | None = VALUES) -> Any:
    """Return what a JSON file holds; raise `OnboardError` when it is none or beyond its bounds."""
    try:
        found = json.loads(read_text(path, bound))
    except (ValueError, RecursionError) as error:
        raise OnboardError(
            f"{path} is not valid JSON ({error})", hint="Fetch the model again"
        ) from error
    except MemoryError as error:
        raise OnboardError(f"{path} takes more memory than there is to be read") from error
    if values is not None:
        check_values(found, path, values)
    return found


def require_regular(path: object, status: os.stat_result) -> None:
    """Raise `OnboardError` for a FIFO, a device, a socket or a folder in a file's place."""
    if not stat.S_ISREG(status.st_mode):
        raise OnboardError(
            f"{path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}, not a regular file",
            hint="Do not trust it",
        )


_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check_folder(folder: Path) -> None:
    """Raise `OnboardError` when a checkpoint has a file that must not be opened, or is too large.

    Libraries open these files by themselves: config, tokenizer, templates, code, weights.
    """
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            FILES.check(count, folder)
            _check_entry(entry)


def _check_entry(entry: os.DirEntry[str]) -> None:
    bound = next((each for name, each in _FILE_BOUNDS if name.fullmatch(entry.name)), None)
    if entry.name in _LARGE_CONFIGS:
        bound = VOCABULARY_BYTES
    if bound is None and not entry.name.endswith((".safetensors", ".gguf")):
        return
    try:
        status = entry.stat()
    except OSError:  # a link to nothing: whoever needs the file says so
        return
    if not entry.is_dir():
        require_regular(entry.path, status)
    if bound is not None:
        bound.check(status.st_size, entry.path)


def check_values(values: Any, source: object, bound: Bound = VALUES) -> None:
    """Raise `OnboardError` for nested lists and mappings of too many values, too deep, or with what
    has no usual form: numbers beyond 64 bits, texts that are no Unicode.
    """
    for count, (depth, key, value) in enumerate(_walk(values), start=1):
        DEPTH.check(depth, source)
        bound.check(count, source)
        if isinstance(value, int) and not -INTEGER.most <= value <= INTEGER.most:
            raise INTEGER.refusal(f"{source} has a number of {value.bit_length()} bits ({key})")
        for text in (key, value):
            if isinstance(text, str) and not text.isascii() and _SURROGATE.search(text):
                raise OnboardError(f"{source} has {text!r}, which is no Unicode text")


def check_config(config: Any, source: object) -> None:
    """Raise `OnboardError` for a config's number that would have too much built, a size that is
    negative, or positions of which there are none.
    """
    check_values(config, source)
    for depth, key, value in _walk(config):
        if not isinstance(value, int) or key is None:
            continue
        for name, bound in _COUNTS:
            if name.fullmatch(key) and value > bound.most:
                raise bound.refusal(f"{source} has {key} {value:,}")
        if value == 0 and key == _POSITIONS and depth == 1:  # and not that of a tower without any
            raise OnboardError(
                f"{source} has {key} 0: no text has a position", hint="Fetch the model again"
            )
        if value < 0 and key in _SIZES:
            raise OnboardError(f"{source} has {key} {value:,}", hint="Fetch the model again")


def _walk(values: Any) -> Iterator[tuple[int, str | None, Any]]:
    """Yield depth, key and value of everything in nested lists and mappings; a list's items have
    its key.
    """
    waiting: list[tuple[int, str | None, Any]] = [(0, None, values)]
    while waiting:
        depth, key, value = waiting.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            waiting += [(depth + 1, str(name), each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(depth + 1, key, each) for each in value]


@contextmanager
def bounded_modules(source: object) -> Iterator[None]:
    """Refuse to build a model of more modules than `MODULES`, whatever number of its config asks
    for them.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        MODULES.check(count, source)

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
