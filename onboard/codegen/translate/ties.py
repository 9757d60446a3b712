"""Blocks that several layers share: transformers ties their weights, and so does the generated file."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onboard.codegen.translate.values import Untranslatable

if TYPE_CHECKING:
    from onboard.codegen.translate.classes import Translator

FUNCTION = "tie_weights"
"""The function of `onboard.modeling` that generated files tie blocks with."""
_IN_LAYER = re.compile(r"(.+)\.(\d+)\.([^.]+)\.(.+)")


@dataclass(frozen=True)
class SharedBlock:
    """`<owner>.<layers>[i].<attr>` of every layer that has one is that of the first of them."""

    owner: str
    layers: str
    attr: str


def add_ties(translator: Translator) -> None:
    """Have the classes whose layers share blocks tie them in `__init__`, where transformers ties any weights at all."""
    for block in shared_blocks(translator.model):
        cls = type(translator.model.get_submodule(block.owner))
        init = translator.states[cls].init
        assert init is not None
        assert "config" in init.parameters
        init.body += ast.parse(
            "if config.tie_word_embeddings:\n"
            f'    shared = [layer.{block.attr} for layer in self.{block.layers} if hasattr(layer, "{block.attr}")]\n'
            f"    for block in shared[1:]:\n        {FUNCTION}(block, shared[0])"
        ).body


def shared_blocks(model: nn.Module) -> list[SharedBlock]:
    """Return the blocks that layers of a transformers model share.

    Raises:
        Untranslatable: layers share something else than one block, the first one's.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    sources: dict[SharedBlock, dict[str, str]] = defaultdict(dict)
    for target, source in ties.items():
        match = _IN_LAYER.fullmatch(target)
        if match is not None and (other := _IN_LAYER.fullmatch(source)) is not None and match[1] == other[1]:
            owner, _, layers = match[1].rpartition(".")
            sources[SharedBlock(owner, layers, match[3])][target] = source
    if sources and _differ_by_config(model, len(set(ties.values()))):
        raise Untranslatable("layers that share blocks in a number that the config has")
    for block, tied in sources.items():
        if tied != _all_to_the_first(model, block):
            raise Untranslatable(f"layers that share {block.attr} in turn")
    return list(sources)


def _differ_by_config(model: Any, count: int) -> bool:
    """Whether a field of the config, one where it is now, says how many blocks there are to share."""
    values = model.config.to_dict()
    for key in [key for key, value in values.items() if type(value) is int and value == 1]:
        try:
            with torch.device("meta"):
                other = type(model)(type(model.config).from_dict(values | {key: 2}))
        except Exception:  # no such config: it is not one that a checkpoint has
            continue
        if len(set(other.all_tied_weights_keys.values())) != count:
            return True
    return False


def _all_to_the_first(model: nn.Module, block: SharedBlock) -> dict[str, str]:
    path = f"{block.owner}.{block.layers}".lstrip(".")
    having = [index for index, layer in enumerate(model.get_submodule(path).children()) if hasattr(layer, block.attr)]
    first = f"{path}.{having[0]}.{block.attr}"
    names = [name for name, _ in model.get_submodule(first).named_parameters()]
    return {f"{path}.{index}.{block.attr}.{name}": f"{first}.{name}" for index in having[1:] for name in names}
