"""Which walls this machine has, and commands on systems that lack some."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from onboard.workflow.remote.code_session import Session
from onboard.workflow.remote.sandbox import WALLS, missing
from tests.support import lesser_kernel


def standing() -> list[str]:
    """Return the walls that hold on this machine."""
    session = Session("which walls")
    session.close()
    return session.hello.walls


def consent() -> list[str]:
    """Return the options with which the model's code runs on this machine."""
    lacking = missing(standing())
    return ["--trust-remote-code", *(["--unsandboxed"] if lacking else [])]


def lacking(walls: Sequence[str]) -> list[str]:
    """Return the words before a command that has it run without some walls, or without "root"."""
    assert WALLS.keys() >= set(lesser_kernel.WALLS)
    return [sys.executable, "-S", lesser_kernel.__file__, ",".join(walls), "--"]


def take_away(walls: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python programs started from here on run without some walls (joined by commas)."""
    program = folder / "python"
    words = [*lacking(walls.split(",")), sys.executable]
    program.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
