"""The runner: runs the transforms in order and accounts for each of them.

Everything that is not the transform's own edit happens here: timing, memory, clean-up, shape
propagation, dumps, invariants between stages, observers, history. Which transforms there are, and
in which order, `graph/assembly/` says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import nn

from onboard.errors import OnboardError, UsageError
from onboard.extensions import broken
from onboard.graph.canonicalise import clean_up
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.fx import copy_graphs, graph_modules, set_submodule
from onboard.graph.graph_cache import Done, GraphCache, KeptRun
from onboard.graph.graph_counts import GraphCounts, graph_counts, size
from onboard.graph.invariants import check_stage
from onboard.graph.shapes import propagate_shapes
from onboard.graph.transform import BaseTransform, Stages, TransformInfo
from onboard.graph.visualize.dump import dump

T = TypeVar("T")
Observer = Callable[[str, nn.Module, TransformContext], None]

log = logging.getLogger("onboard.pipeline")

_MEMORY_TOLERANCE = 64 * 2**20
"""Bytes of CUDA memory that any transform may take without having said so."""
_NOTICEABLE = 0.05
"""Seconds from which a check has an entry in the history."""

CACHE_ENTRIES = ("find_kept_graph", "keep_graph")
"""What the history calls the time that the cache takes."""


def _timed(key: str, context: TransformContext, work: Callable[[], T]) -> T:
    """Run a step of the cache and put it into the history."""
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    found = isinstance(result, KeptRun) and result.is_restored
    context.history.append(
        HistoryEntry(key, "cache", True, not found, int(found), seconds, True, True, 0)
    )
    return result


def _check(stage: Stages, module: nn.Module, context: TransformContext) -> None:
    """Check a finished stage; a check that takes a while has an entry in the history, before its
    last transform's.
    """
    start = time.perf_counter()
    check_stage(stage, module, context)
    if (seconds := time.perf_counter() - start) > _NOTICEABLE:
        entry = HistoryEntry(
            f"check_{stage.value}", stage.value, True, False, 0, seconds, True, True, 0
        )
        context.history.insert(len(context.history) - 1, entry)


def _entry_from_cache(transform: BaseTransform[Any], done: Done) -> HistoryEntry:
    config = transform.config
    stage, skipped, matches = config.stage.value, done.skipped, done.num_matches
    what = transform.key, stage, config.enabled, skipped, matches
    known = _Changes(nodes=done.nodes, ops=done.ops)
    return HistoryEntry(*what, 0.0, True, True, 0, from_cache=True, summary=done.summary, **known)


@dataclass
class _State:
    """The module on its way through the pipeline, and what still holds for its graphs."""

    module: nn.Module
    is_clean: bool = True
    has_valid_shapes: bool = True
    counts: GraphCounts | None = None
    """Of the graphs, as they were counted last."""

    def counted(self, info: TransformInfo) -> GraphCounts:
        """Return the counts of the graphs; where a transform said that it found nothing, and no node
        came or went, they are as before.
        """
        known = self.counts
        if known is None or info.num_matches or size(self.module) != known.nodes:
            known = self.counts = graph_counts(self.module)
        return known


class Pipeline:
    """A sequence of configured transforms.

    `dump_dir` receives a readable dump after each transform. `strict` turns recorded facts (a
    fallback, a skipped transform, something left over) into errors.
    """

    def __init__(
        self,
        transforms: Sequence[BaseTransform[Any]],
        *,
        dump_dir: Path | None = None,
        strict: bool = False,
        cache: GraphCache | None = None,
    ) -> None:
        self.transforms = list(transforms)
        self.dump_dir = dump_dir
        self.strict = strict
        self.cache = cache

    def run(
        self,
        context: TransformContext,
        observer: Observer | None = None,
        start: nn.Module | None = None,
    ) -> nn.Module:
        """Run all transforms and return the final module; `observer` is called after each enabled
        one.

        Without `start`, what earlier transforms made, the first one builds the model.

        With a `cache`, and nobody who looks at the steps between, a graph that was made before is
        taken from there.
        """
        state, kept = _State(start or nn.Module()), None
        if self.cache is not None and observer is None and not self.strict and not self._is_shown():
            kept = _timed(
                CACHE_ENTRIES[0], context, partial(KeptRun, self.cache, self.transforms, context)
            )
            state.module = kept.module
        for index, transform in enumerate(self.transforms):
            facts = len(context.facts)
            if kept is not None and (done := kept.done_before(transform)) is not None:
                context.history.append(_entry_from_cache(transform, done))
                _note_idle(transform, context)
                continue
            if kept is not None and kept.is_due(index):
                _timed(CACHE_ENTRIES[1], context, partial(kept.keep, state.module))
            self._run_one(transform, state, context)
            acted = len(context.facts)
            if self._ends_stage(index) and (kept is None or not kept.is_restored):
                _check(transform.config.stage, state.module, context)
            if transform.config.enabled:
                self._dump(
                    f"{index:02d}_{transform.config.stage.value}_{transform.key}",
                    state.module,
                    transform,
                )
            if kept is not None:
                kept.note(
                    transform,
                    context.history[-1],
                    context.facts[acted if transform.acts else facts :],
                )
            _note_idle(transform, context)
            self._refuse_facts(transform, context.facts[facts:])
            if observer is not None and transform.config.enabled:
                observer(transform.key, state.module, context)
        return state.module

    def _run_one(
        self, transform: BaseTransform[Any], state: _State, context: TransformContext
    ) -> None:
        memory, start = _memory(context.device), time.perf_counter()
        info, error, changes = TransformInfo(skipped=True), None, _NO_CHANGE
        if transform.config.enabled:
            _prepare(transform, state, context)
            before = state.counted(TransformInfo())
            with self._settings_blamed(transform):
                info, error = _apply(transform, state, context)
            _finish(transform, state, context)
            changes = _changes(before, state.counted(info))
        entry = HistoryEntry(
            key=transform.key,
            stage=transform.config.stage.value,
            enabled=transform.config.enabled,
            skipped=info.skipped,
            num_matches=info.num_matches,
            seconds=time.perf_counter() - start,
            is_clean=state.is_clean,
            has_valid_shapes=state.has_valid_shapes,
            memory_delta=_memory(context.device) - memory,
            error=error,
            summary=info.summary,
            **changes,
        )
        context.history.append(entry)
        _report(entry, transform, context)

    @contextmanager
    def _settings_blamed(self, transform: BaseTransform[Any]) -> Iterator[None]:
        """Turn what a transform cannot do with into a `UsageError` where the user has enabled it, or
        others; what is left is a defect, or the machine's.
        """
        try:
            yield
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            if not (asked := [each.key for each in self.transforms if each.asked_for]):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UsageError(
                f"{transform.key} breaks in this run ({reason})",
                hint=f"The run's settings enable {', '.join(asked)}: try it without",
            ) from error

    def _ends_stage(self, index: int) -> bool:
        following = self.transforms[index + 1 : index + 2]
        return not following or following[0].config.stage != self.transforms[index].config.stage

    def _is_shown(self) -> bool:
        """Whether somebody wants to see what the graph is at some step; each step is then made
        anew.
        """
        enabled = [transform for transform in self.transforms if transform.config.enabled]
        shown = any(each.shows or each.config.debug_visualize_dir is not None for each in enabled)
        return shown or self.dump_dir is not None

    def _dump(self, name: str, module: nn.Module, transform: BaseTransform[Any]) -> None:
        folders = (self.dump_dir, transform.config.debug_visualize_dir)
        for folder in folders:
            if folder is not None:
                dump(module, Path(folder), name)

    def _refuse_facts(self, transform: BaseTransform[Any], facts: Sequence[str]) -> None:
        if self.strict and facts:
            raise OnboardError(
                f"{transform.key} (strict): {'; '.join(facts)}", hint="Run without strict to go on"
            )


class _Changes(TypedDict):
    """What of a history's entry the graphs say."""

    nodes: tuple[int, int] | None
    ops: dict[str, int]


_NO_CHANGE = _Changes(nodes=None, ops={})


def _changes(before: GraphCounts, after: GraphCounts) -> _Changes:
    if not before.nodes and not after.nodes:
        return _NO_CHANGE
    return _Changes(nodes=(before.nodes, after.nodes), ops=before.changes_to(after))


def _prepare(transform: BaseTransform[Any], state: _State, context: TransformContext) -> None:
    if transform.config.requires_clean_graph and not state.is_clean:
        _clean_up(state)
    if transform.config.requires_shape_prop and not state.has_valid_shapes:
        _propagate_shapes(state, context)


def _finish(transform: BaseTransform[Any], state: _State, context: TransformContext) -> None:
    if transform.config.run_graph_cleanup and not state.is_clean:
        _clean_up(state)
    if transform.config.run_shape_prop and not state.has_valid_shapes:
        _propagate_shapes(state, context)


def _clean_up(state: _State) -> None:
    for _, gm in graph_modules(state.module):
        clean_up(gm)
    state.is_clean = True


def _propagate_shapes(state: _State, context: TransformContext) -> None:
    for _, gm in graph_modules(state.module):
        propagate_shapes(gm, context.device)
    state.has_valid_shapes = True


def _note_idle(transform: BaseTransform[Any], context: TransformContext) -> None:
    """Say so where a transform that the user enabled found nothing to do, and no fact says why
    already.

    It is no fact of the graph, which others that did not ask for the transform may take from the
    cache.
    """
    entry = context.history[-1]
    did = entry.num_matches or (entry.summary and not entry.skipped)
    is_idle = not (transform.acts or did or entry.error)
    said = (f"{transform.key}:", f"{transform.key} found")
    if (
        entry.enabled
        and transform.asked_for
        and is_idle
        and not any(fact.startswith(said) for fact in context.facts)
    ):
        context.facts.append(
            f"{transform.key} found nothing to do, and the run's settings enable it"
        )


def _apply(
    transform: BaseTransform[Any], state: _State, context: TransformContext
) -> tuple[TransformInfo, str | None]:
    """Apply the transform to the state; with `skip_on_error` an error is returned and the state
    stays as it was.
    """
    before = copy_graphs(state.module) if transform.config.skip_on_error else None
    try:
        state.module, info = _apply_per_graph(transform, state.module, context)
    except Exception as error:
        if before is None:
            raise
        state.module = before
        message = f"{type(error).__name__}: {error}"
        context.facts.append(f"{transform.key} failed and was skipped: {message}")
        return TransformInfo(skipped=True), message
    state.is_clean &= info.is_clean
    state.has_valid_shapes &= info.has_valid_shapes
    return info, None


def _apply_per_graph(
    transform: BaseTransform[Any], module: nn.Module, context: TransformContext
) -> tuple[nn.Module, TransformInfo]:
    if not transform.config.run_per_gm:
        return _apply_once(transform, module, context)
    infos = []
    for path, gm in list(graph_modules(module)):
        new, info = _apply_once(transform, gm, context)
        module = set_submodule(module, path, new)
        infos.append(info)
    if not infos:
        context.facts.append(f"{transform.key} found no exported graph to work on")
    return module, _combined(infos)


def _apply_once(
    transform: BaseTransform[Any], module: nn.Module, context: TransformContext
) -> tuple[nn.Module, TransformInfo]:
    """Apply the transform; raise `UsageError` for one from outside that breaks, or gives back
    something else.
    """
    try:
        new, info = transform.apply(module, context)
        assert isinstance(new, nn.Module), f"apply returned a {type(new).__name__}, not a module"
        assert isinstance(info, TransformInfo), (
            f"apply returned a {type(info).__name__}, not a TransformInfo"
        )
    except OnboardError:
        raise
    except Exception as error:
        if not transform.origin:
            raise
        raise broken(f"{transform.key} of {transform.origin}", error) from error
    return new, info


def _combined(infos: Sequence[TransformInfo]) -> TransformInfo:
    idle = all(info.skipped for info in infos)
    return TransformInfo(
        skipped=idle,
        num_matches=sum(info.num_matches for info in infos),
        is_clean=all(info.is_clean for info in infos),
        has_valid_shapes=all(info.has_valid_shapes for info in infos),
        summary="; ".join(
            dict.fromkeys(info.summary for info in infos if info.summary and info.skipped is idle)
        ),
    )


def _memory(device: torch.device) -> int:
    """Return the bytes in use: allocated on a CUDA device, else resident in this process (0 where
    unknown).
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text("ascii").split()[1]) * 4096 if statm.exists() else 0


def _report(entry: HistoryEntry, transform: BaseTransform[Any], context: TransformContext) -> None:
    if context.device.type == "cuda" and not transform.config.expect_mem_change:
        moved = entry.memory_delta / 2**20
        if abs(entry.memory_delta) > _MEMORY_TOLERANCE:
            context.facts.append(
                f"{entry.key} changed CUDA memory by {moved:+.0f} MiB and was not expected to"
            )
    if not entry.enabled:
        outcome = "disabled"
    elif entry.error:
        outcome = f"failed: {entry.error}"
    else:
        outcome = "skipped" if entry.skipped else entry.summary or f"{entry.num_matches} matches"
    log.info(
        "%-16s %-32s %-12s %6.2f s %+8.1f MiB%s%s",
        entry.stage,
        entry.key,
        outcome,
        entry.seconds,
        entry.memory_delta / 2**20,
        " clean" if entry.is_clean else "",
        " shapes" if entry.has_valid_shapes else "",
    )
