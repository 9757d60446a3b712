"""A checkpoint's weights as open files, for a process that sees no file of its user."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.gpu import gigabytes
from onboard.graph.weight_load.safetensors_folder import Checkpoint


def open_files(
    checkpoint: Checkpoint, stack: ExitStack, names: Iterable[str]
) -> tuple[list[int], dict[str, Any]]:
    """Open what holds these tensors of a checkpoint, to read, until the stack is closed: its files, and
    one without a name that has the values of those that are quantised, in float32.

    Returns:
        The files' numbers, and of each tensor by name where it is: `file`, `offset`, `shape` and
        `dtype`, as JSON has them.
    """
    wanted = list(names)
    places = {name: checkpoint.place(name) for name in wanted if checkpoint.is_stored(name)}
    quantised = [name for name in wanted if name not in places]
    paths = sorted({path for path, _ in places.values()})
    files = {path: stack.enter_context(path.open("rb")).fileno() for path in paths}
    stored = {
        name: _place(files[path], meta.offset, meta.shape, meta.dtype)
        for name, (path, meta) in places.items()
    }
    numbers = list(files.values())
    if quantised:
        values = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        stored |= _written(checkpoint, quantised, values)
        numbers.append(values.fileno())
    return numbers, stored


def _written(checkpoint: Checkpoint, names: list[str], file: Any) -> dict[str, Any]:
    """Write the values of quantised tensors one after the other; return where each is."""
    stored, end = {}, 0
    try:
        for name in names:
            values = checkpoint.read(name).float().contiguous()
            file.write(values.numpy())
            stored[name] = _place(file.fileno(), end, values.shape, values.dtype)
            end += values.nbytes
        file.flush()
    except OSError as error:
        raise OnboardError(
            f"the values of its quantised weights cannot be written ({error.strerror}), after "
            f"{gigabytes(end)} GB",
            hint="Let TMPDIR name a folder with room for them in float32",
        ) from error
    return stored


def _place(file: int, offset: int, shape: Iterable[int], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "file": file,
        "offset": offset,
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
    }
