"""Libraries imported ahead of need: a process that has them forks in no time for each program that a run starts.

`python -m onboard.workflow.processes.warm FD` imports them and then serves the connection of that number.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.processes.programs import NOTHING, NewServer, in_new_interpreter, serve

_IMPORTS = (
    *("torch", "torch.export", "torch._dynamo", "transformers", "pytest", "jinja2"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "onboard.workflow.phase_runner"),
    *(
        "onboard.analysis.analyze",
        "onboard.verify.blocks",
        "onboard.codegen.model_file",
        "onboard.codegen.equivalence_test",
    ),
    *("onboard.runtime.llm", "onboard.testing", "onboard.testing.plugin"),
    *("onboard.workflow.run_model.run_model", "onboard.review.reviewer", "nbformat.v4"),
    *("torch.export._trace", "sympy.tensor.tensor", "onboard.graph.weight_load.rehearsed_load"),
)
"""The last line: what an export, and a child, would import in their turn, each for itself."""


def import_all(*more: str) -> None:
    """Import what a run's programs need, and `more`; one thread, or forking is not safe."""
    for name in (*_IMPORTS, *more):
        importlib.import_module(name)
    from onboard.graph.pipeline import load_pipeline
    from onboard.graph.transform import get_transform, transform_keys
    from onboard.workflow.phase_runner import load_phases

    load_phases()
    for key in transform_keys():
        get_transform(key)
    load_pipeline({})
    gc.collect()
    gc.freeze()  # what was imported stays: no child looks through it for garbage, or copies its pages by doing so


class WarmPrograms:
    """Starts programs from a process that imports the libraries while this one works: see `RunModule`.

    Until `start`, and where that process has died, each has an interpreter of its own.
    """

    def __init__(self) -> None:
        self._server: NewServer | None = None

    def start(self) -> None:
        """Have the libraries imported, in a process beside this one; once."""
        self._server = self._server or NewServer("onboard.workflow.processes.warm")

    def __call__(
        self,
        words: Sequence[str],
        output: IO[Any],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] = NOTHING,
    ) -> int:
        """Run a module in a process of its own."""
        if self._server is not None:
            try:
                return self._server(words, output, folder=folder, environment=environment)
            except (EOFError, OSError):
                self.close()
        return in_new_interpreter(words, output, folder=folder, environment=environment)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._server is not None:
            self._server.close()
        self._server = None


def main() -> None:
    """Import, then serve whoever started this process, until that one ends."""
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that is interrupted ends this one
    connection = Connection(int(sys.argv[1]))
    import_all()
    serve(connection)


if __name__ == "__main__":
    main()
