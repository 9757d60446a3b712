"""Writes variants: `python -m scripts.quantised [VARIANT...]`, all of them without a name.

A variant needs its library (tests/support/quantised/README.md); libraries are imported when a
variant of theirs is written.
"""

from __future__ import annotations

import sys

import torch

from scripts.quantised.variants import VARIANTS
from tests.support.quantised import FOLDER


def main(names: list[str]) -> None:
    """Write the variants of those names."""
    torch.set_num_threads(1)
    for name in names or list(VARIANTS):
        torch.manual_seed(0)
        VARIANTS[name](FOLDER / name)
        size = sum(path.stat().st_size for path in (FOLDER / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
