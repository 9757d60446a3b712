"""Outputs that follow a JSON schema, an expression or a grammar: llguidance says which tokens go on.

llguidance (https://github.com/guidance-ai/llguidance) computes the mask of a position from the
tokens so far, in some ten microseconds and without a table made before.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from onboard.errors import UsageError
from onboard.runtime.sampling_params import StructuredOutputs
from onboard.runtime.tokenizer import Tokenizer
from onboard.untrusted.bounds import GRAMMAR_BYTES

End = Literal["stop", "length"] | None
"""How an output ends with a token; None: it goes on."""
_OBJECT = {"type": "object"}
_SPACE = r"[ \t]{1,40}|\r?\n[ \t]{0,40}"
"""White space between the tokens of JSON: one line end and its indentation at most. Models that are
held to JSON write line ends until their room ends, where the grammar lets them.
"""


class Grammars:
    """Makes matchers for the outputs of one model."""

    def __init__(self, tokenizer: Tokenizer | None, vocabulary: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def matcher(self, wanted: StructuredOutputs | None) -> Matcher | None:
        """Return the matcher of one output, None where nothing is wanted; it takes tens of
        milliseconds for large schemas, and any thread may ask.

        Raises `UsageError` for a schema, an expression or a grammar that is none.
        """
        if wanted is None:
            return None
        source = _source(wanted)
        if len(source) > GRAMMAR_BYTES.most:
            raise UsageError(
                f"structured_outputs has {len(source):,} bytes",
                hint=f"At most {GRAMMAR_BYTES.most:,} are taken",
            )
        matcher = _llguidance().LLMatcher(self.tokens, source)
        if matcher.is_error():
            raise UsageError(
                f"{_given(wanted)} is not understood: {_in_one_line(matcher.get_error())}"
            )
        return Matcher(matcher)

    @cached_property
    def tokens(self) -> Any:
        """The tokenizer as llguidance reads it, once; the tokenizer serves nobody else meanwhile."""
        if self._tokenizer is None:
            raise UsageError("structured_outputs need a tokenizer and the checkpoint has none")
        _llguidance()
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer.hf, n_vocab=self._vocabulary)
        except (
            Exception
        ) as error:  # whatever the library raises for a tokenizer that it cannot read
            reason = _in_one_line(f"{type(error).__name__}: {error}")
            raise UsageError(f"structured_outputs cannot use this tokenizer ({reason})") from error


class Matcher:
    """Where one output is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        """Return another matcher at the same place."""
        return Matcher(self._matcher.deep_copy())

    def exclude(self, kept: npt.NDArray[np.uint8]) -> None:
        """Clear in `kept` [bytes] the bits of tokens with which the output cannot go on."""
        found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: len(kept)]
        kept[: len(found)] &= found
        kept[len(found) :] = 0

    def took(self, token: int) -> End:
        """Follow a token; return "stop" if nothing may come behind it, "length" if the grammar is
        too complex to be followed any further.
        """
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return "length"
        return "stop" if self._matcher.is_stopped() else None


def _given(wanted: StructuredOutputs) -> str:
    """Return the name of the constraint, as requests of every interface have it."""
    said = wanted.model_dump(exclude_defaults=True)
    return next(iter(said))


def _source(wanted: StructuredOutputs) -> str:
    """Return the constraint in llguidance's own notation."""
    matcher = _llguidance().LLMatcher
    try:
        if wanted.json_schema is not None or wanted.json_object:
            schema = wanted.json_schema if wanted.json_schema is not None else _OBJECT
            space = {"whitespace_pattern": _SPACE}
            return str(matcher.grammar_from_json_schema(schema, defaults=space))
        if wanted.regex is not None:
            return str(matcher.grammar_from_regex(wanted.regex))
        if wanted.choice is not None:
            return str(matcher.grammar_from_lark(_one_of(wanted.choice)))
        assert wanted.grammar is not None
        return str(matcher.grammar_from_lark(wanted.grammar))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{_given(wanted)} is not understood: {_in_one_line(str(error))}"
        ) from error


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _one_of(choices: list[str]) -> str:
    """Return a grammar in Lark's notation: a JSON string is one of its literals."""
    return "start: " + " | ".join(json.dumps(choice) for choice in choices)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "structured_outputs need llguidance, which is not installed",
            hint="Run: pip install 'onboard[serve]'",
        ) from None
    return llguidance
