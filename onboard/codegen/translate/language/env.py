"""The variables of a function."""

from __future__ import annotations

from dataclasses import dataclass, field

from onboard.codegen.translate.language.values import Value


@dataclass
class Env:
    """Variables of a function; attributes of the module under construction are called `self.x`."""

    values: dict[str, Value] = field(default_factory=dict)

    def copy(self) -> Env:
        """Return an independent copy."""
        return Env(dict(self.values))
