"""What the file's functions are called: modules of a repository may each have one of the same name."""

from __future__ import annotations

import ast


class FunctionNames:
    """The names of helpers, each of which stands in the file once."""

    def __init__(self) -> None:
        self._named: dict[str, str] = {}
        """Name -> the definition, as its tree is written."""

    def of(self, node: ast.FunctionDef) -> str:
        """Return a helper's own name, or one apart where another helper has that."""
        name, definition = node.name, ast.dump(node)
        while self._named.setdefault(name, definition) != definition:
            name += "_too"
        return name
