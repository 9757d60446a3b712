"""Loops are printed as Python reads them, whatever their targets are."""

from __future__ import annotations

import ast

import pytest

from onboard.codegen.translate.output.printer import print_block


@pytest.mark.parametrize(
    "target", ["a", "a, b", "(a, b), c", "a, (b, c)", "(a, b), (c, d)", "(a,)", "[a, b]"]
)
def test_targets_stay_what_they_are(target: str) -> None:
    loop = ast.parse(f"for {target} in rows:\n    x = a")
    printed = print_block(loop.body, None, 0)
    assert ast.dump(ast.parse(printed)) == ast.dump(loop)


def test_the_outermost_have_no_parentheses() -> None:
    loop = ast.parse("for (a, (b, c)) in rows:\n    x = a")
    assert print_block(loop.body, None, 0).startswith("for a, (b, c) in rows:")
