"""Kinds of GPUs that are known by name, and what a word such as `4xH200` stands for; no GPU is
asked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onboard.errors import UsageError

_FILE = Path(__file__).resolve().parent / "assets" / "gpus.yaml"
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "tib": 2**40, "tb": 10**12}


@dataclass(frozen=True)
class Gpus:
    """A number of equal GPUs."""

    count: int
    memory: int
    """Bytes of each."""


@cache
def known_gpus() -> dict[str, int]:
    """Return bytes of memory by the name of a kind, ascending."""
    kinds = {name: each["memory"] * 2**20 for name, each in _kinds().items()}
    return dict(sorted(kinds.items(), key=lambda item: item[1]))


@cache
def _kinds() -> dict[str, dict[str, int]]:
    import yaml

    found: dict[str, dict[str, int]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return found


def read_bandwidth(text: str) -> float:
    """Return the bytes a second that the memory of a known kind of GPU can be read at, by its maker's
    data sheet; raise `UsageError` for a kind that is not known.
    """
    found = {name.lower(): each["bandwidth"] for name, each in _kinds().items()}
    if (rate := found.get(text.strip().lower())) is None:
        raise UsageError(
            f"how fast the memory of {text!r} is read is not known",
            hint=f"Give one of {', '.join(known_gpus())}",
        )
    return rate * 1e9


def parse_gpus(text: str) -> Gpus:
    """Return what H100, 4xH200, 80GiB or 2x80GB stand for; raise `UsageError` for anything else."""
    count, kind = re.fullmatch(r"(?:(\d+)\s*[xX*]\s*)?(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    if count is not None and int(count) == 0:
        raise UsageError(f"--gpu {text!r} is no GPU", hint="Write it as 4xH200")
    names = {name.lower(): size for name, size in known_gpus().items()}
    return Gpus(int(count or 1), names.get(kind.lower()) or parse_size(kind))


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 80GiB, 80GB or 40960MiB; a number alone is GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or (found[2] and found[2] not in _UNITS) or not float(found[1]):
        hint = f"Write it as 80GiB, 80GB or 40960MiB, or as one of {', '.join(known_gpus())}"
        raise UsageError(f"{text!r} is neither a size nor a known GPU", hint=hint)
    return int(float(found[1]) * _UNITS[found[2] or "gib"])
