"""Logits of a text's last token alone: generated code has those of every token, and who runs it
takes what it needs.
"""

from __future__ import annotations

import ast

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code, Value
from onboard.hf.old.given_logits import given_by

_LAST = frozenset({"-1", "[-1]", "-1:", "-1::"})


class LastTokens(Mechanism):
    """`x[:, [-1], :]` of hidden states, in the model whose forward gives no other logits."""

    def subscript(self, owner: Value, index: ast.expr, frame: Frame) -> Value | None:
        """All of them."""
        if frame.kind != "forward" or not given_by(type(frame.translator.model)).of_last:
            return None
        match owner, index:
            case (
                Code(static=False, form=None),
                ast.Tuple(elts=[ast.Slice(lower=None, upper=None, step=None), last, *rest]),
            ) if ast.unparse(last) in _LAST and [ast.unparse(item) for item in rest] in ([], [":"]):
                return owner
        return None
