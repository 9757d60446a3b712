"""The gguf package: names of types and tensors, sizes of blocks, and dequantising of rare types."""

from __future__ import annotations

from functools import cache
from typing import Any

from onboard.errors import OnboardError


def gguf() -> Any:
    """Return the package; raise `OnboardError` where it is not installed."""
    try:
        import gguf as package
    except ImportError as error:
        raise OnboardError(
            f"the weights are a GGUF file, which needs the package gguf ({error})",
            hint="pip install gguf, or install onboard with its extra: onboard[gguf]",
        ) from error
    return package


@cache
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Return of each type, by its number: the name, a block's elements, a block's bytes."""
    sizes = gguf().GGML_QUANT_SIZES.items()
    return {int(kind): (str(kind.name), int(count), int(size)) for kind, (count, size) in sizes}
