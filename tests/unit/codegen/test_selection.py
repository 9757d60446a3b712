"""Branches that choose the best only where there are more."""

from __future__ import annotations

import ast

import pytest

from onboard.codegen.translate.language.trees.selection import always


def _branch(text: str) -> ast.If:
    statement = ast.parse(text).body[0]
    assert isinstance(statement, ast.If)
    return statement


@pytest.mark.parametrize("call", ["torch.topk(x, {}, dim=-1)", "x.topk({}, dim=-1)"])
@pytest.mark.parametrize("comparison", [">", ">="])
def test_the_choice_is_made_always(call: str, comparison: str) -> None:
    body = always(
        _branch(f"if x.shape[-1] {comparison} self.keep:\n    y = {call.format('self.keep')}")
    )
    assert body is not None
    assert [ast.unparse(item) for item in body] == [
        "y = " + call.format("min(self.keep, x.shape[-1])")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "if x.shape[-1] < k:\n    y = x.topk(k)",
        "if x.shape[-1] > k:\n    y = x.topk(k)\nelse:\n    y = x",
        "if x.shape[-1] > k:\n    y = x.topk(k + 1)",
        "if x.shape[-1] > k:\n    y = z.topk(k)",
        "if x.shape[-2] > k:\n    y = x.topk(k)",
        "if x.shape[-1] > k:\n    y = x.topk(k).values + x.topk(k).indices",
        "if x.shape[-1] > k:\n    y = x * 2",
    ],
)
def test_other_branches_stay(text: str) -> None:
    assert always(_branch(text)) is None
