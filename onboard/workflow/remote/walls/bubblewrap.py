"""bubblewrap, a kept program with which Linux desktops run what they do not trust: where it is
installed and works, it makes the namespaces and the view of files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onboard.workflow.remote.walls.view import readable

_NAME = "bwrap"


def become_wrapped(folder: Path, num_bytes: int, words: Sequence[str]) -> None:
    """Replace this process by `python WORDS` in bubblewrap; return where that is not to be had.

    It sees what `onboard.workflow.remote.walls.view` shows, and ends with the process that started this.
    """
    program = shutil.which(_NAME)
    if program is None:
        return
    command = [program, *_options(folder, num_bytes), "--", sys.executable]
    if subprocess.run([*command, "-S", "-c", ""], check=False, capture_output=True).returncode == 0:
        os.execv(program, [*command, *words])


def _options(folder: Path, num_bytes: int) -> list[str]:
    shown = [word for path in readable() for word in _shown(path)]
    own = ["--perms", "0700", "--size", str(num_bytes), "--tmpfs", str(folder)]
    return [
        *("--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL"),
        *shown,
        *("--proc", "/proc", "--dev", "/dev", "--dir", "/run", *own, "--chdir", str(folder)),
        *("--remount-ro", "/"),
    ]


def _shown(path: Path) -> list[str]:
    target = path.resolve()
    bound = ["--ro-bind", str(target), str(target)]
    return bound if target == path else [*bound, "--symlink", str(target), str(path)]
