"""What a layer finds in a dict in which each leaves an entry of its own: nothing."""

from __future__ import annotations

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.statements.assignments.own_entries import (
    OwnEntries,
    is_own_key,
)
from onboard.codegen.translate.language.values import NONE, Value


class OwnEntriesRead(Mechanism):
    """`entries.get(self.layer_idx, None)`."""

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The default, before the layer has made its entry."""
        if not isinstance(owner, OwnEntries) or owner.filled or attr != "get" or frame.cls is None:
            return None
        match args.positional:
            case [key, *default] if is_own_key(key, [*frame.translator.modules_of(frame.cls.cls)]):
                return default[0] if default else NONE
        return None
