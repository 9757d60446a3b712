"""docs/security.md: every test and every attempt that it names is there, every finding has one; and
what is promised of dependencies.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.escapes import ATTEMPTS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
FINDINGS = [
    f"{severity}{number}"
    for severity, count in (("C", 3), ("H", 6), ("M", 11), ("L", 8))
    for number in range(1, count + 1)
]


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("finding", FINDINGS)
def test_every_finding_is_held_by_tests_that_exist(finding: str) -> None:
    [row] = re.findall(rf"^\| {finding} .*$", TEXT, re.MULTILINE)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
    assert named
    for path, name in named:
        assert name in functions(path), f"{path} has no {name}"


def test_every_attempt_is_in_the_table_and_made() -> None:
    table = TEXT.partition("| tried by the code |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    made = {attempt.__name__ for attempt in ATTEMPTS}
    findings = TEXT.partition("| finding |")[2].partition("| tried")[0]
    assert named | set(re.findall(r"escapes\.py::(\w+)`", findings)) == made


def test_every_file_that_is_named_is_there() -> None:
    for path in re.findall(r"`((?:tests|onboard)/[\w/]+\.py)`", TEXT):
        assert (ROOT / path).is_file(), path


def test_every_dependency_has_a_version_that_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tried = {
        name.lower(): version
        for name, _, version in (line.partition("==") for line in lines if "==" in line)
        if not name.startswith("#")
    }
    for words in project["dependencies"]:
        needed = Requirement(words)
        assert needed.url is None
        assert any(bound.operator == ">=" for bound in needed.specifier)
        assert tried[needed.name.lower()] in needed.specifier, needed.name
