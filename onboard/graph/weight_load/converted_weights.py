"""Parameters that a checkpoint holds in another shape: several tensors that are one, or one tensor
that is several.

transformers declares both for the models that it loads (`WeightConverter`); only those rules are
followed here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """Where a parameter's values are: `names` concatenated along `dim`, and of that the part
    `index` of `parts`.

    Where values `alternate` along `dim`, the first of each pair make the first half and the second
    ones the other.
    """

    names: tuple[str, ...]
    dim: int = 0
    index: int = 0
    parts: int = 1
    alternate: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is one tensor as it is."""
        return len(self.names) == 1 and self.parts == 1 and not self.alternate

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter, given the tensors of `names`."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=self.dim)
        if self.alternate:
            places = torch.arange(whole.shape[self.dim], device=whole.device)
            whole = whole.index_select(self.dim, torch.cat([places[::2], places[1::2]]))
        # It may be a scalar
        return (
            whole if self.parts == 1 else torch.chunk(whole, self.parts, dim=self.dim)[self.index]
        )


def converted(
    wanted: Collection[str],
    available: Collection[str],
    identifiers: Sequence[str],
    rename: Callable[[str], str] = str,
) -> dict[str, Source]:
    """Return the sources of those wanted names that transformers makes of other tensors of the
    checkpoint.

    `identifiers` are class names and a model type, the first that transformers knows counts;
    `rename` is what transformers renames checkpoint tensors to.
    """
    if not wanted:
        return {}
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    declared = (get_checkpoint_conversion_mapping(identifier) for identifier in identifiers)
    rules = [rule for rule in next(filter(None, declared), ()) if isinstance(rule, WeightConverter)]
    renamed = {rename(name): name for name in available}
    found: dict[str, Source] = {}
    for name in wanted:
        sources = (
            source
            for rule in rules
            for source in _sources(name, rule)
            if set(source.names) <= renamed.keys()
        )
        if (source := next(sources, None)) is not None:
            names = tuple(renamed[each] for each in source.names)
            found[name] = replace(source, names=names)
    return found


def _sources(name: str, rule: Any) -> Iterator[Source]:
    """Yield where a rule would take a parameter from; nothing for rules of other kinds."""
    from transformers import core_model_loading
    from transformers.core_model_loading import Chunk, Concatenate

    interleave = getattr(core_model_loading, "Interleave", ())  # younger than the others
    if len(rule.operations) != 1:
        return
    (operation,) = rule.operations
    sources, targets = (
        [each.replace("\\.", ".") for each in side]
        for side in (rule.source_patterns, rule.target_patterns)
    )
    plain = (
        isinstance(operation, (Chunk, Concatenate, interleave))
        and getattr(operation, "num_shards_attribute", None) is None
    )
    if not plain or any("*" in pattern for pattern in (*sources, *targets)):
        return
    for index, target in enumerate(targets):
        if not name.endswith(target):
            continue
        names = tuple(name.removesuffix(target) + source for source in sources)
        if (
            isinstance(operation, interleave)
            and not operation.inverse
            and len(sources) == len(targets) == 1
        ):
            yield Source(names, operation.dim, alternate=True)
        elif isinstance(operation, Concatenate) and len(targets) == 1:
            yield Source(names, operation.dim)
        elif isinstance(operation, Chunk) and len(sources) == 1:
            yield Source(names, operation.dim, index, len(targets))
