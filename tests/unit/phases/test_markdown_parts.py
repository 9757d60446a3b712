from __future__ import annotations

import random
import re

import pytest

from onboard.render import code, fenced, inline
from onboard.workflow.reporting.markdown_parts import length, numbered
from tests.support.markdown import fences, html, live

HOSTILE = (
    "@octocat and @org/team, fixes #1, org/repo#22, GH-33, https://github.com/o/r/issues/4 www.x.org"
    " a@b.org &commat;octocat &#64;octocat &num;5 \\@octocat \\#6 ~~gone~~ $x$ <b>bold</b> **b** `c`"
)


def test_no_text_is_live() -> None:
    assert live(HOSTILE)
    assert not live(f"- {inline(HOSTILE)}\n")
    assert not live(f"- {code(HOSTILE)}\n")
    assert html(f"- {inline(HOSTILE)}\n") == {"<!-- -->"}


def test_a_short_text_is_one_part() -> None:
    assert numbered("# Title\n\nText\n", "The text") == ["[AGENT]\n\n# Title\n\nText\n"]


def _document(draw: random.Random) -> tuple[str, list[str]]:
    """A text of lists, tables, folded sections and fences, and the contents of the fences."""
    blocks, contents = [], []
    for _ in range(draw.randrange(1, 12)):
        kind = draw.choice(["list", "fence", "folded", "table"])
        sizes = [0, 5, 30] if kind in ("list", "table") else [0, 30, 900, 5000]
        lines = [
            "".join(draw.choices("ab `|<>#@\U0001f600", k=draw.choice(sizes)))
            for _ in range(draw.randrange(1, 30))
        ]
        text = "\n".join(lines)
        if kind == "list":
            blocks.append("\n".join(f"- {code(line + 'x')}" for line in lines))
        elif kind == "table":
            rows = [f"| {inline(line)} |" for line in lines]
            blocks.append("\n".join(["| Head |", "|---|", *rows]))
        else:
            contents.append(text if text.endswith("\n") else text + "\n")
            block = fenced(text)
            title = f"<details><summary>T {len(blocks)}</summary>"
            blocks.append(f"{title}\n\n{block}\n\n</details>" if kind == "folded" else block)
    return "\n\n".join(blocks) + "\n", contents


def _joined(parts: list[str]) -> str:
    """All that is fenced, one after another; lines that were parted are one again."""
    text = ""
    for part in parts:
        goes_on = "continues the last one" in part.split("\n")[0]
        content = "".join(fences(part.split("\n", 2)[2]))
        text = text.removesuffix("\n") + content if goes_on else text + content
    return text


@pytest.mark.parametrize("turn", range(60))
def test_nothing_is_lost_and_each_part_stands_alone(turn: int) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    text, contents = _document(draw)
    most = draw.choice([2600, 4000, 9000])
    parts = numbered(text, "The text", most)
    assert all(length(part) <= most for part in parts)
    assert _joined(parts) == "".join(contents)
    assert not [found for part in parts for found in live(part)]
    for number, part in enumerate(parts, 1):
        head = part.split("\n")[0]
        assert head.startswith("[AGENT]")
        assert len(parts) == 1 or f"part {number} of {len(parts)}" in head
        begun = len(re.findall(r"^<details>", part, re.MULTILINE))
        assert len(re.findall(r"^</details>$", part, re.MULTILINE)) == begun
        lines = html(part.split("\n", 2)[2]) - {"<!-- -->", "</details>", ""}
        assert all(line.startswith("<details><summary>T ") for line in lines)


def test_a_line_that_no_part_has_room_for_goes_on_in_the_next() -> None:
    word = "".join(f"{number:06}" for number in range(20_000))
    parts = numbered(f"Before\n\n{fenced(word)}\n\nAfter\n", "The text")
    assert len(parts) == 2
    assert parts[1].startswith(
        "[AGENT] The text, part 2 of 2. Its first line continues the last one of the part before."
    )
    assert _joined(parts) == f"{word}\n"


def test_prose_that_no_part_has_room_for_is_shown_as_it_is_written() -> None:
    line = f"- {code(' '.join(f'{number:06}' for number in range(500)))}"
    parts = numbered(f"- `a`\n{line}\n- `b`\n", "The text", 1500)
    assert _joined(parts) == f"{line}\n"


def test_a_table_has_its_head_in_each_part() -> None:
    rows = "\n".join(f"| row {number:04} |" for number in range(200))
    parts = numbered(f"| Head |\n|---|\n{rows}\n", "The text", 1200)
    assert len(parts) > 2
    assert all("\n| Head |\n|---|\n| row" in part for part in parts)
    found = re.findall(r"row (\d+)", "".join(parts))
    assert found == [f"{number:04}" for number in range(200)]
