"""What all parts of a spec have in common, and all of its blocks."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from onboard.untrusted.identifiers import Identifier


class Record(BaseModel):
    """Part of a spec: no other fields, and no other values when it is changed."""

    # The schema that an editor shows beside spec.yaml says what a field means, as its docstring does.
    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",  # as config.json may have them
    )


class Parameters(Record):
    """What a block's template needs."""

    def given(self) -> dict[str, Any]:
        """Return what was found, by name; what was not even looked for is left out."""
        return {key: value for key, value in self if key in self.model_fields_set}

    @model_serializer(mode="wrap")
    def _without_the_rest(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {key: value for key, value in fields.items() if key in self.model_fields_set}


class AnyBlock(Record):
    """One class of the Hugging Face module tree that the generated file contains, or a function
    that its code calls.
    """

    class_name: Identifier
    """As in the Hugging Face source, for example `LlamaRMSNorm`."""
    kind: str
    """What it computes: each kind has parameters of its own."""
    path: str
    """Its first place in the module tree, for example `model.layers.0.mlp`."""
    source: str
    """`modeling_llama.py:120`."""
    parameters: Parameters = Field(default_factory=Parameters)
    """Names of attributes and arguments in the source, and options, as its kind asks for them."""
    evidence: list[str] = Field(default_factory=list)
    """Why its kind is believed: the probe and its error, or the line."""
