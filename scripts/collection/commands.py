"""The commands of `remote_collection.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scripts.collection.checking import check, compare, generate
from scripts.collection.filling import fill
from scripts.collection.judging import judge, stand_in, weights

_COMMANDS: tuple[Any, ...] = (fill, weights, stand_in, judge, check, generate, compare)
_PATHS = {"fill": (0, 1), "judge": (0, 2), "generate": (0, 2, 3), "compare": (0, 2, 3)}
"""Which arguments are paths, of the others the first."""


def main() -> None:
    """Run the command that the command line names."""
    command, *rest = sys.argv[1:]
    places = _PATHS.get(command, (0,))
    commands = {each.__name__: each for each in _COMMANDS}
    commands[command](*(Path(word) if i in places else word for i, word in enumerate(rest)))
