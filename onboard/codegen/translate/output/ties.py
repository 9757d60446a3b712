"""Weights that modules share: what transformers, or a constructor, ties is tied in the generated file,
and so are blocks that several layers have as one.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onboard.analysis.tiny.tiny_config import arguments_of
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name

FUNCTION = "tie_weights"
"""The function of `onboard.modeling` that generated files tie blocks with."""
_IN_LAYER = re.compile(r"(.+?)\.(\d+)\.([^.]+)\.(.+)")


@dataclass(frozen=True)
class SharedBlock:
    """`<owner>.<layers>[i].<attr>` of the layers that have one: the first ones' in turn."""

    owner: str
    layers: str
    attr: str
    field: str | None = None
    """The field of the config that says how many there are; None: one."""


def add_ties(translator: Translator) -> None:
    """Have the classes whose layers share blocks tie them in `__init__`, where transformers ties
    any weights at all.
    """
    for block in shared_blocks(translator.model):
        cls = type(translator.model.get_submodule(block.owner))
        init = translator.states[cls].init
        assert init is not None
        assert "config" in init.parameters
        count = f"config.{block.field}"
        one = f"    for block in shared[1:]:\n        {FUNCTION}(block, shared[0])"
        several = (
            f"    for index, block in enumerate(shared[{count} :]):\n"
            f"        {FUNCTION}(block, shared[index % {count}])"
        )
        init.body += ast.parse(
            "if config.tie_word_embeddings:\n"
            f'    shared = [layer.{block.attr} for layer in self.{block.layers} if hasattr(layer, "{block.attr}")]\n'
            + (one if block.field is None else several)
        ).body


def declared_ties(state: ClassState, translator: Translator, config: ast.Name) -> list[ast.stmt]:
    """Return the statements that tie weights as transformers' `_tied_weights_keys` says, and those
    that a constructor ties whatever the config says.
    """
    tied = getattr(state.cls, "_tied_weights_keys", None)
    if not isinstance(tied, dict) or not hasattr(translator.config, "tie_word_embeddings"):
        return []
    body: list[ast.stmt] = []
    always: list[ast.stmt] = []
    parameters = dict(translator.model.named_parameters(remove_duplicate=False))
    for target, source in tied.items():
        paths = [attribute(name("self"), *path.split(".")) for path in (target, source)]
        if not all(_resolves(translator.model, path) for path in (target, source)):
            continue
        assert isinstance(paths[0], ast.Attribute)
        is_one = parameters.get(target) is parameters.get(source, 0)
        kind = always if is_one and not translator.config.tie_word_embeddings else body
        kind.append(
            ast.Assign([ast.Attribute(paths[0].value, paths[0].attr, ast.Store())], paths[1])
        )
    test = attribute(config, "tie_word_embeddings")
    return [*always, *([ast.If(test, body, [])] if body else [])]


def _resolves(model: nn.Module, path: str) -> bool:
    return path in model.state_dict(keep_vars=True)


def shared_blocks(model: nn.Module) -> list[SharedBlock]:
    """Return the blocks that layers of a transformers model share.

    Raises:
        Untranslatable: layers share something else than whole blocks, the first ones' in turn.
    """
    found = []
    for block, tied in _tied(model).items():
        count = _untied(model, block, tied)
        if tied != _in_turn(model, block, count):
            raise Untranslatable(f"layers that share {block.attr} in another order than in turn")
        found.append(replace(block, field=_field_of(model, block, count)))
        if count != 1 and found[-1].field is None:
            raise Untranslatable(
                f"layers that share {count} of {block.attr}, a number of no field of the config"
            )
    return found


def _tied(model: nn.Module) -> dict[SharedBlock, dict[str, str]]:
    """Return the parameters of blocks that are those of another layer's: name -> the other one's
    name.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    sources: dict[SharedBlock, dict[str, str]] = defaultdict(dict)
    for target, source in ties.items():
        match = _IN_LAYER.fullmatch(target)
        if (
            match is not None
            and (other := _IN_LAYER.fullmatch(source)) is not None
            and match[1] == other[1]
        ):
            owner, _, layers = match[1].rpartition(".")
            sources[SharedBlock(owner, layers, match[3])][target] = source
    return sources


def _having(model: nn.Module, block: SharedBlock) -> list[str]:
    """Return the paths of the block in the layers that have one."""
    path = f"{block.owner}.{block.layers}".lstrip(".")
    layers = enumerate(model.get_submodule(path).children())
    return [f"{path}.{index}.{block.attr}" for index, layer in layers if hasattr(layer, block.attr)]


def _untied(model: nn.Module, block: SharedBlock, tied: Mapping[str, str]) -> int:
    """Return how many layers have a block of their own."""
    return sum(
        not any(name.startswith(f"{path}.") for name in tied) for path in _having(model, block)
    )


def _in_turn(model: nn.Module, block: SharedBlock, count: int) -> dict[str, str]:
    """Return the ties of layers that have the first `count` blocks in turn."""
    paths = _having(model, block)
    names = [name for name, _ in model.get_submodule(paths[0]).named_parameters()]
    return {
        f"{path}.{name}": f"{paths[i % count]}.{name}"
        for i, path in enumerate(paths)
        if i >= count
        for name in names
    }


def _field_of(model: Any, block: SharedBlock, count: int) -> str | None:
    """Return the field of the config that says how many blocks there are to share; None where none
    does.

    Raises:
        Untranslatable: other values of a field give another number of blocks than they say.
    """
    values = arguments_of(model.config)
    for key in [key for key, value in values.items() if type(value) is int and value == count]:
        try:
            with torch.device("meta"):
                other = type(model)(type(model.config).from_dict(values | {key: count + 1}))
        except Exception:  # no such config: it is not one that a checkpoint has
            continue
        found = _untied(other, block, _tied(other).get(block, {}))
        if found == count + 1:
            return key
        if found != count:
            raise Untranslatable(
                f"layers that share {block.attr} in a number that config.{key} changes"
            )
    return None
