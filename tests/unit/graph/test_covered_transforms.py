"""Every transform that the texts name is there, is run, and has tests of its effect and numerics."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from onboard.config import Mode
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.transform import transform_keys
from tests.support.graph.covered_transforms import COVERED

UNIT = Path(__file__).resolve().parents[1]
KEYS = 48
"""Transforms that the texts name."""


def test_every_transform_of_the_texts_is_in_a_pipeline() -> None:
    assert len(COVERED) == KEYS
    assert COVERED.keys() <= transform_keys().keys()
    listed = {
        transform.key for mode in get_args(Mode) for transform in load_pipeline({}, mode=mode)
    }
    assert COVERED.keys() <= listed


@cache
def functions_of(path: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((UNIT / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("key", COVERED)
def test_its_tests_are_there_and_none_is_skipped(key: str) -> None:
    for name in COVERED[key]:
        path, _, function = name.partition("::")
        marks = [ast.unparse(each) for each in functions_of(path)[function].decorator_list]
        assert not [mark for mark in marks if "skip" in mark or "xfail" in mark]
