"""What several ranks divide of a model, known before any of them starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from onboard.gpu import gib


@dataclass(frozen=True)
class Division:
    """What each of several ranks has of a model, and what they exchange."""

    world_size: int
    weights: dict[str, int] = field(default_factory=dict)
    """Layer type -> weights that are divided."""
    all_weights: int = 0
    """How many weights the model reads."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Name -> calls in a step."""
    rank_bytes: int = 0
    """Of the first rank's weights."""
    whole_bytes: int = 0
    stages: tuple[tuple[int, int], ...] = ()
    """Layers and bytes of each pipeline stage; empty where ranks divide layers."""
    facts: tuple[str, ...] = ()
    """What is not divided, and why."""

    def __str__(self) -> str:
        """Return it in one line."""
        if self.stages:
            return self._in_stages()
        count = sum(self.weights.values())
        kinds = ", ".join(f"{number} {name}" for name, number in sorted(self.weights.items()))
        calls = ", ".join(f"{number} {name}" for name, number in sorted(self.collectives.items()))
        return (
            f"{self.world_size} ranks divide {count} of {self.all_weights} weights"
            f" ({kinds or 'none'}): {gib(self.rank_bytes)} of {gib(self.whole_bytes)} on each;"
            f" a step has {calls or 'no collectives'}"
        )

    def _in_stages(self) -> str:
        layers = " + ".join(str(count) for count, _ in self.stages)
        sizes = " + ".join(gib(size) for _, size in self.stages)
        tensors = self.collectives.get("send_to_stage", 0)
        return (
            f"{self.world_size} ranks follow one another with {layers} layers: {sizes} of"
            f" {gib(self.whole_bytes)}; a step hands on {tensors} tensors"
        )
