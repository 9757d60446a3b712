"""The program ends in one line where it is interrupted, also while its own modules load."""

from __future__ import annotations

import os
import subprocess
import sys
import time

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

_INTERRUPTED_IN_A_FINALISER = """
import os, signal, sys, time


class Watched:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def status(arguments, debug=False):
    watched = Watched()
    del watched
    time.sleep(60)
    return 0


import onboard.cli.main
from onboard.__main__ import main

onboard.cli.main.run = status
main()
"""


@pytest.mark.parametrize("module", ["onboard.cli", "typer", "onboard.cli.commands.sweep"])
def test_an_interrupt_while_modules_load_is_one_line(module: str) -> None:
    assert ended(_INTERRUPTED_AT, module) == (INTERRUPTED, "onboard: interrupted\n")


def test_an_interrupt_that_falls_into_a_finaliser_is_not_lost() -> None:
    """Nor is it told as something that was ignored."""
    since = time.monotonic()
    assert ended(_INTERRUPTED_IN_A_FINALISER) == (INTERRUPTED, "onboard: interrupted\n")
    assert time.monotonic() - since < 50


def ended(program: str, *words: str) -> tuple[int, str]:
    """Run a program to its end; return its exit code and what it said."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), timeout=120
    )
    return done.returncode, done.stderr
