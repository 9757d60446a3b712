"""What a terminal is shown, and what it is spared: control characters in text of a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onboard.untrusted.visible_text import escaped


def shown(text: str) -> str:
    """Return a model's text as standard output can take it: a pipe gets it as it is, a terminal
    without commands.
    """
    return escaped(text) if sys.stdout.isatty() else text


def one_line(text: str, most: int = 2000) -> str:
    """Return a text as one line without commands to a terminal; the middle of a very long one is
    left out.
    """
    line = escaped(" ".join(text.split()))
    if len(line) <= most:
        return line
    return f"{line[: most - 500]} [{len(line) - most:,} more characters] {line[-500:]}"


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar (without a total: a pulse) on stderr while the block runs, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda completed: progress.update(task, completed=completed)
