"""Names that come from elsewhere and become code: types of strings that hold nothing else."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

NAME = "[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True)
class Pattern:
    """What a string as a whole has to be; none of its names is a keyword of Python's."""

    pattern: str

    def check(self, value: str) -> str:
        """Return the value; raise `ValueError` where it is anything else."""
        if not re.fullmatch(self.pattern, value) or any(map(keyword.iskeyword, value.split("."))):
            raise ValueError(f"{value!r} stands where an identifier belongs")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}


Identifier = Annotated[str, Pattern(NAME)]
"""A name in code."""
AttributePath = Annotated[str, Pattern(rf"{NAME}(\.{NAME})*")]
"""Names with points between them: what a module has, or its modules."""
ModulePath = Annotated[str, Pattern(rf"({NAME}|\d{{1,4}})(\.({NAME}|\d{{1,4}}))*")]
"""The same with numbers, of the modules in an `nn.Sequential`."""
SelfPath = Annotated[str, Pattern(rf"self(\.{NAME})+")]
"""An attribute of `self`, written with it."""
Variable = Annotated[str, Pattern(rf"(self\.)?{NAME}")]
"""A variable of a method, or an attribute of `self`."""
FileName = Annotated[str, Pattern(r"([A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*")]
"""A file's name in a folder: it leads nowhere else."""
ModelType = Annotated[str, Pattern("[A-Za-z_][A-Za-z0-9_-]*")]
"""A `model_type`, which may have hyphens."""
