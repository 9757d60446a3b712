"""Changes that an agent proposes, as text: a unified diff, or a class or function written anew.

Only files that the agent may change are touched, in memory; a hunk has to meet the lines that it
says are there.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onboard.agents.refused import RefusedError
from onboard.vetting.model_text import MOST

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_OTHER_CHANGES = re.compile(
    r"^(rename |copy |deleted file|new file|old mode|new mode|Binary|GIT binary)"
)


@dataclass
class _Hunk:
    start: int
    lines: list[str] = field(default_factory=list)

    def side(self, other: str) -> list[str]:
        """Return the lines of one side: without those that begin with `other`."""
        return [line[1:] for line in self.lines if not line.startswith((other, "\\"))]


def with_diff(files: Mapping[str, str], diff: str, editable: Iterable[str]) -> dict[str, str]:
    """Return the files that a unified diff changes, with their new texts.

    Raises:
        RefusedError: it touches another file, does more than edit lines, or does not apply.
    """
    if len(diff.encode(errors="surrogatepass")) > MOST:
        raise RefusedError(f"the diff has {len(diff):,} letters, at most {MOST:,} are read")
    changed: dict[str, str] = {}
    for path, hunks in _sections(diff):
        _require_editable(path, editable)
        changed[path] = _applied(changed.get(path, files[path]), hunks, path)
    if not changed:
        raise RefusedError("the diff has no file and no hunk")
    return changed


def with_block(text: str, name: str, block: str) -> str:
    """Return a file's text with its class or function `name` replaced by another text of it.

    Raises:
        RefusedError: the file has no such block, or the text is not it alone.
    """
    try:
        body = ast.parse(block).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedError(f"the block is no Python: {error}") from None
    if len(body) != 1 or getattr(body[0], "name", None) != name:
        raise RefusedError(f"the text of the block has to be {name} and nothing else")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            lines = text.splitlines()
            lines[node.lineno - 1 : node.end_lineno] = block.strip("\n").splitlines()
            return "\n".join(lines) + "\n"
    raise RefusedError(f"the file has no {name}")


def diff_of(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the unified diff between files of the same names."""
    parts = [
        difflib.unified_diff(
            before[path].splitlines(), text.splitlines(), f"a/{path}", f"b/{path}", lineterm=""
        )
        for path, text in sorted(after.items())
    ]
    return "\n".join(line for part in parts for line in part)


def _require_editable(path: str, editable: Iterable[str]) -> None:
    if path not in editable:
        raise RefusedError(f"{path[:200]} is not yours to change: {', '.join(sorted(editable))}")


def _sections(diff: str) -> Iterator[tuple[str, list[_Hunk]]]:
    """Yield the file and the hunks of each section of a diff."""
    path, hunks = "", list[_Hunk]()
    lines = diff.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("--- ") and following.startswith("+++ "):
            if path:
                yield path, hunks
            path, hunks = _same_name(line, following), []
        elif found := _HUNK.match(line):
            hunks.append(_Hunk(int(found[1])))
        elif hunks and not line.startswith("diff --git "):
            hunks[-1].lines.append(line or " ")
        elif _OTHER_CHANGES.match(line):
            raise RefusedError(f"only lines of files may be changed: {line[:80]}")
    if path:
        yield path, hunks


def _same_name(old: str, new: str) -> str:
    names = {_name(old), _name(new)}
    if len(names) != 1:
        raise RefusedError(f"the diff makes {_name(new)[:100]} of {_name(old)[:100]}")
    return names.pop()


def _name(line: str) -> str:
    name = line[4:].split("\t")[0].strip()
    return re.sub(r"^[ab]/", "", name)


def _applied(text: str, hunks: list[_Hunk], path: str) -> str:
    if not hunks:
        raise RefusedError(f"the diff of {path} has no hunk")
    lines, shift = text.splitlines(), 0
    for hunk in hunks:
        old, new = hunk.side("+"), hunk.side("-")
        place = _place(lines, old, hunk.start - 1 + shift)
        if place is None:
            raise RefusedError(f"a hunk does not apply: {path} has not {old[:1]} at {hunk.start}")
        lines[place : place + len(old)] = new
        shift += len(new) - len(old)
    return "\n".join(lines) + "\n"


def _place(lines: list[str], old: list[str], expected: int) -> int | None:
    """Return where lines are: where they are said to be, or in the one other place that has them."""
    if not old:
        return None
    if lines[max(expected, 0) : max(expected, 0) + len(old)] == old:
        return max(expected, 0)
    found = [at for at in range(len(lines)) if lines[at : at + len(old)] == old]
    return found[0] if len(found) == 1 else None
