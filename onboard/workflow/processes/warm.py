"""Libraries imported ahead of need: a process that has them forks in no time for each program that
a run starts.

`python -m onboard.workflow.processes.warm FD` imports them and then serves the connection of that
number.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.processes.programs import (
    NOTHING,
    ForkServer,
    NewServer,
    in_new_interpreter,
    serve,
)

_LIBRARIES = (
    *("torch", "torch.export", "torch._dynamo", "transformers", "jinja2"),
    *(
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "onboard.graph.weight_load.rehearsed_load",
    ),
    *(
        "onboard.analysis.analyze",
        "onboard.verify.blocks",
        "onboard.codegen.model_file",
        "onboard.review.reviewer",
    ),
    *("torch.export._trace", "sympy.tensor.tensor"),  # what an export would import in its turn
)
"""What a run's phases need."""

_OF_TESTS = (
    *(
        "pytest",
        "onboard.codegen.equivalence_test",
        "onboard.testing",  # not its suite, which asks for GPUs when it is imported
        "onboard.testing.plugin",
    ),
    # What a child would import in its turn
    *(
        "transformers.modeling_layers",
        "transformers.processing_utils",
    ),
)
"""What tests need besides."""

_OF_PROGRAMS = (
    *_OF_TESTS,
    "onboard.workflow.phase_runner",
    *("onboard.runtime.llm", "onboard.workflow.run_model.run_model", "nbformat.v4"),
)
"""What a run's programs need besides."""


@contextmanager
def _for_good() -> Iterator[None]:
    """Keep the collector from what is imported meanwhile: it stays, and need not be looked through
    again and again.

    No child copies its pages by doing so, either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_libraries() -> None:
    """Import what a run's phases need."""
    with _for_good():
        for name in _LIBRARIES:
            importlib.import_module(name)


def import_for_tests() -> None:
    """Import what a run's phases and its tests need; see `import_all`."""
    with _for_good():
        for name in (*_LIBRARIES, *_OF_TESTS):
            importlib.import_module(name)


def import_all(*more: str) -> None:
    """Import what a run's programs need, and `more`; one thread, or forking is not safe.

    Nothing is run meanwhile: an export asks how many GPUs there are, and no child may use one after
        that.
    """
    with _for_good():
        for name in (*_LIBRARIES, *_OF_PROGRAMS, *more):
            importlib.import_module(name)
        from onboard.graph.assembly.assemble import load_pipeline
        from onboard.graph.transform import get_transform, transform_keys
        from onboard.workflow.phase_runner import load_phases

        load_phases()
        for key in transform_keys():
            get_transform(key)
        load_pipeline({})


class WarmPrograms:
    """Starts programs from a process that imports the libraries while this one works: see
    `RunModule`.

    Until `start`, and where that process has died, each has an interpreter of its own.
    """

    def __init__(self) -> None:
        self._server: NewServer | ForkServer | None = None

    def start(self) -> None:
        """Have the libraries imported in this process, which needs them too, and in one beside it:
        forked from this one where that is safe, or a new one, which imports them meanwhile.
        """
        if self._server is not None:
            return
        if _may_fork():
            import_libraries()
            self._server = ForkServer(first=_import_rest)
        else:
            self._server = NewServer("onboard.workflow.processes.warm")
            import_libraries()

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


def _may_fork() -> bool:
    """Whether this process has one thread, and cannot have asked for GPUs."""
    return threading.active_count() == 1 and "torch" not in sys.modules


def _import_rest() -> None:
    """Import what programs need besides, in a process that has nothing of the terminal's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that is interrupted ends this one
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    import_all()


def main() -> None:
    """Import, then serve whoever started this process, until that one ends."""
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that is interrupted ends this one
    connection = Connection(int(sys.argv[1]))
    import_all()
    serve(connection)


if __name__ == "__main__":
    main()
