"""Finding the quickest back ends and CUDA-graph sizes for a model on this device, by trying them.

From the configuration as it is, one setting after the other is changed, and kept when it is quicker
by more than the measurements scatter and its logits agree with the plain graph's (torch operators
alone, nothing compiled) as well as
before: rounding may differ, nothing else.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.bench.subject import Subject
from onboard.bench.tuning.knobs import Choice, choices, plain
from onboard.bench.whole_measurement import fitted_runtime, vocabulary_of, why_not
from onboard.config import RuntimeConfig, deep_merge
from onboard.errors import OnboardError, UsageError
from onboard.graph.fx import graph_modules
from onboard.runtime.build import build_engine, resolve_device
from onboard.runtime.engine import Engine
from onboard.runtime.limits import ON_GPU
from onboard.verify.error import rmse_ratio
from onboard.verify.ways import plans, run_plan

LEAST_GAIN = 0.02
"""A choice that is not quicker by this share is not worth a line in a configuration."""
BUCKET_WASTE = 0.02
"""A captured batch size is left out when padding up to the next one costs less than this share."""
_ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative RMSE of logits that two ways of rounding may differ by."""
_MARGIN = 2.0
_PROMPTS = (23, 40, 9)


@dataclass(frozen=True)
class Trial:
    """What was measured of one configuration."""

    knob: str
    value: Any
    milliseconds: dict[str, float]
    """By what was timed; empty: it does not run, or runs already."""
    error: float
    """Relative RMSE of its logits against the plain graph's."""
    score: float
    """Geometric mean of its times over those of the best before it; under 1 is quicker."""
    kept: bool
    reason: str = ""


@dataclass
class Tuning:
    """What was found."""

    changes: dict[str, Any] = field(default_factory=dict)
    """What to change in the model's configuration."""
    trials: list[Trial] = field(default_factory=list)
    buckets: dict[int, float] = field(default_factory=dict)
    """Milliseconds of a decode step by batch size; empty without CUDA graphs."""
    facts: list[str] = field(default_factory=list)


@dataclass
class _Bench:
    """Builds engines of one model one after the other, and measures them."""

    subject: Subject
    shapes: Sequence[Shape]
    seed: int
    repeats: int
    on_progress: Callable[[str], None]
    reference: list[torch.Tensor] = field(default_factory=list)
    """The plain graph's logits."""

    def build(self, runtime: RuntimeConfig) -> Engine:
        """Build an engine; the one before must not be held any more."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return build_engine(
            self.subject.folder, runtime, root=self.subject.root, model=self.subject.name
        )

    def logits(self, engine: Engine) -> list[torch.Tensor]:
        """Return the logits of prompts of several lengths that join one after the other, decoded in
        a batch.
        """
        count = min(len(_PROMPTS), engine.cache.info.max_batch_size)
        lengths = [min(length, engine.capacity) for length in _PROMPTS[:count]]
        prompts = [
            Shape(1, n, 2).prompts(vocabulary_of(self.subject), self.seed)[0] for n in lengths
        ]
        return run_plan(
            engine.gm,
            engine.cache,
            prompts,
            plans(prompts, engine.rope, engine.cache.info.max_num_tokens)["batched decode"],
            engine.rope,
        )

    def error(self, engine: Engine) -> float:
        """Return the error of an engine's logits against the plain graph's; infinite for one that
        is no number.
        """
        errors = [
            rmse_ratio(*pair) for pair in zip(self.logits(engine), self.reference, strict=True)
        ]
        return max(math.inf if math.isnan(error) else error for error in errors)

    def times(self, engine: Engine) -> tuple[dict[str, float], float]:
        """Return milliseconds by what was timed, and how much the measurements scatter at most, as
        a share.
        """
        found, scatter = {}, 0.0
        for shape in self.shapes:
            prompts = shape.prompts(vocabulary_of(self.subject), self.seed)
            run_batch(engine, prompts, 3)
            runs = [run_batch(engine, prompts, shape.output) for _ in range(self.repeats)]
            for name, values in (
                ("decode", [statistics.median(run.decode_steps) for run in runs]),
                ("prefill", [max(run.first_tokens) for run in runs]),
            ):
                found[f"{name}, batch {shape.batch}, context {shape.context}"] = 1e3 * min(values)
                scatter = max(scatter, statistics.median(values) / min(values) - 1)
        return found, scatter


def tune(
    subject: Subject,
    shapes: Sequence[Shape],
    *,
    seed: int,
    repeats: int,
    on_progress: Callable[[str], None],
) -> Tuning:
    """Try every choice, and keep what is better than the best so far; return what to change and all
    figures.

    Raises `UsageError` for a shape that the model or the memory has no room for.
    """
    bench = _Bench(subject, shapes, seed, repeats, on_progress)
    device = resolve_device(subject.runtime.device)
    runtime = fitted_runtime(subject, shapes, device)
    on_progress("computing the plain graph's logits")
    bench.reference = bench.logits(bench.build(plain(runtime, subject.root)))
    tuning, candidates, limits = _as_configured(bench, runtime)
    for choice in candidates:
        on_progress(f"measuring {choice.knob} {choice.value}")
        trial = _try(bench, choice, runtime, limits)
        tuning.trials.append(trial)
        if trial.kept:
            runtime = choice.applied(runtime)
            tuning.changes = deep_merge(tuning.changes, choice.changes)
    if device.type == "cuda":
        _tune_buckets(bench, runtime, tuning)
    return tuning


@dataclass
class _Limits:
    """What a choice is compared with."""

    graph: str
    """What the best configuration so far runs."""

    best: dict[str, float]
    """Milliseconds of the best configuration so far."""
    error: float
    """The most that logits may differ from the plain graph's."""
    gain: float
    """The least share by which a choice must be quicker."""


def _as_configured(bench: _Bench, runtime: RuntimeConfig) -> tuple[Tuning, list[Choice], _Limits]:
    """Measure the configuration as it is; return with it what there is to try, and the bar for
    that.
    """
    bench.on_progress("measuring the configuration as it is")
    engine = bench.build(runtime)
    for shape in bench.shapes:
        if reason := why_not(engine, shape):
            raise UsageError(
                f"batch {shape.batch}, context {shape.context} cannot be measured: {reason}"
            )
    (times, scatter), error = bench.times(engine), bench.error(engine)
    dtype = next(each.dtype for each in engine.gm.parameters() if each.is_floating_point())
    tuning = Tuning(facts=[*bench.subject.facts, *engine.facts])
    tuning.trials.append(Trial("as configured", "", times, error, 1.0, kept=True))
    found = choices(
        runtime,
        engine.history,
        gpu=engine.cache.info.device.type == "cuda",
        root=bench.subject.root,
    )
    limits = _Limits(
        _graph(engine),
        times,
        max(_MARGIN * error, _ROUNDING.get(dtype, 1e-2)),
        max(LEAST_GAIN, scatter),
    )
    return tuning, found, limits


def _try(bench: _Bench, choice: Choice, runtime: RuntimeConfig, limits: _Limits) -> Trial:
    """Measure one choice; one that does not run is shown as such."""
    try:
        engine = bench.build(choice.applied(runtime))
        if (graph := _graph(engine)) == limits.graph:
            return Trial(
                choice.knob,
                choice.value,
                {},
                0.0,
                1.0,
                kept=False,
                reason="it is what runs already",
            )
        times, _ = bench.times(engine)
        error = bench.error(engine)
    except (
        OnboardError,
        RuntimeError,
    ) as problem:  # a kernel that does not build is no reason to stop
        reason = " ".join(f"does not run: {problem}".split())[:160]
        return Trial(choice.knob, choice.value, {}, math.inf, math.inf, kept=False, reason=reason)
    score = geometric_mean_ratio(times, limits.best)
    if not error <= limits.error:
        reason = f"its logits are others: error {error:.1e}, at most {limits.error:.1e}"
    elif score > 1 - limits.gain:
        reason = f"not quicker by {limits.gain:.0%}"
    else:
        limits.graph, limits.best = graph, times
        return Trial(choice.knob, choice.value, times, error, score, kept=True)
    return Trial(choice.knob, choice.value, times, error, score, kept=False, reason=reason)


def _graph(engine: Engine) -> str:
    """Return what an engine runs: every call of its graph, and what holds the graph."""
    holders = [
        f"{type(module).__name__} {getattr(module, 'sizes', '')}" for module in engine.gm.modules()
    ]
    calls = [f"{node.target}" for _, gm in graph_modules(engine.gm) for node in gm.graph.nodes]
    return "\n".join([*holders, *calls])


def geometric_mean_ratio(times: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Return the geometric mean of the ratios of two measurements of the same things."""
    return math.exp(statistics.fmean(math.log(times[name] / others[name]) for name in others))


def _tune_buckets(bench: _Bench, runtime: RuntimeConfig, tuning: Tuning) -> None:
    """Measure a decode step of every size that could be captured, and choose which are worth it."""
    most = bench.subject.runtime.max_batch_size or ON_GPU.max_batch_size
    context = min(shape.context for shape in bench.shapes)
    sizes = [size for size in _SIZES if size < most] + [most]
    graphs = runtime.cuda_graph_config.model_copy(update={"batch_sizes": sizes})
    bench.on_progress(f"measuring decode steps of {', '.join(map(str, sizes))} sequences")
    engine = bench.build(
        runtime.model_copy(update={"max_batch_size": most, "cuda_graph_config": graphs})
    )
    for size in sizes:
        shape = Shape(size, context, 24)
        if why_not(engine, shape):
            continue
        prompts = shape.prompts(vocabulary_of(bench.subject), bench.seed)
        runs = [run_batch(engine, prompts, shape.output) for _ in range(bench.repeats)]
        tuning.buckets[size] = 1e3 * min(statistics.median(run.decode_steps) for run in runs)
    if tuning.buckets:
        chosen = choose_buckets(tuning.buckets)
        tuning.changes = deep_merge(tuning.changes, {"cuda_graph_config": {"batch_sizes": chosen}})


_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def choose_buckets(milliseconds: Mapping[int, float]) -> list[int]:
    """Return the batch sizes to capture: the largest, and each one that is quicker than the next
    kept by enough.
    """
    kept: list[int] = []
    for size in sorted(milliseconds, reverse=True):
        if not kept or milliseconds[size] < (1 - BUCKET_WASTE) * milliseconds[kept[-1]]:
            kept.append(size)
    return sorted(kept)
