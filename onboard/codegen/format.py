"""Format generated Python with the project's formatter."""

from __future__ import annotations

import re
import subprocess
import sys

_COMMON = ("--line-length", "120", "--target-version", "py311", "--isolated", "--stdin-filename", "generated.py", "-")
# Folders where the process happens to be are no packages: a folder `pytest` there must not move the import of pytest.
_OWN_IMPORTS = ("--config", 'lint.isort.known-first-party = ["onboard"]', "--config", "src = []")
_GAP_AFTER_SUPER = re.compile(r"^( +super\(\)\.__init__\(\)\n)\n+(?= )", re.MULTILINE)


def format_python(text: str) -> str:
    """Return `text` with sorted and used imports only, formatted.

    Raises:
        AssertionError: the text is not Python, which is a fault of the generator.
    """
    fixed = _ruff(("check", "--fix", "--quiet", "--select", "I,F401,UP", *_OWN_IMPORTS), text)
    # Statements that were left out leave a gap.
    return _ruff(("format", "--quiet"), _GAP_AFTER_SUPER.sub(r"\1", fixed))


def _ruff(command: tuple[str, ...], text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *_COMMON], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ruff {command[0]}: {done.stderr or done.stdout}"
    return done.stdout
