"""The program ends in one line where it is interrupted, also while its own modules load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onboard.errors import INTERRUPTED

_INTERRUPTED_AT = """
import os, runpy, signal, sys


class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupt())
MODULE, sys.argv[1:] = sys.argv[1], ["status"]
runpy.run_module("onboard", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["onboard.cli", "typer", "onboard.cli.commands.sweep"])
def test_an_interrupt_while_modules_load_is_one_line(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AT, module],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "onboard: interrupted\n")
