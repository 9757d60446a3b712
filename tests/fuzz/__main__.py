"""`python -m tests.fuzz --count 10000`: draw inputs, print what came of each kind."""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import time

PART = 250
"""Inputs of a process: memory that leaks, or a limit that one of them set, ends with it."""


def main() -> int:
    """Draw in processes of their own, a part each; the exit code is 1 when something is wrong."""
    options = _parsed()
    if options.child:
        return _child(options.kinds[0], options.count, options.seed)
    from tests.fuzz.kinds import KINDS

    kinds = options.kinds or list(KINDS)
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    share, wrong = -(-options.count // len(kinds)), 0
    for kind in kinds:
        wrong += _explore(kind, share, seed)
    print(f"{share * len(kinds)} inputs, {wrong} parts with something wrong")
    return int(wrong > 0)


def _explore(kind: str, count: int, seed: int) -> int:
    wrong = 0
    for start in range(0, count, PART):
        words = ["--child", "--kinds", kind, "--count", str(min(PART, count - start))]
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", *words, "--seed", str(seed + start)],
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            errors="replace",
        )
        wrong += done.returncode != 0
        print(done.stdout.strip() if done.returncode == 0 else _failure(kind, done), flush=True)
    return wrong


def _failure(kind: str, done: subprocess.CompletedProcess[str]) -> str:
    return f"{kind}: WRONG (code {done.returncode})\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def _child(kind: str, count: int, seed: int) -> int:
    from onboard.cli.main import _silence_libraries

    _silence_libraries()
    import transformers.models.auto.modeling_auto  # noqa: F401 (before memory is limited)

    from tests.fuzz.harness import explore, limit_memory

    explore(kind, 1, 0)  # what the first one imports
    limit_memory()
    start = time.monotonic()
    ended = explore(kind, count, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    counts = ", ".join(f"{number} {how}" for how, number in sorted(ended.items()))
    print(f"{kind}: {counts}; {time.monotonic() - start:.0f} s, at most {peak} MiB, seed {seed}")
    return 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="inputs in all")
    parser.add_argument("--kinds", nargs="*", default=None, help="only these")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
