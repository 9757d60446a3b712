"""Format generated Python with the project's formatter."""

from __future__ import annotations

import subprocess
import sys

_COMMON = ("--line-length", "120", "--target-version", "py311", "--isolated", "--stdin-filename", "generated.py", "-")


def format_python(text: str) -> str:
    """Return `text` with sorted and used imports only, formatted.

    Raises:
        AssertionError: the text is not Python, which is a fault of the generator.
    """
    fixed = _ruff(("check", "--fix", "--quiet", "--select", "I,F401,UP"), text)
    return _ruff(("format", "--quiet"), fixed)


def _ruff(command: tuple[str, ...], text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *_COMMON], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ruff {command[0]}: {done.stderr or done.stdout}"
    return done.stdout
