"""Replaces attention in a recorded forward by the canonical op, where both compute the same.

A *core* is what lies between queries, keys and values and the result. It is not matched by its form:
it is run on chosen operands, which says what it computes, and compared with the op.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from onboard.codegen.cores import proof
from onboard.codegen.cores.candidates import Candidate, candidates
from onboard.codegen.cores.combined_weights import meet_apart
from onboard.codegen.cores.core_runs import (
    SHORT,
    Core,
    Cut,
    CutAxes,
    Dims,
    NotAttentionError,
    Samples,
)
from onboard.codegen.cores.cut_places import Values, axes_of, cuts
from onboard.codegen.cores.double_runs import DoubleRuns, inputs_of
from onboard.codegen.cores.emission import emit
from onboard.codegen.cores.head_axes import kinds_of
from onboard.codegen.cores.meaning import Meaning, meanings
from onboard.codegen.cores.op_settings import Number, scale_of, settings_of, with_caps
from onboard.codegen.cores.reach import LONGEST, lengths_to_reach, score_bounds
from onboard.codegen.cores.value_paths import content

_LEAST: tuple[Dims, ...] = ((1, 1), (2, 2))
_LEAST_LONG = 24


@dataclass(frozen=True)
class CoreFinding:
    """What became of one candidate: `settings` of the op in its place, or `reason` why none is."""

    place: str
    settings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def replaced(self) -> bool:
        """Whether the canonical op is in its place."""
        return not self.reason


def replace_attention(
    gm: fx.GraphModule,
    samples: Samples,
    beyond: Collection[int] = (),
    *,
    keep_weights: bool = True,
) -> list[CoreFinding]:
    """Write `torch_attention` in the place of each attention of `gm`; say what was found.

    Args:
        gm: a forward at the level of torch functions, tensor methods and calls of child modules; its
            inputs differ between the texts of a batch exactly where they depend on the tokens.
        samples: inputs for a batch and a length, or None where the model reads no such texts.
        beyond: numbers of the code that made the inputs; texts longer than each are tried.
        keep_weights: go on returning attention weights where `gm` returns them; else None is in their
            place, and of an attention that is replaced nothing remains.

    Weights that are combined meet the values one by one. What is not replaced stays as it is. Nothing is
    replaced that differs from the op in float64.
    """
    found: list[CoreFinding] = []
    tried: set[fx.Node] = set()
    runs = DoubleRuns(gm)
    while True:
        values = _short_values(gm, runs, samples)
        if not values:
            return [
                CoreFinding("", reason=f"the model does not read texts of {SHORT[0][1]} tokens")
            ]
        tokens = _content(gm, values)
        if meet_apart(gm, tokens, values[0]):
            continue
        left = (each for each in candidates(gm, tokens) if each.scores not in tried)
        candidate = next(left, None)
        if candidate is None:
            break
        tried.add(candidate.scores)
        try:
            cut, layout = _place(candidate, tokens, values)
            core = Core(gm, cut, tokens, runs, samples)
            found.append(_replaced(core, layout, values, beyond))
            if not keep_weights:
                _return_none(gm, {*core.inside})
            gm.graph.eliminate_dead_code()
        except NotAttentionError as error:
            found.append(CoreFinding(candidate.scores.name, reason=str(error)))
    gm.graph.lint()
    gm.recompile()
    return found


def _return_none(gm: fx.GraphModule, nodes: Container[fx.Node]) -> None:
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = fx.node.map_arg(output.args, lambda each: None if each in nodes else each)


def _short_values(gm: fx.GraphModule, runs: DoubleRuns, samples: Samples) -> Values:
    values = []
    for dims in SHORT:
        inputs = samples(*dims)
        if inputs is None:
            return []
        values.append(runs.run(gm.graph.nodes, inputs_of(gm, inputs)))
    return values


def _content(gm: fx.GraphModule, values: Values) -> set[fx.Node]:
    batches = [batch for batch, _ in SHORT]
    return content(gm, list(zip(batches, values, strict=True))) if values else set()


def _place(candidate: Candidate, tokens: set[fx.Node], values: Values) -> tuple[Cut, str]:
    for place in cuts(candidate, tokens, values, SHORT):
        return place
    raise NotAttentionError("the axes of its operands do not fit together")


def _replaced(core: Core, layout: str, values: Values, beyond: Collection[int]) -> CoreFinding:
    core.check_dependence()
    dims = [*SHORT, *_LEAST, (1, _longest(core, values, beyond))]
    axes, meaning, scale = _learned(core, values, dims)
    undecided = [node.name for node in core.outcomes.undecided() if not core.is_given(node)]
    if undecided:
        raise NotAttentionError(f"nothing that was tried decides {', '.join(undecided)}")
    settings = settings_of(core, axes.query, meaning, scale, beyond)
    node = emit(core, axes, settings, scale, layout)
    return CoreFinding(node.name, dict(node.kwargs))


def _longest(core: Core, values: Values, beyond: Collection[int]) -> int:
    """Return a length beyond all numbers about positions, or the longest that there is."""
    wanted = lengths_to_reach(
        core.gm, [*core.inside, *core.around], {*core.inside}, core.scalars
    ) | set(beyond)
    most = max(wanted, default=0)
    if most > LONGEST:
        raise NotAttentionError(f"{most} may be about positions, and no text is tried so long")
    enough = max(most + 2, _LEAST_LONG)
    for length in (enough, most):
        if _runs(core, values, length):
            return length
    raise NotAttentionError(f"it does not run on texts of {most} tokens, a number in its code")


def _runs(core: Core, values: Values, length: int) -> bool:
    operands = []
    for node in core.cut.operands:
        kinds = kinds_of([each[node].shape for each in values], SHORT)
        assert kinds is not None
        sizes = {"B": 1, "T": length, "": 1}
        operands.append(
            torch.zeros([sizes[kind] * times for kind, times in kinds], dtype=torch.float64)
        )
    try:
        core.result((1, length), operands)
    except NotAttentionError:
        return False
    return True


def _learned(core: Core, values: Values, dims: list[Dims]) -> tuple[CutAxes, Meaning, Number]:
    """Return how the operands lie, what is computed, and how its scale is written.

    Raises `NotAttentionError`, with what was in the way of the likeliest reading.
    """
    failures: list[NotAttentionError] = []
    for axes in axes_of(core.cut, values, SHORT):
        try:
            for measured in meanings(core, axes, dims):
                scale = scale_of(core, measured.scale, axes.query.channels)
                for meaning in with_caps(core, replace(measured, scale=scale.value)):
                    try:
                        bounds = set(score_bounds(core.inside, core.entered(dims[0])))
                        proof.check(core, axes, meaning, dims, bounds)
                    except NotAttentionError as error:
                        failures.append(error)
                    else:
                        return axes, meaning, scale
        except NotAttentionError as error:
            failures.append(error)
    raise failures[0] if failures else NotAttentionError("its axes do not fit together")
