"""`python -m onboard.agents.back_ends.walled PARENT`: run an agent's command on a copy of some files, behind
the walls that a model's own code runs behind.

The request is one JSON document on standard input, the result one on standard output. The files are
unpacked here, in memory where the system gives a folder there, and what has changed is read back:
nothing that the command writes reaches the disk.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onboard.workflow.processes.orphans import die_with
from onboard.workflow.remote.sandbox import Limits, enter

_MOST_FILES = 200
_TAIL = 4096
PROMPT = "brief.md"


def main(parent: int) -> None:
    """Take the request, give up what is not needed, run the command, tell what it left."""
    die_with(parent)
    request = json.load(sys.stdin)
    folder = Path.cwd()
    reply = os.dup(1)
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), stream)
    limits = Limits.model_validate(request["limits"])
    walls = enter(
        folder, limits, more=list(map(Path, request["reads"])), network=request["network"]
    )
    lacking = sorted(set(request["walls"]) - set(walls))
    result = {"lacking": lacking} if lacking else _run(request, folder)
    with os.fdopen(reply, "w", encoding="utf-8") as file:
        json.dump(result, file)
    os._exit(0)


def _run(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    desk = folder / "desk"
    files = {**request["files"], PROMPT: request["prompt"]}
    _unpack(files, desk)
    said, errors = folder / "said", folder / "errors"
    from_file = request["prompt_in"] == "stdin"
    source = desk / PROMPT if from_file else Path(os.devnull)
    with source.open("rb") as prompt, said.open("wb") as out, errors.open("wb") as err:
        try:
            process = subprocess.Popen(
                request["command"],
                cwd=desk,
                stdin=prompt,
                stdout=out,
                stderr=err,
                env={**os.environ, **request["environment"]},
            )
            code = process.wait(timeout=request["seconds"])
        except subprocess.TimeoutExpired:
            process.kill()
            return {"problem": f"it was stopped after {request['seconds']:g} seconds"}
        except OSError as error:
            return {"problem": f"{request['command'][0]} cannot be started ({error.strerror})"}
    most = request["output_bytes"]
    found = {"code": code, "errors": _head(errors, _TAIL)[0]}
    text, is_more = _head(said, most)
    if is_more:
        return {**found, "problem": f"it said more than {most:,} bytes"}
    return {**found, "text": text, **_changed(desk, files, most)}


def _unpack(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _head(path: Path, most: int) -> tuple[str, bool]:
    """Return the first of a file's bytes as text, and whether there are more."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    return data[:most].decode("utf-8", errors="replace"), len(data) > most


def _changed(folder: Path, given: Mapping[str, str], most: int) -> dict[str, Any]:
    """Return the files that are other than they were given, and the names of new ones."""
    changed, new = dict[str, str](), list[str]()
    found = {path.relative_to(folder).as_posix(): path for path in _regular_files(folder)}
    if given.keys() - found.keys():
        return {"problem": "it removed a file that it was given, or put something else there"}
    for name, path in found.items():
        if name not in given:
            new.append(name)
            continue
        text, is_more = _head(path, most)
        if is_more:
            return {"problem": f"it made {name} larger than {most:,} bytes"}
        if text != given[name] and name != PROMPT:
            changed[name] = text
    return {"files": changed, "new": new[:_MOST_FILES]}


def _regular_files(folder: Path) -> list[Path]:
    """Return the files below a folder; links are not followed."""
    found = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        paths = (Path(place, name) for name in sorted(names))
        found += [path for path in paths if stat.S_ISREG(path.lstat().st_mode)]
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
