"""Text to tokens and back: the checkpoint's own tokenizer, and text that grows token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A checkpoint's Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.hf = tokenizer

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizer | None:
        """Load the tokenizer in `checkpoint`, never by code of its repository; None when the folder
        has none.
        """
        if not any((checkpoint / name).is_file() for name in _FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False))
        except Exception as error:  # the Rust library raises bare exceptions
            raise _no_tokenizer(checkpoint, error) from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds to a
        prompt.
        """
        ids: list[int] = self.hf(text)["input_ids"]
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, special tokens left out."""
        text: str = self.hf.decode(tokens, skip_special_tokens=True)
        return text


def _no_tokenizer(checkpoint: Path, error: Exception) -> OnboardError:
    """Say why the tokenizer does not load, in one line: code of a repository is not run here."""
    if _is_code(checkpoint / "tokenizer_config.json"):
        return OnboardError(
            f"the tokenizer in {checkpoint} is code of the model's repository, which is not run here",
            hint="Save it as a tokenizer.json without auto_map (save_pretrained of a fast tokenizer)",
        )
    reason = " ".join(str(error).split())
    return OnboardError(
        f"the tokenizer in {checkpoint} does not load: {reason}", hint="Fetch the checkpoint again"
    )


def _is_code(path: Path) -> bool:
    """Whether a tokenizer's configuration names a class of the repository."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and bool(values.get("auto_map"))


class Detokenizer:
    """The text of a growing token list, stable from step to step.

    A token's text may depend on its neighbours, and a character may take several tokens. So each
    step decodes the last few tokens with and without the new ones, and appends the difference once
    it holds no unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._context = 0
        self._read = 0

    def update(self, tokens: list[int]) -> str:
        """Take all tokens so far; return the text so far, without a last unfinished character."""
        known = self.tokenizer.decode(tokens[self._context : self._read])
        new = self.tokenizer.decode(tokens[self._context :])
        if len(new) > len(known) and not new.endswith(_UNFINISHED):
            self.text += new[len(known) :]
            self._context, self._read = self._read, len(tokens)
        return self.text
