"""What a file says of forwards that were recorded, and which of its classes are in doubt."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

from torch import nn

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.without_cache import written_out
from onboard.errors import OnboardError
from onboard.vetting.model_text import vet_model_text

_ORIGIN = "The forward is what the code was seen to do, call by call, not what it says."


def with_origin(docstring: str, cls: type, straight: Collection[type]) -> str:
    """Return a class's docstring, which says so if its forward was recorded."""
    if cls not in straight:
        return docstring
    return f"{docstring.rstrip()}\n\n    {_ORIGIN}\n    "


def recorded_classes(text: str) -> list[str]:
    """Return the classes of a model file whose forwards were recorded."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [node.name for node in classes if _ORIGIN in " ".join((ast.get_docstring(node) or "").split())]  # fmt: skip


def doubt(text: str, model: nn.Module) -> Untranslatable | None:
    """Return what a model file of a repository's code has that none may have, or lacks: an op with a
    cache, where tokens of the small `model` reach one another; None: nothing.
    """
    try:
        vet_model_text(text)
    except OnboardError as error:
        line = re.search(r"line (\d+):", str(error))
        return Untranslatable(str(error), _class_at(text, int(line[1]) if line else 0))
    if (found := written_out(text, model)) is not None:
        return Untranslatable(f"in {found[0]} tokens reach one another by no known op", (found[1],))
    return None


def _class_at(text: str, line: int) -> tuple[str, ...]:
    nodes: list[Any] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return tuple(node.name for node in nodes if node.lineno <= line <= node.end_lineno)
