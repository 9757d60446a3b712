"""One run of a model at a time on one root, and nothing left behind by a run that did not start."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout

from onboard.errors import OnboardError, UsageError
from onboard.sources.gguf_source import is_local

WORK = ".onboard"
STAGING = "tmp"


def slug(model: str) -> str:
    """Return a name for a model's folder below `.onboard`: "org--name" of an id, or a local
    folder's own name.

    What a file name cannot hold is replaced, and a digest then keeps two such names apart.
    """
    path = Path(model).expanduser()
    name = path.resolve().name if is_local(model) else model.replace("/", "--")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:100]
    return safe if safe == name else f"{safe or 'model'}-{sha256(name.encode()).hexdigest()[:8]}"


def check_writable(root: Path) -> None:
    """Raise `OnboardError` when `root` can be neither written nor made, `UsageError` when a file is in
    its place.
    """
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir():
        raise UsageError(
            f"the root {root} is not a folder ({nearest} is a file)", hint="Give another --root"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OnboardError(
            f"the root {root} cannot be written",
            hint="Give another --root, or change its permissions",
        )


@contextmanager
def exclusive(work_dir: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a model; call `waiting` once when another run has it. Folders left empty are
    removed again.
    """
    lock_file = work_dir.with_name(f"{work_dir.name}.lock")
    made = [
        folder for folder in (lock_file.parent, *lock_file.parent.parents) if not folder.exists()
    ]
    try:
        lock = _acquire(lock_file, waiting)
    except OSError as error:
        _remove_empty(made)
        raise OnboardError(
            f"{lock_file} cannot be written ({error.strerror})", hint="Give another --root"
        ) from error
    try:
        shutil.rmtree(work_dir / STAGING, ignore_errors=True)  # unfinished files of a killed run
        yield
    finally:
        shutil.rmtree(work_dir / STAGING, ignore_errors=True)
        # Removed while it is held: a waiting run notices that its file is gone, and takes a new
        # one.
        lock_file.unlink(missing_ok=True)
        lock.release()
        _remove_empty([work_dir, lock_file.parent, *made])


def is_held(work_dir: Path) -> bool:
    """Tell whether a run has a model's lock now; a file that a killed run left is not held."""
    lock_file = work_dir.with_name(f"{work_dir.name}.lock")
    if not lock_file.exists():
        return False
    try:
        with FileLock(lock_file, timeout=0):
            return False
    except (Timeout, OSError):
        return True


def _acquire(lock_file: Path, waiting: Callable[[], None]) -> FileLock:
    lock = FileLock(lock_file)
    for attempt in range(100):
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0 if attempt == 0 else -1)
        except Timeout:
            waiting()
        # Another model's run may remove the still empty folder between the two lines above.
        except FileNotFoundError:
            continue
        else:
            return lock
    raise OnboardError(f"{lock_file} cannot be locked", hint="Try again")


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty, or already gone
            folder.rmdir()
