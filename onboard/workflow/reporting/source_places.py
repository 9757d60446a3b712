"""Where a class is: in the generated model file, and in the modeling code that it was made from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from onboard.analysis.spec import ModelSpec


def class_lines(text: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each top-level class and function of a Python file, by
    name; none of a text that is no Python.
    """
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return {}
    kinds = ast.ClassDef | ast.FunctionDef
    return {
        node.name: (_first_line(node), node.end_lineno or node.lineno)
        for node in body
        if isinstance(node, kinds)
    }


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def source_place(spec: ModelSpec, source: str) -> str:
    """Return where a block's `file.py:line` is: below the installed packages, or in the
    repository.
    """
    name, _, line = source.partition(":")
    if spec.repository is not None:
        return source
    for module in _modules(spec, name):
        found = find_spec(module)
        if found is not None and found.origin is not None and Path(found.origin).name == name:
            return f"{module.replace('.', '/')}.py:{line}"
    return source


def _modules(spec: ModelSpec, file_name: str) -> Iterator[str]:
    """Yield modules that a file may be: beside the model's, and where transformers' models have a
    file of that name.
    """
    package, _, _ = spec.hf_module.rpartition(".")
    stem = file_name.removesuffix(".py")
    yield f"{package}.{stem}"
    folder = find_spec("transformers")
    assert folder is not None
    models = Path(folder.origin or "").parent / "models"
    for path in sorted(models.glob(f"*/{file_name}")):
        yield f"transformers.models.{path.parent.name}.{stem}"
