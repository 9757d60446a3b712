"""Whether the weights of a checkpoint can be used: complete, readable, and finite numbers all of them."""

from __future__ import annotations

from pathlib import Path

from onboard.errors import OnboardError


def check_weights(folder: Path) -> None:
    """Read every tensor once; raise `OnboardError` for a damaged file, a missing shard, a NaN or an infinity."""
    from onboard.graph.checkpoint import Checkpoint, find_non_finite

    checkpoint = Checkpoint(folder)
    checkpoint.validate()
    for name in checkpoint.names():
        if found := find_non_finite(checkpoint.read(name)):
            raise OnboardError(
                f"the weight {name} of {folder} holds {found}", hint="Fetch or save the checkpoint again"
            )
