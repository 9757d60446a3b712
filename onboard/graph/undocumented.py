"""Classes of transformers without the documentation that it writes for them when they are imported:
for a config class's it imports the table of all its models, its generation, and what that needs
(scikit-learn, SciPy), seconds of an engine's start.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_WRITTEN_BY = "auto_class_docstring"


@contextmanager
def undocumented_classes() -> Iterator[None]:
    """Leave the documentation of classes that are imported meanwhile as their code has it."""
    writer = importlib.import_module("transformers.utils.auto_docstring")
    with mock.patch.object(writer, _WRITTEN_BY, _as_it_is):
        yield


def _as_it_is(cls: type, **_: Any) -> type:
    return cls
