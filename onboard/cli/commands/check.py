"""`onboard check`: are the generated files of a checkout what the tool generates?"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onboard.cli.options import AsJson
from onboard.cli.result import Result
from onboard.errors import OnboardError

if TYPE_CHECKING:
    from onboard.workflow.zoo import Drift


def check(
    families: Annotated[
        list[str] | None,
        typer.Argument(metavar="FAMILY", help="Families of registry/zoo.yaml; default: all."),
    ] = None,
    root: Annotated[
        Path, typer.Option(help="Checkout of onboard.", file_okay=False, show_default="here")
    ] = Path(),
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write the files that differ instead of showing the differences."
        ),
    ] = False,
    as_json: AsJson = False,
) -> Result | int:
    """Generate the committed families again and show differences.

    Each family is proven again, too. Exit code 1 if a committed file differs."""
    from onboard.workflow.files import write_atomically
    from onboard.workflow.zoo import choose, drifts, load_zoo

    root = root.expanduser().resolve()
    zoo, drifted = load_zoo(root), dict[str, list[str]]()
    for family in choose(zoo, families or []):
        found = list(drifts(family, zoo[family], root))
        drifted[family] = [drift.path.relative_to(root).as_posix() for drift in found]
        print(f"{family}: {_summary(found, write)}", file=sys.stderr, flush=True)
        for drift in found:
            if write:
                write_atomically(drift.path, drift.expected)
            elif not as_json:
                print(_difference(drift, root), end="")
    count = 0 if write else sum(map(len, drifted.values()))
    if as_json:
        return Result(
            {"drifted": drifted}, OnboardError(f"{count} files drifted") if count else None
        )
    return 1 if count else 0


def _summary(found: list[Drift], write: bool) -> str:
    if not found:
        return "as generated"
    return f"{len(found)} files {'written' if write else 'drifted'}"


def _difference(drift: Drift, root: Path) -> str:
    name = drift.path.relative_to(root).as_posix()
    old, new = ((text or "").splitlines(keepends=True) for text in (drift.found, drift.expected))
    return "".join(difflib.unified_diff(old, new, name, f"{name} (generated now)"))
