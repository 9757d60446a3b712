"""How calls walk through the packages: `python scripts/walks.py generate` or `... onboard`.

`generate` follows `LLM.generate` for two prompts of the demo checkpoint, `onboard` the phases gather
to generate of the same checkpoint under a temporary root. `sys.setprofile` reports each call, and
the packages of the functions on the stack at that moment are a chain, neighbours of one package
counted once. The chains are printed in the order in which they first occur, with the function that
ends each; then those that come back to a package that they have left. Imports are left out.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import onboard

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{Path(onboard.__file__).parent}/"
DEMO = ROOT / "onboard" / "assets" / "demo"
BASE = ("verify/error.py", "verify/tolerances.py")
"""Base modules (docs/architecture.md) in the folder of another package."""
Chain = tuple[str, ...]


class Walk:
    """The chains of packages that calls went through."""

    def __init__(self) -> None:
        self.chains: dict[Chain, str] = {}
        """Chain -> the function with which it first occurred."""
        self._packages: dict[CodeType, str | None] = {}
        # The chain of each frame on the thread's stack, None for what an import runs
        self._local = threading.local()

    def event(self, frame: FrameType, event: str, _: Any) -> None:
        """Take in one event of `sys.setprofile`."""
        stack = self._local.__dict__.setdefault("stack", [()])
        if event == "return" and len(stack) > 1:
            stack.pop()
        elif event == "call":
            stack.append(self._chain(stack[-1], frame.f_code))

    def _chain(self, chain: Chain | None, code: CodeType) -> Chain | None:
        """Return the chain of a call, recorded if it is new."""
        if chain is None or code.co_name == "<module>":
            return None
        package = self._package(code)
        if package is None or chain[-1:] == (package,):
            return chain
        self.chains.setdefault((*chain, package), f"{code.co_filename}:{code.co_qualname}")
        return (*chain, package)

    def _package(self, code: CodeType) -> str | None:
        if code not in self._packages:
            self._packages[code] = package_of(code.co_filename)
        return self._packages[code]

    @property
    def returning(self) -> list[Chain]:
        """The chains that enter a package twice."""
        return [chain for chain in self.chains if len(set(chain)) < len(chain)]


def package_of(file: str) -> str | None:
    """Return the package of a function's file: a folder of `onboard/`, "base" for base modules,
    "graph" for the code of FX graphs, None for code of others.
    """
    if file.startswith("<eval_with_key>"):
        return "graph"
    if file.startswith(PACKAGE):
        name = file.removeprefix(PACKAGE)
        return "base" if name in BASE else name.split("/")[0].replace(".py", "")
    return "transforms" if file.startswith(f"{ROOT / 'transforms'}/") else None


@contextmanager
def walked() -> Iterator[Walk]:
    """Watch the calls of the block, in all threads."""
    walk = Walk()
    sys.setprofile(walk.event)
    threading.setprofile(walk.event)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def generation() -> Walk:
    """Return the walk of `LLM.generate`: prefill of two prompts and some decode steps."""
    from onboard import LLM, SamplingParams

    llm = LLM(DEMO, device="cpu")
    with walked() as walk:
        llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3, temperature=0.0))
    return walk


def model() -> Walk:
    """Return the walk of `onboard DEMO --until generate`."""
    from onboard.cli import main

    with tempfile.TemporaryDirectory() as folder, walked() as walk:
        words = [str(DEMO), "--root", folder, "--device", "cpu", "--until", "generate"]
        assert main.run(words) == 0
    return walk


WALKS: dict[str, Callable[[], Walk]] = {"generate": generation, "onboard": model}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        found = WALKS[name]()
        print(name)
        for chain, function in found.chains.items():
            print(f"  {' > '.join(chain):<60} {function.removeprefix(PACKAGE)}")
        print(
            f"{name}: {len(found.returning)} of {len(found.chains)} chains come back to a package"
        )
        for chain in found.returning:
            print(f"  {' > '.join(chain)}")
