"""Hints followed, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.sharding.hints import Hint, hint_of
from onboard.graph.sharding.rewriting import Rewriting
from onboard.graph.sharding.shares import bytes_read_by

_MIB = 2**20


class IndivisibleError(UsageError):
    """Ranks cannot divide heads; `sizes` are the world sizes that could."""

    def __init__(self, message: str, sizes: Sequence[int]) -> None:
        fits = ", ".join(map(str, sizes)) or "none but 1"
        super().__init__(message, hint=f"World sizes that divide them: {fits}")
        self.sizes = tuple(sizes)


@dataclass(frozen=True)
class Applied:
    """What a rank's graph has become."""

    cut: Counter[str]
    """Layer type -> calls that compute a share."""
    collectives: dict[str, int]
    made_whole: Counter[str]
    """Op -> how often its inputs had to be gathered."""
    left_whole: Counter[str]
    """What could not be divided -> how often."""
    own_bytes: int
    whole_bytes: int

    @property
    def count(self) -> int:
        """How many calls were cut."""
        return self.cut.total()

    def summary(self) -> str:
        """Return a line for the log."""
        layers = ", ".join(f"{count} {name}" for name, count in sorted(self.cut.items()))
        exchanged = ", ".join(f"{count} {name}" for name, count in sorted(self.collectives.items()))
        weights = f"{self.own_bytes / _MIB:.1f} of {self.whole_bytes / _MIB:.1f} MiB of weights"
        return f"{self.count} nodes ({layers}); {exchanged or 'no collectives'}; {weights}"

    def facts(self) -> list[str]:
        """Return what is not divided, and why."""
        gathered = [
            f"several ranks: what {name} reads is gathered {count} times, since it has to be whole"
            for name, count in sorted(self.made_whole.items())
            if name != "output"
        ]
        whole = [
            f"several ranks: each computes all of {count} calls with {what}"
            for what, count in sorted(self.left_whole.items())
        ]
        return gathered + whole


def apply_hints(
    gm: GraphModule, context: TransformContext, layer_types: Collection[str] | None
) -> Applied:
    """Make a graph that of the context's rank.

    Raises:
        IndivisibleError: the ranks do not divide a layer's heads.
        UsageError: layer types that the model has not.
    """
    hints = [hint for node in gm.graph.nodes if (hint := hint_of(node)) is not None]
    known = {hint.layer_type for hint in hints}
    if unknown := sorted(set(layer_types or ()) - known):
        raise UsageError(
            f"shard_layers names {unknown[0]!r}, which the model has not",
            hint=f"It has {', '.join(sorted(known))}",
        )
    chosen = [hint for hint in hints if layer_types is None or hint.layer_type in layer_types]
    _check_heads(chosen, context.ranks.world_size)
    followed = set(map(id, chosen))
    rewriting = Rewriting(gm, context.ranks.rank, lambda hint: id(hint) in followed)
    whole_bytes = bytes_read_by(gm)
    rewriting.run()
    return Applied(
        rewriting.followed,
        rewriting.exchange.collectives,
        rewriting.made_whole,
        Counter(hint.refused for hint in chosen if hint.refused),
        bytes_read_by(gm),
        whole_bytes,
    )


def _check_heads(hints: list[Hint], world_size: int) -> None:
    """Refuse heads that the ranks cannot divide; channels are then left whole."""
    for hint in hints:
        if hint.refused and "heads" in hint.refused:
            raise IndivisibleError(
                f"{hint.refused} ({hint.layer_type}) cannot be divided among {world_size} ranks",
                hint.sizes,
            )
