"""What a role may answer: JSON of a schema, alone or as the last fenced block of a text."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from onboard.agents.refused import RefusedError

MOST_ANSWER = 2**20
"""Letters of a text in which an answer is looked for."""
_FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
A = TypeVar("A", bound="Answer")


class Answer(BaseModel):
    """Exactly the fields that are declared, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Block(Answer):
    """A class or a function, written anew."""

    name: str = Field(pattern=r"^[A-Za-z_]\w{0,199}$")
    text: str = Field(max_length=2**18)


class RepairAnswer(Answer):
    """A patch, in one of two forms."""

    explanation: str = Field(default="", max_length=20_000)
    diff: str | None = Field(default=None, max_length=2**19)
    """A unified diff."""
    block: Block | None = None
    """A class of the model file, whole."""

    @model_validator(mode="after")
    def _one_form(self) -> RepairAnswer:
        if (self.diff is None) == (self.block is None):
            raise ValueError("give either a diff or a block")
        return self


class PortAnswer(Answer):
    """The block that could not be translated, in canonical ops."""

    explanation: str = Field(default="", max_length=20_000)
    block: Block


class ReviewedItem(Answer):
    """The verdict on an item of the checklist."""

    id: str = Field(max_length=20)
    verdict: Literal["PASS", "FAIL"]
    evidence: list[str] = Field(min_length=1, max_length=100)
    """`file:line: text`."""


class ReviewAnswer(Answer):
    """The verdicts on all items."""

    items: list[ReviewedItem] = Field(max_length=1000)


class RunAnswer(Answer):
    """What the runner says of a run's texts."""

    verdict: Literal["coherent", "incoherent"]
    reason: str = Field(max_length=2000)
    learnt: str = Field(default="", max_length=2000)
    """What the next try should know."""


def read_answer(text: str, kind: type[A]) -> A:
    """Return the answer that a text holds.

    Raises:
        RefusedError: there is none, or it is not of the schema.
    """
    if len(text) > MOST_ANSWER:
        raise RefusedError(
            f"the answer has {len(text):,} letters, at most {MOST_ANSWER:,} are read"
        )
    reason = "no JSON object was found"
    for candidate in (text, *reversed(_FENCED.findall(text))):
        try:
            return kind.model_validate_json(_object(candidate))
        except ValidationError as error:
            reason = _first(error)
        except ValueError:
            continue
    raise RefusedError(f"the answer is not of the schema: {reason}")


def schema_of(kind: type[Answer]) -> str:
    """Return the JSON schema of an answer, for the brief."""
    return json.dumps(kind.model_json_schema(), indent=1)


def _object(text: str) -> str:
    """Return a text that is a JSON object, whatever lies around it on the same lines."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start or text[:start].strip() or text[end + 1 :].strip():
        raise ValueError("no object")
    return text[start : end + 1]


def _first(error: ValidationError) -> str:
    first: Any = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
