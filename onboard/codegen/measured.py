"""`Measured`: what generated tests need of the model itself, beside its spec."""

from __future__ import annotations

import ast
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator
from typing_extensions import TypeAliasType

from onboard.untrusted.identifiers import AttributePath, Identifier

Name = Annotated[str, Field(max_length=200)]
ModulePath = Annotated[str, Field(max_length=500, pattern=r"^[A-Za-z0-9_.]*$")]
Plain = TypeAliasType(
    "Plain",
    "None | bool | int | float | str | list[Plain] | tuple[Plain, ...] | dict[str | int, Plain]",
)
"""What a config's argument is made of."""


class Measured(BaseModel):
    """What the tests' file needs of the model itself: data alone, for it may come from a process
    that runs a repository's code.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    config: dict[Identifier, Plain]
    """The arguments that make the small config."""
    config_module: AttributePath
    layers: dict[ModulePath, Name]
    """Path -> kind of the decoder layers to test."""
    blocks: dict[ModulePath, Name]
    codebooks: tuple[int, int] | None = None
    """How many, and the codes of each; None: one."""

    @field_serializer("config")
    def _written(self, config: dict[str, Any]) -> str:
        """Write the arguments as Python does: JSON has no tuples, and no keys but texts."""
        return repr(config)

    @field_validator("config", mode="before")
    @classmethod
    def _read(cls, config: object) -> object:
        if not isinstance(config, str):
            return config
        try:
            return ast.literal_eval(_Numbers().visit(ast.parse(config, mode="eval")))
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError("a text that is no literal") from error


class _Numbers(ast.NodeTransformer):
    """Writes what Python calls `inf` and `nan`, which have no literal, as numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node
