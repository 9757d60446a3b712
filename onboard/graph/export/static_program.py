"""A graph with a static cache as a `torch.export` program, which runs wherever PyTorch does."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._sympy.value_ranges import ValueRanges

from onboard.errors import OnboardError
from onboard.graph.cache_init.static_cache import END, START, Make, cache_shapes
from onboard.graph.export.traced_ops import with_traceable_ops
from onboard.graph.fx import placeholders

_BATCH, _START, _TOKENS = 3, 4, 5
"""Sizes while the program is traced: no two are equal, none is 0 or 1."""
SHORTEST = 16
"""Least length of a cache."""


def to_program(gm: fx.GraphModule, length: int, device: torch.device) -> ExportedProgram:
    """Return the program of a graph that `insert_static_cache` has made.

    Inputs and outputs are the graph's; batch and tokens are dynamic, the caches have `length`
    places (at least `SHORTEST`). It has operators of PyTorch alone.

    Raises:
        OnboardError: an operator cannot be traced for sizes that are not known.
    """
    tensors = _example_inputs(gm, length, device)
    names = [str(node.target) for node in placeholders(gm)]
    example = (*tensors, _START, _START + _TOKENS)
    traceable = with_traceable_ops(gm)
    _states_places(traceable.graph)
    traceable.recompile()
    try:
        program = torch.export.export(
            traceable, example, dynamic_shapes=_dynamic(names, length), strict=False
        )
    except (RuntimeError, ValueError, ConstraintViolationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OnboardError(
            f"torch.export cannot trace the graph for any size ({reason})",
            hint="Export it --to plain, or serve it with onboard",
        ) from error
    _settle_ranges(program, length)
    _checks_places(program.graph, length)
    program.graph_module.recompile()
    return program


def _states_places(graph: fx.Graph) -> None:
    """Say while it is traced that the tokens take the places from `start_idx` to `end_idx`: the
    caches that come out then have as many places as those that went in.
    """
    _before_all(graph, lambda make, inputs: make(torch._check, (_is_end(make, inputs),)))


def _checks_places(graph: fx.Graph, length: int) -> None:
    """Check it where the program runs, and that the caches have these places: torch.export keeps
    neither.
    """
    fail = torch.ops.aten._assert_scalar.default

    def checks(make: Make, inputs: Mapping[str, fx.Node]) -> None:
        make(
            fail, (_is_end(make, inputs), f"{END} is not {START} and the number of tokens together")
        )
        make(fail, (make(operator.le, (inputs[END], length)), f"{END} is more than {length}"))

    _before_all(graph, checks)


def _is_end(make: Make, inputs: Mapping[str, fx.Node]) -> fx.Node:
    tokens = make(torch.ops.aten.sym_size.int, (inputs["input_ids"], 1))
    return make(operator.eq, (make(operator.add, (inputs[START], tokens)), inputs[END]))


def _before_all(graph: fx.Graph, put: Callable[[Make, Mapping[str, fx.Node]], object]) -> None:
    """Put calls before all others of a graph, with what is known of their values."""
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder", sort=True)}

    def make(target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = graph.call_function(target, args)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in args]
        node.meta["val"] = None if _is_check(target) else target(*values)
        return node

    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        put(make, inputs)


def _is_check(target: Any) -> bool:
    return target in (torch._check, torch.ops.aten._assert_scalar.default)


def _example_inputs(gm: fx.GraphModule, length: int, device: torch.device) -> list[torch.Tensor]:
    ids = torch.arange(_BATCH * _TOKENS, device=device).view(_BATCH, _TOKENS)
    places = torch.arange(_START, _START + _TOKENS, device=device).repeat(_BATCH, 1)
    caches = [
        torch.zeros(_BATCH, heads, length, size, dtype=dtype, device=device)
        for heads, size, dtype in cache_shapes(gm)
    ]
    return [ids, places, *caches]


def _dynamic(names: list[str], length: int) -> tuple[Any, ...]:
    """Return what may vary of each input, in order: batch, tokens, and the two numbers."""
    batch, tokens = Dim("batch", min=1), Dim("tokens", min=1, max=length)
    texts = [{0: batch, 1: tokens}] * 2
    caches = [{0: batch}] * (len(names) - 4)
    return (*texts, *caches, Dim.AUTO, Dim.AUTO)


def _settle_ranges(program: ExportedProgram, length: int) -> None:
    """Let `start_idx` have the range that it has, and drop what tracing supposed beside: that sizes
    are not 0 or 1.
    """
    start = next(node for node in placeholders(program.graph_module) if node.name == START)
    program.range_constraints[start.meta["val"].node.expr] = ValueRanges(0, length - 1)
    program._guards_code = []
