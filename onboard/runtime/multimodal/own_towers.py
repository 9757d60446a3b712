"""Images of a model whose processor and towers are code of its repository: a sandboxed process reads
them, and is asked with a text and pixels.

It answers with token ids, and with the embeddings that the whole model hands to its language model.
Weights, pixels and embeddings go through files that both have open; all else is JSON that must match
a schema (docs/remote_code.md).
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Never, cast

import numpy as np
import torch
from pydantic import Field
from torch import nn

from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.stored_places import open_files
from onboard.hub import read_config
from onboard.media.prompt_media import Kind, PromptMedia
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.tokenizer import Tokenizer
from onboard.sources.language_part import LanguagePart, part_of
from onboard.untrusted.bounds import VOCABULARY_BYTES
from onboard.workflow.remote.code_session import LIMITS, Session, agree
from onboard.workflow.remote.handed import small_files
from onboard.workflow.remote.replies import Count, Line, Message, Reply

_READ = "embeddings"
"""Beside a prompt's token ids: what has been read."""
_CLASSES = (
    *("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq"),
    *("AutoModelForMultimodalLM", "AutoModel"),
)
"""Under which names `auto_map` may have the class of the whole model."""
_VOCABULARIES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_MARK = "\N{SYMBOL FOR NULL}"
_FACTS = ("package", "flash", "was not tried")
"""What a fact about the code speaks of that is more than a name of older transformers."""
_WHERE = "images are read by the repository's code, in a sandbox without a GPU: on the processor"


class Opened(Message):
    """What a process says of the towers that it has made."""

    embedding: Annotated[str, Field(pattern=r"^\w+(\.\w+)*$", max_length=300)]
    facts: list[Line] = Field(max_length=500)


TokenIds = Annotated[list[Count], Field(max_length=2**20)]


class OwnTowers:
    """The towers of the model that a checkpoint is the language part of."""

    def __init__(self, context: TransformContext) -> None:
        self.context = context
        self._session: _MediaSession | None = None

    @cached_property
    def processor(self) -> OwnProcessor:
        """What makes token ids and embeddings of prompts.

        Raises `ConsentRequiredError` where nobody has agreed to run the repository's code.
        """
        _check_consent(self.context)
        return OwnProcessor(self)

    @property
    def embedding(self) -> str:
        """Path of the token embedding."""
        assert self._session is not None, "a prompt with images has been read"
        return self._session.opened.embedding

    def share(self, gm: nn.Module) -> None:
        """Do nothing: the process has its own memory, and reads the embedding from the files."""

    def close(self) -> None:
        """End the process; the next image starts another."""
        if self._session is not None:
            self._session.close()

    def prepare(self, tokens: list[int], inputs: Mapping[str, Any]) -> ImageInputs:
        """Return what has been read of a prompt; raise `UsageError` for anything else."""
        found = inputs.get(_READ)
        if not isinstance(found, ImageInputs):
            raise UsageError(
                "images of this model are read by code of its repository, with their prompt's text",
                hint="Give the text and the images",
            )
        if len(found) != len(tokens):
            raise UsageError(f"images of a prompt of {len(found)} tokens come with {len(tokens)}")
        return found

    def read(self, text: str, images: Sequence[Any]) -> tuple[list[int], ImageInputs]:
        """Return the token ids of a text with images (of Pillow), and the embeddings."""
        if self._session is None or not self._session.is_alive:
            self._session = _MediaSession(self.context)
            facts = [_WHERE, *_told(self._session.opened.facts)]
            self.context.facts.extend(each for each in facts if each not in self.context.facts)
        ids, rows = self._session.read(text, images)
        embeds = rows.to(self.context.device, self.context.dtype)
        return ids, ImageInputs(embeds, np.arange(len(ids)), 0)


class OwnProcessor:
    """A repository's processor, with the methods of `MediaProcessor`."""

    reads_messages = False

    def __init__(self, towers: OwnTowers) -> None:
        self.towers = towers

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return Tokenizer.load(self.towers.context.factory.checkpoint)

    def placeholder(self, kind: Kind, place: int = 0) -> str:
        """Return the text that the chat template writes for an image, the first being at place 0; ""
        if there is no template.
        """
        if self._tokenizer is None or not getattr(self._tokenizer.hf, "chat_template", None):
            return ""
        parts = [{"type": kind}] * (place + 1) + [{"type": "text", "text": _MARK}]
        fewer = self._tokenizer.chat([{"role": "user", "content": parts[1:]}]).partition(_MARK)[0]
        written = self._tokenizer.chat([{"role": "user", "content": parts}]).partition(_MARK)[0]
        return written[len(fewer) :] if written.startswith(fewer) else ""

    def prepare(self, text: str, media: PromptMedia) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt's token ids, and what is read of its images."""
        if media.sounds:
            raise UsageError("the model takes no sound")
        ids, found = self.towers.read(text, media.images)
        return ids, {_READ: found}

    def converse(self, messages: Sequence[Mapping[str, Any]], media: PromptMedia) -> Never:
        """Raise `UsageError`: it reads texts."""
        raise UsageError("the model's processor reads no messages")


def is_read_by_own_code(inputs: Mapping[str, Any] | None) -> bool:
    """Whether a prompt's inputs are what code of a repository has read of its images."""
    return isinstance((inputs or {}).get(_READ), ImageInputs)


class _MediaSession:
    """A process with the towers, and the files that it shares with this one."""

    def __init__(self, context: TransformContext) -> None:
        part = part_of(context.factory.checkpoint)
        assert part is not None
        self._files = ExitStack()  # what is open as long as this
        self._pixels, self._rows = _shared(self._files), _shared(self._files)
        with ExitStack() as stack:
            checkpoint = open_checkpoint(part.whole)
            weights, stored = open_files(checkpoint, stack, _beside(checkpoint, part))
            code = small_files(part.whole)
            files = _vocabularies(part.whole, code, stack)
            passed = [self._pixels.fileno(), self._rows.fileno(), *weights, *files.values()]
            self._child = Session("media", _limits(checkpoint, part), passed)
            self._closed = weakref.finalize(self, self._child.close)
            agree(self._child, unsandboxed=context.consent.unsandboxed)
            self._child.give(_with_whole_class(read_config(part.whole)), code)
            opening = {
                "inner": read_config(context.factory.checkpoint),
                "prefix": part.prefix,
                "stored": stored,
                "dtype": str(context.dtype).removeprefix("torch."),
                "files": files,
            }
            self.opened = cast(
                Opened, self._asked("open_media", {"opening": opening}, Reply[Opened])
            )
        self.width = int(context.factory.text_config.hidden_size)

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._closed.alive and self._child.process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._closed()
        self._files.close()

    def read(self, text: str, images: Sequence[Any]) -> tuple[list[int], torch.Tensor]:
        """Return token ids and embeddings [tokens, hidden] float32."""
        self._pixels.seek(0)
        self._pixels.truncate()
        for image in images:
            self._pixels.write(image.tobytes())
        self._pixels.flush()
        asked = {
            "text": text,
            "sizes": [image.size for image in images],
            "images": self._pixels.fileno(),
            "output": self._rows.fileno(),
        }
        ids = cast(list[int], self._asked("read_media", {"asked": asked}, Reply[TokenIds]))
        return ids, self._embeddings(len(ids))

    def _asked(self, task: str, arguments: dict[str, Any], schema: type[Reply[Any]]) -> Any:
        reply = self._child.ask(task, arguments, schema, own_code=False)
        if reply.error is not None:
            raise UsageError(reply.error, hint=reply.hint)
        return reply.result

    def _embeddings(self, count: int) -> torch.Tensor:
        """Read what the process has written, which is of the size that it should be, and finite."""
        size = 4 * count * self.width
        if count == 0 or os.fstat(self._rows.fileno()).st_size != size:
            raise _not_as_agreed("other embeddings than one for each token")
        data = os.pread(self._rows.fileno(), size, 0)
        if len(data) != size:
            raise _not_as_agreed("embeddings that end early")
        rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(count, self.width)
        if not bool(rows.isfinite().all()):
            raise _not_as_agreed("embeddings that are no numbers")
        return rows


def _told(facts: list[str]) -> list[str]:
    """Return facts of which those about names of older transformers are counted."""
    told = [each for each in facts if any(word in each for word in _FACTS)]
    rest = len(facts) - len(told)
    return [*told, f"{rest} things of older transformers are stood in for"] if rest else told


def _check_consent(context: TransformContext) -> None:
    part = part_of(context.factory.checkpoint)
    assert part is not None
    if not context.consent.code:
        raise ConsentRequiredError(
            "images of this model are read by Python code of its repository, which would be run",
            hint=f"Read the code in {part.whole}; then run again with --trust-remote-code",
        )


def _shared(stack: ExitStack) -> IO[bytes]:
    return stack.enter_context(tempfile.TemporaryFile())


def _vocabularies(folder: Path, code: Mapping[str, str], stack: ExitStack) -> dict[str, int]:
    """Open what processors read besides code and small texts; name -> number."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _VOCABULARIES and path.name not in code and path.is_file():
            VOCABULARY_BYTES.check(path.stat().st_size, path)
            found[path.name] = stack.enter_context(path.open("rb")).fileno()
    return found


def _beside(checkpoint: Checkpoint, part: LanguagePart) -> list[str]:
    """Return the tensors beside the language model's, and those of it that need no decoding, as its
    embedding.
    """
    return [
        name
        for name in checkpoint.names()
        if not name.startswith(part.prefix) or checkpoint.is_stored(name)
    ]


def _limits(checkpoint: Checkpoint, part: LanguagePart) -> Any:
    """Return the limits of a process that has room for the towers in float32, twice."""
    beside = (
        math.prod(meta.shape)
        for name, meta in checkpoint.names().items()
        if not name.startswith(part.prefix)
    )
    return LIMITS.model_copy(update={"gibibytes": LIMITS.gibibytes + 8 * sum(beside) / 2**30})


def _with_whole_class(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config whose `auto_map` names the class of the whole model as that of a language
    model.
    """
    classes = config["auto_map"]
    named = next((classes[name] for name in _CLASSES if name in classes), None)
    if named is None:
        raise UsageError("auto_map names no class of the whole model, so images cannot be read")
    return {**config, "auto_map": {**classes, "AutoModelForCausalLM": named}}


def _not_as_agreed(what: str) -> OnboardError:
    return OnboardError(
        f"the process that ran the model's code wrote {what}", hint="Do not trust this model"
    )
