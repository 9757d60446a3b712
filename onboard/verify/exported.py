"""Prove that the exported graph of a generated model computes what the model does, at every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onboard.analysis.behaviour.thresholds import (
    positions,
)
from onboard.analysis.recognise.scans.token_loops import token_loops
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import one_line
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.errors import OnboardError, ProofError
from onboard.graph.export.guards import broken_guards
from onboard.verify.block_outputs import compare_outputs, running, sizes

_TRIED = 2048
"""The most tokens with which another path of the code is tried."""


def check_export(
    model: nn.Module, reference: Any, spec: ModelSpec, shapes: list[dict[str, torch.Tensor]]
) -> None:
    """Export with dynamic batch and sequence: the graph has to be right for every size."""
    tokens = vocabulary(reference)
    inputs = prompt(2, length=11, batch=3, tokens=tokens)
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    name = type(model).__name__
    try:
        program = torch.export.export(
            model, (), inputs, dynamic_shapes={key: dims for key in inputs}, strict=False
        )
    except Exception as error:
        blocks = running(error)
        loops = token_loops(model, tokens)
        raise ProofError(_why_not(error, name, blocks, loops), blocks=blocks) from error
    graph = program.module(check_guards=False)  # these are looked at all at once
    assert isinstance(graph, fx.GraphModule)
    # and export's bounds of sizes with them: what the graph computes is compared
    graph._forward_pre_hooks.clear()
    _check_guards(graph, model, positions(reference.config), spec)
    for other in (prompt(4, length=17, batch=2, tokens=tokens), *shapes):
        _compare_graph(graph, model, other)


def _why_not(
    error: Exception, name: str, blocks: tuple[str, ...], loops: Sequence[str] = ()
) -> str:
    """Return why a model is not exported, `blocks` being the classes that led there, `loops` those over
    its tokens.
    """
    if loops:
        return (
            f"the code of {name} has a loop with a turn for each token in {', '.join(loops)}, which is "
            "no recurrence that an op computes, and one graph is for texts of every length"
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        where = f" (in {blocks[0]})" if blocks else ""
        return (
            f"the code of {name} asks what a tensor holds for a size, or for the way that it takes"
            f"{where}, and one graph is for all texts"
        )
    return f"torch.export fails on the generated {name}: {' '.join(str(error).split())[:300]}"


def _compare_graph(
    graph: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor]
) -> None:
    name = type(model).__name__
    try:
        with torch.no_grad():
            actual, expected = graph(**inputs).logits, model(**inputs).logits
    except Exception as error:
        said = f"the graph of the generated {name} does not run: {one_line(error)}"
        raise ProofError(said, blocks=running(error)) from error
    compare_outputs(f"exported logits {sizes(inputs)}", name, actual, expected)


def _check_guards(graph: fx.GraphModule, model: nn.Module, small: int, spec: ModelSpec) -> None:
    """Refuse code that takes another path for texts that the checkpoint has positions for.

    Another path may compute the same: that is tried. What lies just behind the `small` number of
    positions of the tiny model is the end of its tables, and an assertion is one of what
    transformers itself takes.
    """
    full = positions(load_config(spec.config))
    for broken in broken_guards(graph, full, shortest=1):
        is_end = broken.is_asserted or (broken.length == small + 1 and small != full)
        is_tried = broken.length * broken.batch <= _TRIED
        inputs = (
            from_zero(prompt(0, length=broken.length, batch=broken.batch)) if is_tried else None
        )
        if not (is_end or (inputs is not None and _is_same_path(graph, model, inputs))):
            raise ProofError(
                f"the code of {spec.architecture} takes another path {broken}",
                hint="No graph can follow that; report this architecture",
            )


def _is_same_path(graph: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether a graph computes what the model does, or the model has no such length."""
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception:
        return True
    try:
        _compare_graph(graph, model, inputs)
    except OnboardError:  # it computes something else, or its shapes do not fit
        return False
    return True
