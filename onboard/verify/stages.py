"""Is the graph still the model? Compare its logits with transformers' own after every transform."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onboard.config import Mode, SettledConfig, with_settings
from onboard.errors import UsageError
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.invariants import uncached_mixers
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import BaseTransform
from onboard.hf.text_tokens import text_tokens
from onboard.runtime.build import make_context
from onboard.runtime.length_dependent_rope import LengthDependentRope, length_dependent_rope
from onboard.runtime.limits import PROOF
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.verify.error import rmse_ratio
from onboard.verify.hf_logits import Asked, reference_logits
from onboard.verify.tolerances import FLOOR_OF_STAGES, MARGIN_OF_STAGES, SAME
from onboard.verify.ways import DECODE, Prompt, interface_for, plans, run_plain, run_plan

_LENGTHS = (11, 17, 33, 48)
_MAX_WINDOW = 1024  # longest sliding window that the longest prompt is made to exceed


@dataclass(frozen=True)
class Check:
    """The errors after one transform: rmse(logits - reference) / rmse(reference), by the way of
    running.
    """

    transform: str
    errors: dict[str, float] = field(default_factory=dict)
    exception: str | None = None
    """What running the model raised, if it did."""
    matched: bool = True
    """The transform found something to do in this model."""

    def passes(self, tolerance: float) -> bool:
        """Tell whether everything ran and stayed within the tolerance; NaN does not."""
        return self.exception is None and all(error <= tolerance for error in self.errors.values())


@dataclass
class VerifyReport:
    """What `verify_model` found."""

    model: str
    device: str
    dtype: str
    seed: int
    prompt_lengths: list[int]
    tolerance: float
    reference_error: float
    """The error of transformers itself in this dtype, against itself in float32; 0 in float32."""
    checks: list[Check] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    graph_replays: int = 0
    """Forward passes that replayed a CUDA graph."""

    @property
    def first_failure(self) -> Check | None:
        """The first transform after which the logits left their tolerance."""
        return next((check for check in self.checks if not check.passes(self.tolerance)), None)

    @property
    def passed(self) -> bool:
        """Whether the graph was the model after every transform."""
        return self.first_failure is None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        failure = self.first_failure
        return {
            **dataclasses.asdict(self),
            "passed": self.passed,
            "first_failure": failure.transform if failure else None,
        }


def verify_model(
    model: str | Path,
    *,
    root: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    config: ConfigLike = None,
    compile_backend: str = "auto",
    mode: Mode = "graph",
    seed: int | None = None,
    transforms: Sequence[BaseTransform[Any]] | None = None,
    on_check: Callable[[VerifyReport], None] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Run the pipeline and check the model after every transform, on random prompts of different
    lengths.

    Until caches are inserted that is whole prefill; from then on also chunked prefill, decode one
    by one, and decode in a batch that prompts join at different times. Arguments as for `LLM`;
    `transforms` replaces the pipeline, `on_check` is called with the report as it is after each
    transform.
    """
    folder = Path.cwd() if root is None else Path(root).expanduser()
    overrides = {"device": device, "dtype": dtype, "compile_backend": compile_backend, "mode": mode}
    runtime = with_settings(resolve_config(str(model), folder, config, overrides), settings)
    if runtime.skip_loading_weights:
        raise UsageError(
            "skip_loading_weights is set and random weights have nothing to be compared with",
            hint="Leave it out",
        )
    context = make_context(
        find_checkpoint(runtime), runtime, root=folder, model=str(model), defaults=PROOF
    )
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    prompts = make_prompts(context, seed)
    context.runtime = _roomy(context.runtime, prompts)
    reference, reference_error = _reference(context, prompts)
    report = VerifyReport(
        model=str(model),
        device=str(context.device),
        dtype=str(context.dtype).removeprefix("torch."),
        seed=seed,
        prompt_lengths=[len(prompt) for prompt in prompts],
        tolerance=_tolerance(context.dtype, reference_error),
        reference_error=reference_error,
        facts=context.facts,
    )
    rope = length_dependent_rope(context.factory.text_config.to_dict())

    def observe(key: str, module: nn.Module, _: TransformContext) -> None:
        check = _check(key, module, context, prompts, reference, rope)
        report.checks.append(dataclasses.replace(check, matched=_matched(context.history[-1])))
        report.graph_replays = getattr(module, "replays", 0)
        if on_check is not None:
            on_check(report)

    pipeline = Pipeline(pipeline_for(context) if transforms is None else transforms)
    pipeline.run(context, observe)
    return report


def make_prompts(context: TransformContext, seed: int) -> list[list[int]]:
    """Return random prompts: ragged, at most a batch, one of them longer than a sliding window of
    usual size.
    """
    config, runtime = context.factory.text_config, context.runtime
    lengths = [min(length, runtime.max_seq_len) for length in _LENGTHS[-runtime.max_batch_size :]]
    window = getattr(config, "sliding_window", None)
    if window and window <= _MAX_WINDOW:
        lengths[-1] = min(max(lengths[-1], window + 2 * DECODE), runtime.max_seq_len)
    draw = random.Random(seed)
    words = text_tokens(context.factory.config, context.codebooks)
    return [draw.choices(words, k=length) for length in lengths]


def _reference(
    context: TransformContext, prompts: Sequence[Prompt]
) -> tuple[list[torch.Tensor], float]:
    """Return transformers' logits for each prompt in float32, and the error of its own run in the
    context's dtype.
    """
    reference = reference_logits(context, [Asked.whole(prompt) for prompt in prompts])
    return reference.exact, _worst(reference.own, reference.exact) if reference.own else 0.0


def _worst(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest error over prompts, NaN if any is (which Python's `max` hides behind a
    number).
    """
    errors = [rmse_ratio(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _matched(entry: HistoryEntry) -> bool:
    return not entry.skipped and bool(entry.num_matches or entry.summary)


def _check(
    key: str,
    module: nn.Module,
    context: TransformContext,
    prompts: Sequence[Prompt],
    reference: Sequence[torch.Tensor],
    rope: LengthDependentRope | None,
) -> Check:
    try:
        logits = _run_all(module, context, prompts, rope)
    except Exception as error:  # whatever a broken graph raises is the finding
        return Check(key, exception=" ".join(f"{type(error).__name__}: {error}".split()))
    return Check(key, {way: _worst(found, reference) for way, found in logits.items()})


def _run_all(
    module: nn.Module,
    context: TransformContext,
    prompts: Sequence[Prompt],
    rope: LengthDependentRope | None,
) -> dict[str, list[torch.Tensor]]:
    if context.cache is None or not context.cache.resources:
        return {"prefill": run_plain(module, prompts, context)}
    cache = interface_for(context.cache, prompts)
    ways = plans(prompts, rope)
    if uncached_mixers(module):  # between the transforms that cache one kind of mixer each
        ways = {"prefill": ways["prefill"]}
    return {way: run_plan(module, cache, prompts, plan, rope) for way, plan in ways.items()}


def _roomy(runtime: SettledConfig, prompts: Sequence[Prompt]) -> SettledConfig:
    """Return the configuration with room for all prompts at once, in a step and in the cache."""
    tokens = max(runtime.max_num_tokens, sum(map(len, prompts)))
    cache = runtime.kv_cache_config.model_copy(update={"max_tokens": None})
    return runtime.model_copy(update={"max_num_tokens": tokens, "kv_cache_config": cache})


def _tolerance(dtype: torch.dtype, reference_error: float) -> float:
    return SAME if dtype == torch.float32 else MARGIN_OF_STAGES * reference_error + FLOOR_OF_STAGES
