"""A hostile repository: what it is after on this machine, and code that tries all of
`tests.support.escapes` where a model's code runs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import escapes

_CODE = """
import json
from .escapes import try_against
_found = try_against(json.loads({walls!r}), json.loads({places!r}))
_past = [name for name, outcome in _found.items() if outcome == "got there"]
raise RuntimeError(f"of {{len(_found)}} attempts there got {{_past or 'none'}}")
"""


@contextmanager
def places_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Lay out what hostile code is after, where a user has it: a file, a folder, listeners, a token;
    nobody has come to a listener at the end.
    """
    secret = folder / "home" / "key"
    secret.parent.mkdir()
    secret.write_text("secret")
    os.mkfifo(secret.parent / "fifo")
    path, abstract = folder / "socket", f"onboard-{secrets.token_hex(4)}"
    with (
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
        socket.socket() as tcp,
    ):
        by_path.bind(str(path))
        by_name.bind("\0" + abstract)
        tcp.bind(("127.0.0.1", 0))
        for listener in (by_path, by_name, tcp):
            listener.listen()
            listener.setblocking(False)
        yield {
            "secret": str(secret),
            "outside": str(secret.parent),
            "listener": str(path),
            "abstract": abstract,
            "port": tcp.getsockname()[1],
            "parent": os.getpid(),
            "token": f"hf_{secrets.token_hex(8)}",
        }
        for listener in (by_path, by_name, tcp):
            with pytest.raises(BlockingIOError):
                listener.accept()


def put_attempts(repository: Path, places: dict[str, Any], walls: Sequence[str]) -> str:
    """Put the attempts into a repository; return the code that makes, when it is imported, those
    that these walls are to stop.
    """
    shutil.copy(escapes.__file__, repository / "escapes.py")
    return _CODE.format(walls=json.dumps(list(walls)), places=json.dumps(places))
