"""The syntax tree of a function or a class that was imported."""

from __future__ import annotations

import ast
import inspect
from typing import Any


def parsed_code(item: Any) -> ast.stmt:
    """Return the definition of a function or a class, as far to the right as it may stand: comments
    and lines of texts in it may begin before it.

    Raises `OSError` or `TypeError` where it has no Python source, `SyntaxError` where that is not a
    statement by itself.
    """
    text = inspect.getsource(item)
    if not text[:1].isspace():
        return ast.parse(text).body[0]
    [within] = ast.parse(f"if True:\n{text}").body
    assert isinstance(within, ast.If)
    return within.body[0]
