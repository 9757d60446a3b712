"""scripts/metrics.py finds what it counts."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "metrics.py"))


def test_a_circle_is_found_with_all_that_is_in_it(metrics: dict[str, Any]) -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert metrics["circles"](graph) == [["a", "b", "c"]]
    assert metrics["circles"]({"a": {"b"}, "b": set()}) == []


def test_imports_for_type_checkers_are_left_out(metrics: dict[str, Any]) -> None:
    text = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    from c import d\n"
    assert set(metrics["imported"](ast.parse(text))) == {"a", "c", "c.d"}


@pytest.mark.parametrize(
    ("literal", "found"),
    [
        ('["torch_moe", "torch_mla"]', {"torch_moe", "torch_mla"}),
        ("(ops.torch_moe, torch_mla)", {"torch_moe", "torch_mla"}),
        ('{"torch_moe": 1}', {"torch_moe"}),
        ("[f(torch_moe), 3]", set()),
    ],
)
def test_ops_are_found_by_name_and_as_attributes(
    metrics: dict[str, Any], literal: str, found: set[str]
) -> None:
    assert metrics["ops_in"](ast.parse(literal, mode="eval").body) == found


def test_median_ninetieth_percent_and_maximum(metrics: dict[str, Any]) -> None:
    assert metrics["spread"](range(1, 12)) == "6/10/11"
    assert metrics["spread"]([]) == "-"
