"""What a child may send, as a schema: nothing is taken that is not in it.

No field has values of any type, so that the schema bounds the depth, too.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(max_length=300)]
Line = Annotated[str, Field(max_length=20_000)]
Text = Annotated[str, Field(max_length=2**20)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
T = TypeVar("T")


class Message(BaseModel):
    """Exactly the fields that are declared, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Hello(Message):
    """A child's first words, before it has seen anything of the repository."""

    walls: list[Word] = Field(max_length=20)
    """What holds of `onboard.workflow.remote.sandbox`."""


class Reply(Message, Generic[T]):
    """What became of a request: a result, or why there is none."""

    result: T | None = None
    error: Line | None = None
    hint: Line = ""
    block: Word = ""
    """The class that has no translation, where that is what is wrong."""
