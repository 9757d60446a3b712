"""Piecewise CUDA graphs: prefill and mixed steps as captured pieces for some numbers of tokens,
with eager calls between them.

A step is padded to the next captured number of tokens (a bucket). What the pieces compute for the
padding rows is never read: the calls between them (attention, recurrences, the selection of rows
for logits) get the step's own rows and metadata, so that caches are written and read as without
graphs. Replays and eager calls are enqueued in turn on one stream, which orders them: an eager
call's result is copied to where the next piece reads it before that piece is replayed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from onboard.cache.cached_sequence import CachedSequenceInterface, input_names
from onboard.cache.examples import set_prefill_example
from onboard.errors import OnboardError
from onboard.graph.compile.capture import has_room, shortest_time
from onboard.graph.compile.captured_step import borrowed
from onboard.graph.compile.direct_calls import directly
from onboard.graph.compile.pieces import TOKEN_INPUTS, CannotSplitError, Pieces, Segment, split
from onboard.ops.result_places import is_placed, results_at
from onboard.parallel.ranks import captured_in_group

SMALLEST = 64
_EXAMPLE_TOKENS = (11, 17)
"""Two numbers of tokens: values whose size changes with them have a row for each token."""


def token_buckets(wanted: Sequence[int] | None, max_num_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending: the `wanted` ones that a step can have;
    None: powers of two from 64 on, and `max_num_tokens`.
    """
    if wanted is not None:
        return sorted({size for size in wanted if size <= max_num_tokens})
    sizes = {
        1 << exponent for exponent in range(SMALLEST.bit_length() - 1, max_num_tokens.bit_length())
    }
    return sorted({size for size in sizes if size <= max_num_tokens} | {max_num_tokens})


class Recorder(Protocol):
    """What captures pieces."""

    def record(
        self, run: Callable[[], tuple[Any, ...]]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Return what replays `run`, and its results, which every replay writes again."""

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor that reads and writes the same memory without holding it."""


class CudaRecorder:
    """Captures CUDA graphs in one memory pool, where a piece reuses memory that earlier pieces have
    released.
    """

    def __init__(self, *, warm_up: bool = False) -> None:
        """`warm_up`: run each piece once before its capture, so that torch.compile has compiled
        it.
        """
        self.pool = torch.cuda.graph_pool_handle()
        self.warm_up = warm_up

    def record(
        self, run: Callable[[], tuple[Any, ...]]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Capture one piece."""
        if self.warm_up:
            run()
            torch.cuda.synchronize()
        graph = captured_in_group(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graph, pool=self.pool):
            results = run()
        return graph.replay, results

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a view of the tensor's memory that does not keep it."""
        return borrowed(tensor)


@dataclass(frozen=True)
class _Eager:
    """A call between two pieces."""

    segment: Segment
    targets: dict[str, Tensor]
    """Where later pieces read its results."""


@dataclass
class _Bucket:
    """The pieces for one number of tokens."""

    tokens: int
    inputs: dict[str, Tensor]
    steps: list[Callable[[], None] | _Eager] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Results of pieces that are read between them, or returned."""
    seconds: float = 0.0
    """Of a full step, in pieces."""
    whole_seconds: float = math.inf
    """Of a full step without them."""


class PiecewiseGraph(nn.Module):
    """A cached graph that replays captured pieces where a bucket fits and is faster, and runs other
    steps whole.

    Called with the same named inputs as the graph module, and returns the same.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        whole: nn.Module | None = None,
        *,
        compiled: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """`whole` runs steps without pieces (None: the graph itself); `compiled`: pieces go through
        torch.compile.
        """
        super().__init__()
        self.gm = gm
        self.whole = directly(gm if whole is None else whole)
        self.compiled = compiled
        self.replays = 0
        """Calls that replayed pieces."""
        self.left_out: list[int] = []
        """Numbers of tokens that were not captured for lack of memory."""
        self._recorder = recorder
        self._buckets: list[_Bucket] = []
        self._pieces: Pieces | None = None

    @property
    def graph(self) -> fx.Graph:
        """The graph module's FX graph."""
        return self.gm.graph

    @property
    def sizes(self) -> list[int]:
        """The captured numbers of tokens, ascending."""
        return [bucket.tokens for bucket in self._buckets]

    @torch.inference_mode()
    def capture(self, cache: CachedSequenceInterface, sizes: Sequence[int]) -> None:
        """Capture the pieces for each number of tokens, the largest first, in one memory pool.

        Raises `CannotSplitError` if the graph cannot be split.
        """
        recorder = self._recorder or CudaRecorder(warm_up=self.compiled)
        self._pieces = self._split(cache)
        if sizes and cache.info.device.type == "cuda":
            self._try(cache, min(sizes))
        buckets: list[_Bucket] = []
        for tokens in sorted(sizes, reverse=True):
            if buckets or self._fits(cache, tokens):
                self._warm_up(cache, tokens)
                buckets.append(self._captured(tokens, cache.info.device, recorder))
            else:
                self.left_out.append(tokens)
        self._buckets = buckets[::-1]
        for bucket in self._buckets:
            self._time(cache, bucket)

    def forward(self, **inputs: Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        tokens = inputs["input_ids"].shape[1]
        bucket = self._bucket_for(tokens)
        if bucket is None:
            return self.whole(**inputs)
        self.replays += 1
        return self._replay(bucket, inputs, tokens)

    def _bucket_for(self, tokens: int) -> _Bucket | None:
        """Return the bucket for a step, None if there is none or the step is faster whole.

        The time of a whole step is interpolated between the buckets' measured ones.
        """
        index = bisect_left(self._buckets, tokens, key=lambda bucket: bucket.tokens)
        if index == len(self._buckets):
            return None
        bucket = self._buckets[index]
        if (
            not index and SMALLEST < bucket.tokens > 2 * tokens
        ):  # it would be padding for the most part
            return None
        below = self._buckets[index - 1] if index else bucket
        share = (tokens - below.tokens) / (bucket.tokens - below.tokens) if index else 1.0
        whole = (
            (1 - share) * below.whole_seconds + share * bucket.whole_seconds
            if share < 1
            else bucket.whole_seconds
        )
        return bucket if bucket.seconds <= whole else None

    def _time(self, cache: CachedSequenceInterface, bucket: _Bucket) -> None:
        """Measure a full step in pieces and whole, on a GPU only."""
        device = cache.info.device
        if device.type != "cuda":
            return
        set_prefill_example(cache.info, bucket.tokens)
        inputs = {name: cache.args[name] for name in input_names(self.gm)}
        bucket.seconds = shortest_time(lambda: self._replay(bucket, inputs, bucket.tokens), device)
        bucket.whole_seconds = shortest_time(lambda: self.whole(**inputs), device)

    def _split(self, cache: CachedSequenceInterface) -> Pieces:
        def call(function: Callable[..., Any], tokens: int) -> Any:
            set_prefill_example(cache.info, tokens)
            return function(**{name: cache.args[name] for name in input_names(self.gm)})

        if cache.info.limits.most_tokens < max(_EXAMPLE_TOKENS):
            raise CannotSplitError(f"a step has at most {cache.info.limits.most_tokens} tokens")
        pieces = split(self.gm, call, _EXAMPLE_TOKENS, compiled=self.compiled)
        if not self.compiled:
            return pieces
        return replace(pieces, segments=tuple(map(_compiled, pieces.segments)))

    def _try(self, cache: CachedSequenceInterface, tokens: int) -> None:
        """Run the pieces once without capture, where a wait for the device raises an error.

        A piece that waits cannot be captured, and a failed capture makes the GPU unusable for this
        process; so it is found here. Raises `CannotSplitError`.
        """
        assert self._pieces is not None
        set_prefill_example(cache.info, tokens)
        values: dict[str, Any] = {name: cache.args[name] for name in input_names(self.gm)}
        before = torch.cuda.get_sync_debug_mode()
        for segment in self._pieces.segments:
            given = [values[name] for name in segment.inputs]
            if self.compiled and segment.captured:
                segment.run(*given)  # compiles it, and may wait then
            torch.cuda.set_sync_debug_mode("error" if segment.captured else "default")
            try:
                results = segment.run(*given)
            except RuntimeError as error:
                raise CannotSplitError(
                    f"a part of it waits for the device: {str(error).splitlines()[0]}"
                ) from error
            finally:
                torch.cuda.set_sync_debug_mode(before)
            values.update(zip(segment.outputs, results, strict=True))

    def _fits(self, cache: CachedSequenceInterface, tokens: int) -> bool:
        """Whether there is enough memory for the pieces of a step, in their own pool, beside a
        whole step.
        """
        return has_room(lambda: self._warm_up(cache, tokens), cache.info.device)

    def _warm_up(self, cache: CachedSequenceInterface, tokens: int) -> None:
        set_prefill_example(cache.info, tokens)
        cache.call(self.whole)

    def _captured(self, tokens: int, device: torch.device, recorder: Recorder) -> _Bucket:
        assert self._pieces is not None
        known = input_names(self.gm)
        inputs = {
            name: torch.zeros((1, tokens), dtype=torch.int64, device=device)
            for name in TOKEN_INPUTS
            if name in known
        }
        capture = _Capture(self._pieces, _Bucket(tokens, inputs), device, recorder)
        try:
            return capture.run()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            problem = f"a step of {tokens} tokens cannot be captured in pieces: {reason}"
            raise OnboardError(problem, hint="Set piecewise_enabled: false") from error

    @torch.inference_mode()
    def _replay(self, bucket: _Bucket, inputs: dict[str, Tensor], tokens: int) -> Any:
        assert self._pieces is not None
        for name, static in bucket.inputs.items():
            static[:, :tokens].copy_(inputs[name])
            static[:, tokens:].zero_()
        values: dict[str, Any] = dict(inputs)
        rows = self._pieces.rows
        for name, value in bucket.values.items():
            values[name] = rows[name].cut(value, tokens) if name in rows else value
        for step in bucket.steps:
            if not isinstance(step, _Eager):
                step()
                continue
            places = {name: rows[name].cut(step.targets[name], tokens) for name in step.targets}
            if tokens < bucket.tokens:  # the memory is that of other pieces in between
                for name, target in step.targets.items():
                    rows[name].rest(target, tokens).zero_()
            with results_at(next(iter(places.values()), None)):
                results = step.segment.run(*(values[name] for name in step.segment.inputs))
            for name, result in zip(step.segment.outputs, results, strict=True):
                values[name] = result
                if name in places and not is_placed(result, places[name]):
                    places[name].copy_(result)
        result = values[self._pieces.result]
        # The next replay overwrites a piece's result: return a copy.
        return result.clone() if self._pieces.result in bucket.values else result


def _compiled(segment: Segment) -> Segment:
    return (
        replace(segment, run=torch.compile(segment.run, dynamic=True))
        if segment.captured
        else segment
    )


class _Capture:
    """The capture of one bucket: a value is released after its last use, so that later pieces reuse
    its memory.
    """

    def __init__(
        self, pieces: Pieces, bucket: _Bucket, device: torch.device, recorder: Recorder
    ) -> None:
        self.pieces, self.bucket, self.device, self.recorder = pieces, bucket, device, recorder
        self.values: dict[str, Any] = dict(bucket.inputs)
        self.between = {
            name for each in pieces.segments if not each.captured for name in each.inputs
        } | {pieces.result}
        self.last_use = {
            name: index for index, each in enumerate(pieces.segments) for name in each.inputs
        }
        self.inside = {name for each in pieces.segments if each.captured for name in each.inputs}

    def run(self) -> _Bucket:
        """Capture every piece, in order."""
        segments = self.pieces.segments
        for index, segment in enumerate(segments):
            if segment.captured:
                following = segments[index + 1] if index + 1 < len(segments) else None
                self._record(segment, self._targets(following))
            elif index == 0:
                self.values.update(self._allocated(self._targets(segment)))
            if not segment.captured:
                targets = {
                    name: self.recorder.borrowed(self.values[name])
                    for name in self._targets(segment)
                }
                self.bucket.steps.append(_Eager(segment, targets))
            self._let_go(index)
        return self.bucket

    def _record(self, segment: Segment, targets: Sequence[str]) -> None:
        """Capture a piece, and allocate in its pool the results of the next eager call that later
        pieces read.
        """
        arguments = [self.values[name] for name in segment.inputs]

        def run() -> tuple[Any, ...]:
            return (*segment.run(*arguments), *self._allocated(targets).values())

        replay, results = self.recorder.record(run)
        self.bucket.steps.append(replay)
        self.values.update(zip((*segment.outputs, *targets), results, strict=True))
        for name in self.between.intersection(segment.outputs):
            value = self.values[name]
            self.bucket.values[name] = (
                self.recorder.borrowed(value) if isinstance(value, Tensor) else value
            )

    def _targets(self, segment: Segment | None) -> list[str]:
        """Return the results of a call between pieces that a later piece reads."""
        if segment is None or segment.captured:
            return []
        return [name for name in segment.outputs if name in self.inside]

    def _allocated(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return memory without values: a replay writes the rows of tokens, and zeros behind them."""
        found = {}
        for name in names:
            example = self.pieces.examples[name]
            shape = self.pieces.rows[name].shape(example, self.bucket.tokens)
            found[name] = torch.empty(shape, dtype=example.dtype, device=self.device)
        return found

    def _let_go(self, index: int) -> None:
        for name in [name for name in self.values if self.last_use.get(name, -1) <= index]:
            del self.values[name]
