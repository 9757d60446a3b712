"""Recorded forwards with their attention as the canonical op."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from onboard.analysis.behaviour.code_numbers import code_of, literals
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.codegen.cores.core_runs import SHORT, Samples
from onboard.codegen.cores.line_graphs import LineGraph, namespace_of
from onboard.codegen.cores.reach import LONGEST
from onboard.codegen.cores.replace import CoreFinding, replace_attention
from onboard.codegen.straight.recorders import bound
from onboard.codegen.straight.straight_lines import NotStraight, Straight


def improved(
    straight: Straight, cls: type, model: nn.Module, *, positions: bool = False
) -> tuple[Straight, list[CoreFinding]]:
    """Return a recording of a class's forward with attention as the canonical op, and what was found.

    Args:
        straight: what all modules of the class do.
        cls: the class.
        model: a small model with values; it is run on texts of several lengths.
        positions: the model is given `position_ids`.

    The recording stays as it is where attention in it is none that the op computes, or where it is
    another one in another module.
    """
    made: list[Straight] = []
    findings: list[CoreFinding] = []
    for module in [each for each in model.modules() if type(each) is cls]:
        try:
            graph = LineGraph(straight, module, namespace_of(module))
        except NotStraight as error:
            return straight, [CoreFinding("", reason=str(error))]
        samples = _samples(model, module, graph.inputs, positions)
        beyond = _about_positions(model) if _has_mask(samples) else set[int]()
        findings = replace_attention(graph.module, samples, beyond, keep_weights=False)
        if not any(each.replaced for each in findings):
            return straight, findings
        made.append(graph.recording())
    if made and all(each == made[0] for each in made):
        return made[0], findings
    return straight, [CoreFinding("", reason="modules of one class attend in several ways")]


def _has_mask(samples: Samples) -> bool:
    """Whether something that is given has a number for each query and key."""
    _, length = dims = SHORT[0]
    given = samples(*dims) or ()
    tensors = (each for each in given if isinstance(each, torch.Tensor))
    return any(tuple(each.shape[-2:]) == (length, length) for each in tensors)


def _about_positions(model: nn.Module) -> set[int]:
    """Return the numbers of a model's code that masks which it hands on may have of positions."""
    found: set[int] = set()
    for node in (inside for tree in code_of(model) for inside in ast.walk(tree)):
        match node:
            case ast.Compare(left=left, comparators=others):
                found.update(literals(left, *others))
            case ast.BinOp(op=ast.FloorDiv() | ast.Mod(), right=right):
                found.update(literals(right))
            case ast.Call(func=ast.Attribute(attr="triu" | "tril")):
                found.update(literals(node))
    return {each for each in map(abs, found) if each <= LONGEST}


def _samples(model: nn.Module, module: nn.Module, names: Sequence[str], positions: bool) -> Samples:
    """Return what gives a module's inputs, by their names, in runs of the whole model."""
    forward = inspect.unwrap(type(module).forward)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }

    def samples(batch: int, length: int) -> Sequence[Any] | None:
        kept: list[dict[str, Any]] = []

        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            kept.append(bound(forward, module, args, kwargs))

        hook = module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with torch.no_grad():
                model(**_texts(model, batch, length, positions), use_cache=False)
        except (RuntimeError, IndexError, ValueError):
            return None  # more tokens than there are positions
        finally:
            hook.remove()
        return [kept[0].get(name, defaults.get(name)) for name in names] if kept else None

    return samples


def _texts(model: nn.Module, batch: int, length: int, positions: bool) -> dict[str, torch.Tensor]:
    inputs = from_zero(prompt(0, length, batch, seed=length, tokens=vocabulary(model)))
    return inputs if positions else {"input_ids": inputs["input_ids"]}
