"""Parameters that a checkpoint holds in another shape: several tensors that are one, or one tensor
that is several.

transformers declares both for the models that it loads (`WeightConverter`); only those rules are
followed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Source:
    """Where a parameter's values are: `names`, or an entry of each, concatenated along `dim`, and of
    that the part `index` of `parts`.

    Where values `alternate` along `dim`, the first of each pair make the first half and the second
    ones the other.
    """

    names: tuple[str, ...]
    dim: int = 0
    index: int = 0
    parts: int = 1
    alternate: bool = False
    entry: int | None = None
    """Of stacks, which matrix."""

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is one tensor as it is."""
        is_whole = self.parts == 1 and self.entry is None
        return len(self.names) == 1 and is_whole and not self.alternate

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter, given the tensors of `names`."""
        return self.joined(
            tensors if self.entry is None else [tensor[self.entry] for tensor in tensors]
        )

    def joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter, given the tensors of `names`, or of stacks their entries."""
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
            for source in (*_sources(name, rule), *_entries(name, rule))
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


def _entries(name: str, rule: Any) -> Iterator[Source]:
    """Yield where a layer of an expert is in a stack that a rule makes of such, as transformers saves
    its own names (`save_original_format=False`).
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    if not rule.operations or len(rule.target_patterns) != 1:
        return
    merge, *then = rule.operations
    parts, is_joined = len(rule.source_patterns), len(then) == 1
    if not (isinstance(merge, MergeModulelist) and merge.dim == 0):
        return
    if is_joined and not (isinstance(then[0], Concatenate) and then[0].dim > 0):
        return
    if not is_joined and (then or parts > 1):
        return
    [target] = (each.replace("\\.", ".") for each in rule.target_patterns)
    for index, pattern in enumerate(rule.source_patterns):
        layer = r"(\d+)".join(map(re.escape, pattern.replace("\\.", ".").split("*")))
        if "*" in pattern and (match := re.search(f"{layer}$", name)):
            dim = then[0].dim - 1 if is_joined else 0
            stack = name[: match.start()] + target
            yield Source((stack,), dim, index, parts, entry=int(match[1]))
