"""The whole measurement of one model: start, every shape, the machine's ceilings, transformers
beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from onboard.bench.ceilings import Ceilings, measure_ceilings
from onboard.bench.drafted_runs import (
    DraftedRuns,
    Drafting,
    measure_drafts,
    without_drafts,
)
from onboard.bench.measure import Measured, measure, run_batch
from onboard.bench.peer_names import PeerName
from onboard.bench.peers import PeerRun, measure_peer, transformers_model
from onboard.bench.profile import Profile, profile_decode
from onboard.bench.shape import Shape
from onboard.bench.startup import Span, StartUp, since_start
from onboard.bench.subject import Subject
from onboard.bench.work import ModelWork, weights_of
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.hf.architecture import refuse_own_code
from onboard.runtime.build import build_engine, resolve_device, resolve_dtype
from onboard.runtime.engine import Engine
from onboard.runtime.ranks.leading import led_ranks

Progress = Callable[[str], None]

_STEP_TOKENS = {"cuda": 8192, "cpu": 1024}
"""Tokens of a step, at most: a configuration that asks for more keeps its own."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and how often."""

    shapes: Sequence[Shape]
    seed: int
    repeats: int = 3
    peers: Sequence[PeerName] = ()
    profile: bool = False
    """Whether to record a decode step of each shape."""
    acceptance: float | None = None
    """Of drafts that are simulated; None: none are, and the model's own count."""


@dataclass
class Result:
    """What became of one shape."""

    shape: Shape
    measured: Measured | None = None
    """None: it does not fit."""
    reason: str = ""
    """Why it does not fit."""
    profile: Profile | None = None
    """Of one decode step."""
    cache_bytes: int = 0
    """Of the caches that this shape alone would need."""
    drafted: DraftedRuns | None = None
    """With simulated drafts."""
    peers: dict[PeerName, PeerRun | str] = field(default_factory=dict)
    """What was measured of each peer, or why it could not be."""


@dataclass
class Report:
    """Everything that was found."""

    subject: Subject
    settings: Settings
    device: torch.device
    dtype: torch.dtype
    startup: StartUp
    ceilings: Ceilings
    work: ModelWork
    results: list[Result]
    caches: int
    """Bytes of all caches of the run."""
    facts: list[str]
    world_size: int = 1
    """Ranks that ran it; work and memory are the first one's."""
    date: datetime = field(default_factory=lambda: datetime.now(UTC))
    """When it was made, UTC."""

    @property
    def made(self) -> str:
        """Where and when, for people: a picture is looked at without its document."""
        return f"{self.ceilings.device}, {str(self.dtype).removeprefix('torch.')}, {self.date:%Y-%m-%d}"


def run_suite(
    subject: Subject, settings: Settings, on_progress: Progress = lambda _: None
) -> Report:
    """Measure a model; what is freed in between: the engine before transformers' model is built."""
    if settings.peers:
        refuse_own_code(subject.config)
    device = resolve_device(subject.runtime.device)
    dtype = resolve_dtype(subject.runtime.dtype, subject.config, device)
    startup = StartUp([Span("imports", 0.0, since_start())])
    runtime = fitted_runtime(subject, settings.shapes, device)
    with ExitStack() as ranks:
        engine = _start(subject, runtime, startup, settings, on_progress, ranks)
        world_size = engine.cache.ranks.world_size
        work = ModelWork(
            weights_of(engine.gm),
            tuple(engine.cache.resources.values()),
            getattr(subject.config, "num_attention_heads", 1) // world_size,
        )
        results = [
            _measure(engine, shape, subject, settings, on_progress) for shape in settings.shapes
        ]
    caches = sum(cache.nbytes for cache in engine.cache.caches.values())
    facts = [*subject.facts, *engine.facts, *_of_drafts(engine)]
    del engine
    _free(device)
    on_progress("measuring the machine's read bandwidth and matrix products")
    ceilings = measure_ceilings(device, dtype)
    for peer in settings.peers:
        _measure_peer(peer, results, subject, settings, device, dtype, on_progress)
    found = startup, ceilings, work, results, caches, facts, world_size
    return Report(subject, settings, device, dtype, *found)


def _of_drafts(engine: Engine) -> list[str]:
    """Return what came of drafts, of which the tokens of a step, and what it is held against, know
    nothing.
    """
    line = engine.stats.draft_line()
    return [] if line is None else [f"drafts, which no rate of tokens here counts: {line}"]


def fitted_runtime(
    subject: Subject, shapes: Sequence[Shape], device: torch.device
) -> RuntimeConfig:
    """Return the configuration with room for all shapes, and with nothing that one run leaves for
    the next.
    """
    own = subject.runtime
    longest = max(shape.length for shape in shapes)
    batches = sorted({shape.batch for shape in shapes})
    graphs = own.cuda_graph_config
    if graphs.batch_sizes is None:
        graphs = graphs.model_copy(update={"batch_sizes": batches})
    return own.model_copy(
        update={
            "max_seq_len": min(longest, subject.positions or longest),
            "max_batch_size": batches[-1],
            "max_num_tokens": max(own.max_num_tokens or 0, _STEP_TOKENS[device.type], batches[-1]),
            "cuda_graph_config": graphs,
            "kv_cache_config": own.kv_cache_config.model_copy(update={"enable_block_reuse": False}),
        }
    )


def _start(
    subject: Subject,
    runtime: RuntimeConfig,
    startup: StartUp,
    settings: Settings,
    on_progress: Progress,
    opened: ExitStack,
) -> Engine:
    """Build the model, on other ranks as well if there are to be some, which end with `opened`."""
    for fact in subject.facts:  # before what they may lead to
        on_progress(f"note: {fact}")
    on_progress(f"building {subject.name}")
    start = since_start()
    named: dict[str, Any] = {"root": subject.root, "model": subject.name}
    ranks = led_ranks(subject.folder, runtime, **named, must=subject.asks_for_ranks)
    if ranks is not None:
        opened.callback(ranks.close)
        on_progress(str(ranks.division))
    try:
        engine = (ranks.build if ranks else build_engine)(subject.folder, runtime, **named)
    except torch.OutOfMemoryError as error:
        raise OnboardError(
            f"{subject.name} does not fit in the GPU's memory",
            hint=f"onboard plan {subject.name} shows what it takes",
        ) from error
    startup.built(start, engine.history)
    shape = min(settings.shapes, key=lambda each: (each.context, each.batch))
    with startup.stage("first token"):
        prompt = Shape(1, min(shape.context, engine.capacity - 1), 2).prompts(
            vocabulary_of(subject), settings.seed
        )
        run_batch(engine, prompt, 1)
    return engine


def vocabulary_of(subject: Subject) -> int:
    """Return how many tokens the model has."""
    size = getattr(subject.config, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise UsageError(
            f"{subject.name} does not say how many tokens it has",
            hint="Its config needs vocab_size",
        )
    return size


def _measure(
    engine: Engine, shape: Shape, subject: Subject, settings: Settings, on_progress: Progress
) -> Result:
    if reason := why_not(engine, shape):
        return Result(shape, reason=reason)
    on_progress(f"measuring batch {shape.batch}, context {shape.context}")
    vocabulary = vocabulary_of(subject)
    options: dict[str, Any] = {"seed": settings.seed, "repeats": settings.repeats}
    plain, drafted = engine, None
    if settings.acceptance is not None:
        plain = without_drafts(engine)
        drafting = Drafting(settings.acceptance, subject.runtime.speculative.num_tokens)
        drafted = measure_drafts(engine, shape, drafting, vocabulary=vocabulary, **options)
    measured = measure(plain, shape, vocabulary=vocabulary, **options)
    profile = (
        profile_decode(plain, shape.prompts(vocabulary, settings.seed), shape.output)
        if settings.profile
        else None
    )
    pages = 1 + shape.batch * -(-shape.length // engine.cache.info.page_size)
    sizes = (
        (r.num_bytes(shape.batch if r.by_sequence else pages))
        for r in engine.cache.resources.values()
    )
    return Result(shape, measured, cache_bytes=sum(sizes), profile=profile, drafted=drafted)


def why_not(engine: Engine, shape: Shape) -> str:
    """Return why the engine cannot decode a whole batch at a time up to its end, "" when it can."""
    if shape.length > engine.cache.info.max_seq_len:
        return f"sequences of {shape.length:,} tokens are longer than the model's {engine.cache.info.max_seq_len:,}"
    size = engine.cache.info.page_size
    for group in engine.cache.groups:
        most = shape.length if group.window is None else min(shape.length, group.window + 2 * size)
        fitting = group.allocator.num_usable // -(-most // size)
        if fitting < shape.batch:
            return f"the caches have room for {fitting} such sequences"
    prefill = 1 + -(
        -shape.batch * shape.context // max(engine.cache.info.max_num_tokens - shape.batch, 1)
    )
    if shape.batch > 1 and shape.output <= prefill + 2:
        return f"the first outputs end before the last prompt is read: --output-len {prefill + 3} at least"
    return ""


def _measure_peer(
    peer: PeerName,
    results: Sequence[Result],
    subject: Subject,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress,
) -> None:
    """Measure one peer on every shape that was measured; a peer that fails is shown as such."""
    with transformers_model(subject, device, dtype) as model:
        for result in results:
            if result.measured is None:
                continue
            on_progress(
                f"measuring {peer}, batch {result.shape.batch}, context {result.shape.context}"
            )
            options: dict[str, Any] = {"vocabulary": vocabulary_of(subject), "seed": settings.seed}
            try:
                result.peers[peer] = measure_peer(
                    model, peer, result.shape, repeats=settings.repeats, device=device, **options
                )
            except Exception as error:  # another library's code: what it raises is the finding
                result.peers[peer] = " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
