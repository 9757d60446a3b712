"""The checkpoint's tokenizer: text to tokens and back, also token by token."""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError, UsageError
from onboard.hub import open_source
from onboard.untrusted.bounds import (
    PARTS,
    TEMPLATE_BYTES,
    TEMPLATE_SECONDS,
    TEXT_BYTES,
    VOCABULARY_BYTES,
    read_json,
)
from onboard.untrusted.lfs_pointer import refuse_pointer
from onboard.untrusted.limited import limited
from onboard.untrusted.silence import silence

WHOLE_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEKKEN_FILE = "tekken.json"
_FILES = (WHOLE_FILE, CONFIG_FILE, "tokenizer.model", "vocab.json", "vocab.txt", TEKKEN_FILE)
_NOT_RUN = "the tokenizer is tokenizer.json; the class of the repository is not run"
_PROBE = "a text to find again"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


_BYTE = re.compile("<0x([0-9A-F]{2})>")


@cache
def _alphabet() -> dict[str, int]:
    """Return the byte that each letter of GPT-2's alphabet stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


class Tokenizer:
    """A checkpoint's Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, note: str = "") -> None:
        self.hf = tokenizer
        self.note = note
        """What it is in place of, if anything."""

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizer | None:
        """Load the tokenizer in `checkpoint`, never with code of its repository; None if there is
        none.

        If the checkpoint names a class of the repository, tokenizer.json is used instead, and
        `note` says so; without that file `OnboardError` is raised.
        """
        if not any((checkpoint / name).is_file() for name in _FILES):
            return None
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        _check_fillers(checkpoint / TEKKEN_FILE)
        try:
            with silence():  # the Rust library prints names of options that it does not know
                if (checkpoint / WHOLE_FILE).is_file() and _is_code(checkpoint):
                    return cls(PreTrainedTokenizerFast.from_pretrained(checkpoint), _NOT_RUN)
                return cls(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False))
        except Exception as error:  # the Rust library raises bare exceptions
            raise _no_tokenizer(checkpoint, error) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, including the special tokens that the tokenizer
        adds.
        """
        ids: list[int] = self.hf(text)["input_ids"]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens."""
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, special tokens left out unless they are wanted."""
        decoder = self.hf if self._decoder is None else self._decoder
        text: str = decoder.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character; special ones have their
        text's.

        Vocabularies of bytes write them as `<0xE2>` (SentencePiece) or in GPT-2's alphabet.
        """
        text = self.decode([token], skip_special_tokens=False)
        piece = self.hf.convert_ids_to_tokens(token) if _UNFINISHED in text else None
        if piece and (match := _BYTE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if piece and _alphabet().keys() >= set(piece):
            return bytes(_alphabet()[letter] for letter in piece)
        return text.encode()

    @cached_property
    def _decoder(self) -> Any:
        """The Rust tokenizer, if transformers does nothing to its texts: what it does around costs
        more than they do, for each token of a stream.
        """
        from transformers import PreTrainedTokenizerFast as Fast

        own, kind = self.hf, type(self.hf)
        if not isinstance(own, Fast) or (kind.decode, kind._decode) != (Fast.decode, Fast._decode):
            return None
        return None if own.clean_up_tokenization_spaces else own.backend_tokenizer

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their texts."""
        tokens: dict[str, int] = self.hf.get_vocab()
        return tokens

    @property
    def special_tokens(self) -> dict[str, int]:
        """The texts of tokens that stand outside the vocabulary's words, and their ids."""
        added: dict[str, int] = self.hf.get_added_vocab()
        return added

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(getattr(self.hf, "chat_template", None))

    def check_template(self) -> None:
        """Raise `UsageError` without a chat template."""
        if not self.has_template:
            raise UsageError(
                "the checkpoint has no chat template", hint="Give prompts as text: generate"
            )

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Return the chat template's text for messages, including the beginning of the answer.

        `tools` and `options` are for the template, a program of the checkpoint's author. Raises
        `UsageError` without one, `OnboardError` if it fails or exceeds the limits of time, memory
        or text.
        """
        self.check_template()
        options = {"add_generation_prompt": True, **options, "tokenize": False}
        if self.wants_parts:
            messages = [_in_parts(each) for each in messages]
        try:
            text = self._written(messages, tools=tools, **options)
        except Exception as error:  # whatever it raises of its own, `raise_exception` among it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise OnboardError(f"the chat template fails ({reason})") from error
        TEXT_BYTES.check(len(text), "what the chat template makes")
        return text

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the chat template writes texts that are parts of a message, and loses those that
        are the message, as templates of models with images may.
        """
        asked: dict[str, Any] = {"role": "user", "content": _PROBE}
        return not self._writes([asked]) and self._writes([_in_parts(asked)])

    def _writes(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return _PROBE in self._written(messages, tokenize=False)
        except Exception:  # whatever it raises of its own: it does not write them
            return False

    def _written(self, messages: list[dict[str, Any]], **options: Any) -> str:
        with limited(TEMPLATE_SECONDS.most, TEMPLATE_BYTES.most):
            return str(self.hf.apply_chat_template(messages, **options))


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a text, is a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def tokenizer_folder(name: str, checkpoint: Path) -> Path:
    """Return the folder of the tokenizer that `name` is, a folder or an id; of the checkpoint if it
    is empty.

    Raises `UsageError` for a name without a tokenizer.
    """
    if not name:
        return checkpoint
    named = Path(name).expanduser()
    folder = named if named.is_dir() else open_source(name).files()
    if not any((folder / file).is_file() for file in _FILES):
        raise UsageError(f"{name} has no tokenizer", hint=f"It has none of {', '.join(_FILES)}")
    return folder


def _no_tokenizer(checkpoint: Path, error: Exception) -> OnboardError:
    """Say why the tokenizer does not load, in one line: code of a repository is not run here."""
    if _is_code(checkpoint):
        return OnboardError(
            f"the tokenizer in {checkpoint} is code of the model's repository, which is not run here",
            hint="Save it as a tokenizer.json without auto_map (save_pretrained of a fast tokenizer)",
        )
    for name in _FILES:
        if (checkpoint / name).is_file():
            refuse_pointer(checkpoint / name)
    reason = " ".join(str(error).split())
    return OnboardError(
        f"the tokenizer in {checkpoint} does not load: {reason}", hint="Fetch the checkpoint again"
    )


def _check_fillers(path: Path) -> None:
    """Raise `OnboardError` where more special tokens are to be made than the bound."""
    if path.is_file():
        values = read_json(path, VOCABULARY_BYTES, values=None)
        config = values.get("config") if isinstance(values, dict) else None
        count = config.get("default_num_special_tokens") if isinstance(config, dict) else None
        PARTS.check(count if isinstance(count, int) else 0, path)


def _is_code(checkpoint: Path) -> bool:
    """Whether a tokenizer's or a model's configuration names a tokenizer class of the
    repository.
    """
    maps = [_auto_map(checkpoint / name) for name in (CONFIG_FILE, "config.json")]
    return any(bool(each) if isinstance(each, list) else "AutoTokenizer" in each for each in maps)


def _auto_map(path: Path) -> dict[str, Any] | list[Any]:
    """Return where a configuration says that classes are code; older ones list the tokenizer's."""
    try:
        values = read_json(path, VOCABULARY_BYTES, values=None)
    except (OSError, OnboardError):
        return {}
    found = values.get("auto_map") if isinstance(values, dict) else None
    return found if isinstance(found, dict | list) else {}


class Detokenizer:
    """The text of a growing token list, stable from step to step.

    A token's text may depend on its neighbours, and a character may take several tokens. So each
    step decodes the last few tokens with and without the new ones, and appends the difference once
    it holds no unfinished character. Tokens before number `start` are left out.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, start: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._skip = skip_special_tokens
        self._context = start
        self._read = start

    def update(self, tokens: list[int]) -> str:
        """Return the text of all tokens so far, without an unfinished character at its end."""
        known = self._decode(tokens[self._context : self._read])
        new = self._decode(tokens[self._context :])
        if len(new) > len(known) and not new.endswith(_UNFINISHED):
            self.text += new[len(known) :]
            self._context, self._read = self._read, len(tokens)
        return self.text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self._skip)
