"""Code from outside: what a user's root, and installed packages by entry point, bring beside what
ships.

It is found without being run, so that a digest of it costs no import, and run when a pipeline is
made (`load`). docs/extending.md is the user's side of this.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Literal

from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError, UsageError

Kind = Literal["ops", "transforms"]
_KINDS: tuple[Kind, ...] = ("ops", "transforms")  # transforms may use ops
_PLACES: dict[Kind, str] = {"ops": "ops/*.py", "transforms": "transforms/*/*.py"}
_MARKS: dict[Kind, tuple[str, ...]] = {
    "ops": ("register_op", "torch.library"),
    "transforms": ("register_transform",),
}
_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class RootFile:
    """A Python file of a root; `data` is what is run, and what the digest is of."""

    kind: Kind
    path: Path
    source: str
    """The path below the root."""
    data: bytes

    @property
    def module(self) -> str:
        """The name that the module has when it has run; other bytes are another module."""
        return f"onboard_extension_{self.path.stem}_{hashlib.sha256(self.data).hexdigest()[:12]}"

    @property
    def marks(self) -> tuple[str, ...]:
        """What a file that registers something has to say."""
        return _MARKS[self.kind]

    @property
    def is_extension(self) -> bool:
        """Whether the file says that it registers something; any other is not ours to run."""
        return any(mark.encode() in self.data for mark in self.marks)

    def contents(self) -> Iterator[bytes]:
        """Yield what tells this file from another."""
        yield self.source.encode()
        yield self.data

    def run(self) -> None:
        """Execute the file, once for the same bytes."""
        if self.module in sys.modules:
            return
        module = ModuleType(self.module)
        module.__file__ = str(self.path)
        sys.modules[self.module] = module
        try:
            exec(compile(self.data, str(self.path), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[self.module]
            raise


@dataclass(frozen=True)
class Installed:
    """An entry point of an installed package."""

    kind: Kind
    entry_point: EntryPoint

    @property
    def source(self) -> str:
        """The distribution with its version, and the entry point."""
        distribution = self.entry_point.dist
        owner = (
            f"{distribution.name} {distribution.version}"
            if distribution is not None
            else "a package"
        )
        return f"{owner} (onboard.{self.kind}: {self.entry_point.name})"

    @property
    def module(self) -> str:
        """The top-level package."""
        return self.entry_point.module.partition(".")[0]

    def contents(self) -> Iterator[bytes]:
        """Yield what tells this package from another: its version and its Python files."""
        yield f"{self.source} {self.entry_point.value}".encode()
        spec = find_spec(self.module)
        folders = (
            [Path(each) for each in (spec.submodule_search_locations or ())]
            if spec is not None
            else []
        )
        single = (
            [Path(spec.origin)]
            if spec is not None and not folders and spec.origin is not None
            else []
        )
        for file in sorted(
            [*single, *(file for folder in folders for file in folder.rglob("*.py"))]
        ):
            yield file.name.encode()
            yield file.read_bytes()

    def run(self) -> None:
        """Import the module."""
        self.entry_point.load()


Extension = RootFile | Installed


def find_extensions(root: Path | None) -> list[Extension]:
    """Return what installed packages and a root bring, in the order in which it is to be run; runs
    none of it.
    """
    own = [file for file in root_files(root) if file.is_extension]
    found: list[Extension] = []
    places = [path for path in map(Path, sys.path) if path.exists()]
    installed = _entry_points(tuple((path, path.stat().st_mtime_ns) for path in places))
    for kind in _KINDS:
        points = [point for point in installed if point.group == f"onboard.{kind}"]
        found.extend(Installed(kind, point) for point in points)
        found.extend(file for file in own if file.kind == kind)
    return found


@lru_cache(maxsize=4)
def _entry_points(_: tuple[tuple[Path, int], ...]) -> list[EntryPoint]:
    """Return those of our groups, in the order of their names, as long as nothing is installed
    meanwhile: all packages' metadata are read for them.
    """
    every = entry_points()
    ours = [point for kind in _KINDS for point in every.select(group=f"onboard.{kind}")]
    return sorted(ours, key=lambda point: (point.name, point.value))


def root_files(root: Path | None) -> list[RootFile]:
    """Return the Python files in a root's `ops` and `transforms/<stage>` that do not ship with this
    package.
    """
    if root is None:
        return []
    found = ((kind, path) for kind in _KINDS for path in sorted(root.glob(_PLACES[kind])))
    files = (
        RootFile(kind, path, path.relative_to(root).as_posix(), path.read_bytes())
        for kind, path in found
    )
    return [file for file in files if not _ships(file)]


def _ships(file: RootFile) -> bool:
    """Whether a root that is a checkout, or a copy of one, has the file."""
    shipped = CONTENT_ROOT / file.source
    same = shipped.is_file() and shipped.read_bytes() == file.data
    return same or file.path.resolve().is_relative_to(_PACKAGE)


def load(extension: Extension) -> None:
    """Run an extension, which registers what it brings; raise `UsageError`, in one line, for one
    that is broken.
    """
    try:
        extension.run()
    except OnboardError as error:
        raise UsageError(f"{extension.source}: {error.message}", hint=error.hint) from error
    except (
        Exception,
        SystemExit,
    ) as error:  # it is someone's code: whatever it raises is the finding
        raise broken(extension.source, error) from error


def broken(source: str, error: BaseException) -> UsageError:
    """Return the line about an extension that raised an error of its own."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UsageError(
        f"{source} is broken: {reason}",
        hint="Correct it or take it away; --debug shows where it is",
    )


def extensions_digest(root: Path | None) -> str:
    """Return the digest of all extensions, and of a root's pipelines; "" when there are none. Runs
    none of them.
    """
    parts = [part for extension in find_extensions(root) for part in extension.contents()]
    pipelines = (
        sorted(root.glob("transforms/*.yaml"))
        if root is not None and root.resolve() != CONTENT_ROOT
        else []
    )
    parts += [part for path in pipelines for part in (path.name.encode(), path.read_bytes())]
    return _digest(parts) if parts else ""


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}\n".encode())
        digest.update(part)
    return digest.hexdigest()
