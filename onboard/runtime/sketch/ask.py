"""A process of its own for a sketch: stand-ins for torch stay where they are put."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.cache.budget import MemoryPlan
from onboard.cache.written_plan import read_plan, written_plan
from onboard.config import RuntimeConfig
from onboard.extensions import find_extensions


def sketched(
    checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path
) -> MemoryPlan | str:
    """Return the plan of a run, with bounds of what only its graph tells; or in words why there is
    none.

    Torch is not imported. Where it is already, a graph is not far, and there is none.
    """
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return "torch is there already"
    if find_extensions(root):
        return "there are extensions"

    def made() -> dict[str, Any]:
        from onboard.runtime.sketch import stand_in

        stand_in.install()
        from onboard.runtime.sketch.count import sketch

        return written_plan(sketch(checkpoint, runtime, gpu=gpu, root=root))

    document = json.loads(_in_a_fork(made) or '{"unsure": "its process died"}')
    return str(document["unsure"]) if "unsure" in document else read_plan(document)


def _in_a_fork(work: Callable[[], dict[str, Any]]) -> bytes:
    """Return what a copy of this process makes, as JSON; of what it raises the words."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        gc.disable()
        _answer(work, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def _answer(work: Callable[[], dict[str, Any]], writing: int) -> None:
    try:
        try:
            document = work()
        # Whatever a model's code does with stand-ins: its graph will tell.
        except BaseException as error:
            name = "" if type(error).__name__ == "UnsureError" else f"{type(error).__name__}: "
            document = {"unsure": " ".join(f"{name}{error}".split())[:200]}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(document).encode())
    finally:
        os._exit(0)
