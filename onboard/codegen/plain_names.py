"""Names in a generated text that say something else than what it does: dropout that is left out,
numpy for math.
"""

from __future__ import annotations

import ast
import math
import re

_DROPOUT = re.compile(r"(^|_)dropout(_|$)")


def with_plain_names(text: str) -> str:
    """Return a model file's text with its helper functions named after what is left of them, and
    `math` for `numpy`.
    """
    tree = ast.parse(text)
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        plain = _DROPOUT.sub(r"\1", function.name).strip("_")
        if plain != function.name and plain.isidentifier() and plain not in taken:
            text = re.sub(rf"(?<![\w.]){function.name}(?=\()", plain, text)
    return _with_math(text, tree)


def _with_math(text: str, tree: ast.Module) -> str:
    """Numbers of a config need no arrays; where a function of numpy has no counterpart, all
    stay.
    """
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    aliases = {
        alias.asname or alias.name
        for node in imports
        for alias in node.names
        if alias.name == "numpy"
    }
    for alias in aliases:
        used = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and _is_name(node.value, alias)
        ]
        if all(hasattr(math, node.attr) for node in used):
            text = re.sub(rf"\bimport numpy as {alias}\b|\bimport numpy\b", "import math", text)
            text = re.sub(rf"(?<![\w.]){alias}\.", "math.", text)
    return text


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
