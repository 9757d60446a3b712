"""How the test phase runs pytest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from onboard.workflow.processes.programs import RunModule, in_new_interpreter
from onboard.workflow.processes.watched import Tell, count_of_tests, watched

RunPytest = Callable[[Sequence[str], Path, Mapping[str, str]], str]
"""(arguments of pytest, working folder, additions to the environment) -> everything that it
printed.
"""


def run_pytest(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    run_module: RunModule = in_new_interpreter,
    tell: Tell | None = None,
) -> str:
    """Run `python -m pytest`; a process that dies on the way leaves what it had printed.

    `tell` hears how many of the tests have run, where the arguments ask for a line a test (`-v`).
    """
    with tempfile.TemporaryFile() as output:
        # Of plugins the one on the command line alone: others of the user's may reorder tests, or
        # seed them.
        environment = {
            **environment,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        with watched(output, count_of_tests, tell) if tell is not None else nullcontext():
            run_module(["pytest", *arguments], output, folder=folder, environment=environment)
        output.seek(0)
        return output.read().decode("utf-8", errors="replace")
