"""Draw what a run did, phase by phase, from what it left under its root: the picture in README.

onboard demo --root workspace
python scripts/picture_of_a_run.py workspace/.onboard/demo "onboard demo" --output docs/run.svg
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from onboard.content import CONTENT_ROOT
from onboard.render import render
from onboard.workflow.reporting.report_view import about
from onboard.workflow.run_state import PhaseRecord, RunState

WIDTH, FIRST, LINE, LONGEST_BAR = 960, 60, 22, 96
SUMMARY, TEXT = 104, 112
"""Most letters of a phase's line and of the text that the model wrote."""
PROMPT_LINES = 4


def picture(folder: Path, command: str) -> str:
    """Return the picture (SVG) of the run whose work folder this is."""
    state = RunState.load(folder, "")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    seconds = sum(phase.seconds for phase in state.phases.values())
    phases = _phases(state.phases)
    prompt = _placed(_words(run), FIRST + LINE * len(phases) + 14, 18)
    made = _placed(_about(run), prompt[-1]["y"] + 30, 16)
    return render(
        "picture/run.svg.j2",
        command=command,
        total=f"{seconds:.0f} s in all",
        phases=phases,
        prompt=prompt,
        about=made,
        width=WIDTH,
        height=made[-1]["y"] + 16,
    )


def _phases(records: dict[str, PhaseRecord]) -> list[dict[str, Any]]:
    longest = max(record.seconds for record in records.values())
    return [
        {
            "name": name,
            "y": FIRST + LINE * index,
            "bar": round(max(1.0, LONGEST_BAR * record.seconds / longest), 1),
            "seconds": f"{record.seconds:.1f} s",
            "summary": textwrap.shorten(record.summary, SUMMARY, placeholder=" ..."),
        }
        for index, (name, record) in enumerate(records.items())
    ]


def _words(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the first prompt and how the model goes on, as (text, colour) of each line."""
    first = run["runs"]["full"]["prompts"][0]
    lines = textwrap.wrap(" ".join(first["output"].split()), TEXT)[:PROMPT_LINES]
    return [(f"> {first['prompt']}", "#212121"), *((line, "#616161") for line in lines)]


def _about(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return when, where and with what the run was made."""
    shown = [value for name, value in about(run) if name in ("Date", "Machine", "Versions")]
    return [(line, "") for line in shown]


def _placed(lines: list[tuple[str, str]], first: int, height: int) -> list[dict[str, Any]]:
    return [
        {"text": text, "color": color, "y": first + height * index}
        for index, (text, color) in enumerate(lines)
    ]


def main() -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the run's work folder, ROOT/.onboard/MODEL")
    parser.add_argument("command", help="what was run, as the picture's title")
    parser.add_argument("--output", type=Path, default=CONTENT_ROOT / "docs" / "run.svg")
    options = parser.parse_args()
    options.output.write_text(picture(options.folder, options.command), encoding="utf-8")


if __name__ == "__main__":
    main()
