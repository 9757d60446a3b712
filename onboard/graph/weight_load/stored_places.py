"""A checkpoint's weights as open files, for a process that sees no file of its user."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from onboard.graph.weight_load.safetensors_folder import Checkpoint


def open_files(checkpoint: Checkpoint, stack: ExitStack) -> tuple[list[int], dict[str, Any]]:
    """Open the files of a checkpoint, to read, until the stack is closed.

    Returns:
        The files' numbers, and of each tensor by name where it is: `file`, `offset`, `shape` and
        `dtype`, as JSON has them.
    """
    places = {name: checkpoint.place(name) for name in checkpoint.names()}
    paths = sorted({path for path, _ in places.values()})
    files = {path: stack.enter_context(path.open("rb")).fileno() for path in paths}
    stored = {
        name: {
            "file": files[path],
            "offset": meta.offset,
            "shape": list(meta.shape),
            "dtype": str(meta.dtype).removeprefix("torch."),
        }
        for name, (path, meta) in places.items()
    }
    return list(files.values()), stored
