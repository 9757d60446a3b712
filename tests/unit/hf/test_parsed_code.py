"""Definitions that are parsed by themselves, however far to the right and to the left their lines are."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from onboard.hf.parsed_code import parsed_code

_MODULE = '''
class Outer:
    class Inner:
        def method(self, x):
# a comment before the code
            """Words

that go on at the left."""
            return x + 1

    if True:
        @property
        def conditional(self):
# another one
            return 2


def plain(x):
# at the left
    return x
'''


def test_lines_at_the_left_are_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lines_at_the_left.py").write_text(_MODULE)
    module = importlib.import_module("lines_at_the_left")
    found = [
        parsed_code(item)
        for item in (
            module.Outer,
            module.Outer.Inner,
            module.Outer.Inner.method,
            module.Outer.conditional.fget,
            module.plain,
        )
    ]
    assert all(isinstance(each, ast.ClassDef | ast.FunctionDef) for each in found)
    names = [each.name for each in found if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    assert names == ["Outer", "Inner", "method", "conditional", "plain"]
    assert [ast.unparse(each).splitlines()[-1].strip() for each in found[2:]] == [
        "return x + 1",
        "return 2",
        "return x",
    ]
