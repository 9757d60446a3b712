"""The words of docs/architecture.md: one term a thing, and what it names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import onboard.cache.budget
import onboard.runtime.multimodal.image_inputs
import onboard.runtime.scheduling.pending_step
import onboard.runtime.scheduling.request

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
GLOSSARY = PAGE.split("\n## Words\n")[1].split("\n## ")[0]

# Names that a thing had before it got the term of the glossary.
GONE = {
    "CacheMemory": "SequencePages",
    "Composite": "Towers",
    "Flight": "PendingStep",
    "Landing": "TokenReceiver",
    "PromptInputs": "ImageInputs",
    "given_rows": "image_rows",
    "has_given": "reads_images",
    "losses": "mode_notes",
    "narrow_types": "branch_types",
    "own_cache": "cache_probe",
    "reads_given": "reads_images",
    "unrun": "unused_modules",
}
MODULES = (
    onboard.cache.budget,
    onboard.runtime.multimodal.image_inputs,
    onboard.runtime.scheduling.pending_step,
    onboard.runtime.scheduling.request,
)


def terms() -> list[str]:
    rows = re.findall(r"^\| ([^|]+) \| [^|\s]", GLOSSARY, re.MULTILINE)
    return [term.strip() for row in rows for term in row.split(",")]


def defined(tree: ast.Module) -> Iterator[str]:
    """What a file gives names to: classes, functions, parameters and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_a_term_stands_once_in_the_glossary() -> None:
    found = terms()
    assert len(found) > 50
    assert sorted(set(found)) == sorted(found)


def test_what_the_glossary_names_exists() -> None:
    code = re.findall(r"`([^`]+)`", GLOSSARY)
    for name in code:
        if name.endswith(".py") and "<" not in name:
            assert (ROOT / "onboard" / name).exists(), name
        elif re.fullmatch(r"[A-Z]\w+", name):
            known = any(hasattr(module, name) for module in MODULES)
            assert known or (ROOT / "onboard" / "cache" / "rows.py").read_text().count(name), name


def test_names_that_a_term_replaced_are_gone() -> None:
    paths = [
        path
        for folder in ("onboard", "transforms")
        for path in (ROOT / folder).rglob("*.py")
        if "content" not in path.parts
    ]
    back = [
        f"{path.relative_to(ROOT)}: {name} is {GONE[name]} now"
        for path in paths
        for name in {*defined(ast.parse(path.read_text("utf-8"))), path.stem} & GONE.keys()
    ]
    assert back == []
