"""Parts of a model whose results its logits do not read, heads that training alone has: what they
compute needs no translation.
"""

from __future__ import annotations

import ast
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from onboard.analysis.behaviour.idle import is_idle
from onboard.analysis.tiny.tiny_prompts import prompts
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.values import Unread, Value

_IDLE: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()
"""Models -> their parts that were tried."""


class IdleModules(Mechanism):
    """`self.heads(x)` in the forward of a repository's model, if the logits stay as they are whatever
    that gives.
    """

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Return what nothing may read."""
        program = frame.translator
        whole = frame.cls is not None and frame.cls.cls is type(program.model)
        own = program.specialised and isinstance(program.model, PreTrainedModel)
        if not (whole and own and isinstance(callee, Instance)):
            return None
        match callee.expr:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if _gives_nothing(
                program.model, attr
            ):
                return Unread(f"what {attr} gives, which the logits do not depend on")
        return None


def _gives_nothing(model: nn.Module, attr: str) -> bool:
    known = _IDLE.setdefault(model, {})
    if attr not in known:
        known[attr] = is_idle(model, attr, prompts(model)[0])
    return known[attr]
