"""The file of answers: a record a line, in the form of OpenAI's batch interface.

Records come in the order in which answers end, each written at once: after an interruption the
next run reads them, and answers the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

from onboard.errors import UsageError
from onboard.serve.batch.batch_lines import Line
from onboard.serve.refusals import RefusedError

_RIGHT = 200
_AGAIN = 500
"""Answers with this status or a higher one are tried again: the fault was not the request's."""


def answered(line: Line, body: Any) -> dict[str, Any]:
    """Return the record of a request that has its answer."""
    return _record(line, _RIGHT, body)


def refused(line: Line, problem: RefusedError) -> dict[str, Any]:
    """Return the record of a request that has none."""
    return _record(line, problem.status, problem.body())


def _record(line: Line, status: int, body: Any) -> dict[str, Any]:
    response = {"status_code": status, "request_id": line.id, "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


class Records:
    """A file of answers; a context, in which it is open."""

    def __init__(self, file: Path, wanted: Collection[str]) -> None:
        self.file = file
        self.done: dict[str, bool] = {}
        """Requests with a record, and whether it is an answer, no refusal."""
        self._wanted = wanted
        self._open: IO[bytes] | None = None

    def __enter__(self) -> Records:
        """Read what there is, and open it for more; a record that a kill has cut goes.

        Raises `UsageError` for a file that holds anything but answers to these requests.
        """
        if self.file.exists():
            kept = self.file.with_name(f"{self.file.name}.part")
            with kept.open("wb") as target:
                for raw, identity, status in self._records():
                    target.write(raw)
                    self.done[identity] = status == _RIGHT
            os.replace(kept, self.file)
        self._open = self.file.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def add(self, record: dict[str, Any]) -> None:
        """Write a record, whole."""
        assert self._open is not None
        self.done[record["id"]] = record["response"]["status_code"] == _RIGHT
        self._open.write(json.dumps(record).encode() + b"\n")

    def _records(self) -> Iterator[tuple[bytes, str, int]]:
        """Yield the records that stay."""
        with self.file.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.endswith(b"\n"):
                    return
                identity, status = _read(raw)
                if identity not in self._wanted:
                    raise UsageError(
                        f"{self.file} line {number} is no answer to these requests",
                        hint="Name another --output, or remove the file",
                    )
                if status < _AGAIN:
                    yield raw, identity, status


def _read(raw: bytes) -> tuple[str, int]:
    """Return a record's request and its status; of what is no record, nothing."""
    try:
        record = json.loads(raw)
        return str(record["id"]), int(record["response"]["status_code"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", 0
