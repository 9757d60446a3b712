"""A straight definition compared with the forward that it was recorded of, on real texts."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.hf.copied_model import copied
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

_SHAPES = ((1, 1), (2, 1), (1, 7), (2, 21), (1, 70))
"""Rows and tokens of texts: one of each, too, which sizes as symbols never are."""


def check_straight(
    made: ast.FunctionDef,
    space: Mapping[str, Any],
    cls: type,
    model: nn.Module,
    single: Collection[int],
) -> None:
    """Run a definition beside the modules of its class; `single` are more numbers of tokens.

    Raises:
        NotStraight: it gives something else, or fails, for some text that the model takes.
    """
    forward = _function(made, space)
    fresh = copied(model)
    more = [shape for size in single for shape in ((1, size), (size, 2))]
    for rows, tokens in (*_SHAPES, *more):
        inputs = from_zero(prompt(0, tokens, rows, seed=5, tokens=vocabulary(fresh)))
        calls = _calls(fresh, cls, inputs)
        if not calls and (rows, tokens) in more:
            raise NotStraight(f"it may do something else for {rows} texts of {tokens} tokens")
        for module, args, kwargs, output in calls:
            try:
                found = forward(module, *args, **kwargs)
            except Exception as error:
                raise NotStraight(f"what was recorded fails for {tokens} tokens") from error
            if not _same(found, output):
                raise NotStraight(f"it does something else for {rows} texts of {tokens} tokens")


def _function(made: ast.FunctionDef, space: Mapping[str, Any]) -> Any:
    names = dict(space)
    parts = ast.Module([ast.parse(ast.unparse(_without_types(made))).body[0]], [])
    exec(compile(parts, "<recorded>", "exec"), names)  # what this program wrote
    return names[made.name]


def _without_types(made: ast.FunctionDef) -> ast.FunctionDef:
    tree = ast.parse(ast.unparse(made)).body[0]
    assert isinstance(tree, ast.FunctionDef)
    for item in ast.walk(tree):
        if isinstance(item, ast.arg):
            item.annotation = None
    return tree


@torch.no_grad()
def _calls(model: nn.Module, cls: type, inputs: dict[str, torch.Tensor]) -> list[Any]:
    """Return the calls of the modules of a class in a run; none where the model refuses the text."""
    calls: list[Any] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((module, args, kwargs, output))

    handles = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in model.modules()
        if type(module) is cls
    ]
    try:
        model(**inputs, use_cache=False)
    except Exception:
        return []  # it takes no such texts
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _same(found: Any, expected: Any) -> bool:
    ours, theirs = (
        [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]
        for value in (found, expected)
    )
    return len(ours) == len(theirs) and all(
        one.shape == other.shape and (_equal(one, other) or rmse_ratio(one, other) <= SAME)
        for one, other in zip(ours, theirs, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other))
