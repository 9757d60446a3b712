"""The first block that differs: where a proof or a test says it is, and both sources of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from onboard.agents.reference import ops_reference
from onboard.agents.roles import RepairTask
from onboard.analysis.spec import ModelSpec

_PLACES = (
    re.compile(r"test_\w+\[\w+-([\w.]+)\]"),
    re.compile(r"the weight ([\w.]+)"),
    re.compile(r"([\w.]+) \(\w+\) (?:differs|gives)"),
    re.compile(r"([\w.]+) is \[[\d, ]*\] in the generated model"),
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SPACE = "\n\n\n"


def repair_task(
    spec: ModelSpec, files: tuple[str, str], text: str, theirs: str, problem: str
) -> RepairTask:
    """Return what the repairer is told.

    Args:
        spec: the model's.
        files: the names of the model file and the spec's.
        text: the model file's.
        theirs: the modeling code that it has to agree with.
        problem: what a proof or a test says.
    """
    place = place_of(problem)
    names = list(_classes_of(place, spec, text)) or [spec.architecture]
    return RepairTask(
        model=spec.model,
        model_file=files[0],
        spec_file=files[1],
        place=place,
        block=names[0],
        problem=problem,
        ours=_SPACE.join(filter(None, (class_text(text, name) for name in names))),
        theirs=_SPACE.join(filter(None, (class_text(theirs, name) for name in names))),
        ops=ops_reference(),
    )


def as_requested(task: RepairTask, request: str, block: str, text: str, theirs: str) -> RepairTask:
    """Return a task that asks for a reviewer's change instead of a repair.

    Args:
        task: as `repair_task` makes it.
        request: the reviewer's words.
        block: the class that they are about; "": unknown.
        text: the model file's.
        theirs: the modeling code that it has to agree with.
    """
    own = class_text(text, block) if block else ""
    about = {"block": block, "ours": own, "theirs": class_text(theirs, block)} if own else {}
    return task.model_copy(update={**about, "request": request, "place": ""})


def place_of(problem: str) -> str:
    """Return the path of the module or the weight that a message names; "" where it names none."""
    found = (pattern.search(problem) for pattern in _PLACES)
    return next((match[1] for match in found if match is not None), "")


def class_text(source: str, name: str) -> str:
    """Return the text of a class; "" where there is none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
    return ""


def _classes_of(place: str, spec: ModelSpec, text: str) -> Iterator[str]:
    """Yield the class that a path leads to and the one that calls it, of those that the file has."""
    paths = {_NUMBER.sub("*", block.path): block.class_name for block in spec.blocks}
    parts, found = place.split("."), 0
    for length in range(len(parts), -1, -1):
        name = paths.get(_NUMBER.sub("*", ".".join(parts[:length])), "")
        if name and class_text(text, name):
            yield name
            found += 1
        if found == 2:
            return
