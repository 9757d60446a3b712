"""Texts that have codes of several codebooks at a position: one token for us, a row for each
codebook in the source.

The translation is that of the source's forward, on rows that the generated one makes of its tokens,
as the tests do for transformers' model.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees.syntax import attribute, name

_BOOKS = attribute(name("self"), "codebooks")


def property_of(tables: str, heads: str) -> tuple[str, str]:
    """Return the signature and the body of the property that has the codebooks, from where the
    modules are.
    """
    return (
        "(self) -> Codebooks",
        f"return Codebooks(len(self.{heads}), self.{tables}[0].num_embeddings)",
    )


def on_tokens(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the body of a forward on `input_ids` that are tokens, of one on rows that returns the
    rows' logits.
    """
    changed = [_Joined().visit(deepcopy(statement)) for statement in body]
    rows = ast.Call(attribute(_BOOKS, "rows"), [name("input_ids")], [])
    return [ast.Assign([name("input_ids", store=True)], rows), *changed]


class _Joined(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.Return:
        assert node.value is not None
        node.value = ast.Call(attribute(_BOOKS, "join"), [node.value], [])
        return node
