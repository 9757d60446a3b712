"""Loops over lists of modules, which a recording has unrolled."""

from __future__ import annotations

from typing import Any

from torch import nn

from onboard.codegen.straight.lines import Straight


def rolled(straight: Straight, module: nn.Module) -> Straight:
    """Return a recording with a loop for each list of modules.

    Raises:
        NotStraight: its modules are not used one like the other.
    """
    return straight
