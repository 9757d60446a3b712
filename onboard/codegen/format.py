"""Format generated Python with the project's formatter."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from ruff.__main__ import find_ruff_bin

from onboard.codegen.tidy.lines import LINE_LENGTH

_STYLE = ("--line-length", str(LINE_LENGTH), "--target-version", "py311", "--isolated")
# Folders where the process happens to be are no packages: a folder `pytest` there must not move the
# import of pytest.
_OWN_IMPORTS = ("--config", 'lint.isort.known-first-party = ["onboard"]', "--config", "src = []")
_CHECK = ("check", "--fix", "--quiet", "--select", "I,F401,UP", *_OWN_IMPORTS)
_FORMAT = ("format", "--quiet")
_CLOSED = ("--config", "format.skip-magic-trailing-comma = true")
_GAP_AFTER_SUPER = re.compile(r"^( +super\(\)\.__init__\(\)\n)\n+(?= )", re.MULTILINE)
_LONG_DOCSTRING = re.compile(rf'^(?=.{{{LINE_LENGTH + 1}}})( *)"""(.+)"""$', re.MULTILINE)


def format_python(text: str, *, closing: bool = False) -> str:
    """Return `text` with sorted and used imports only, formatted.

    Args:
        text: Python.
        closing: calls that stand on several lines, and fit on one, go there.

    Raises:
        AssertionError: the text is not Python, which is a fault of the generator.
    """
    fixed = _ruff(_CHECK, text)
    # Statements that were left out leave a gap.
    return _LONG_DOCSTRING.sub(
        _wrapped, _ruff((*_FORMAT, *_CLOSED * closing), _GAP_AFTER_SUPER.sub(r"\1", fixed))
    )


def _wrapped(found: re.Match[str]) -> str:
    """Return a docstring of one line as several that fit."""
    indent, text = found.groups()
    room = LINE_LENGTH - len(indent)
    lines = textwrap.wrap(f'"""{text}', room, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{indent}{line}" for line in [*lines, '"""'])


def format_package(files: Mapping[str, str]) -> dict[str, str]:
    """Return Python files, by path, formatted as `format_python` does, in one go: sooner than one
    after the other.
    """
    with TemporaryDirectory() as folder:
        for path, text in files.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        run_ruff(*_CHECK, *_STYLE, "--no-cache", folder)
        run_ruff(*_FORMAT, *_STYLE, "--no-cache", folder)
        return {path: Path(folder, path).read_text(encoding="utf-8") for path in files}


def _ruff(command: tuple[str, ...], text: str) -> str:
    return run_ruff(*command, *_STYLE, "--stdin-filename", "generated.py", "-", text=text)


def run_ruff(*words: str, text: str = "", codes: Collection[int] = (0,)) -> str:
    """Run the formatter itself, not `python -m ruff`, which starts an interpreter for it; return
    what it prints.

    Raises:
        AssertionError: it ends with another exit code than `codes`.
    """
    command = [find_ruff_bin(), *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode in codes, f"ruff {words[0]}: {done.stderr or done.stdout}"
    return done.stdout
