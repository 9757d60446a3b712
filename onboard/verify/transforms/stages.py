"""Is the graph still the model? Compare its logits with transformers' own after every transform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onboard.config import Mode, with_settings
from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.pipeline import Observer
from onboard.graph.transform import BaseTransform
from onboard.runtime.ranks.leading import LedRanks, led_ranks
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.verify.error import rmse_ratio
from onboard.verify.hf_logits import Asked, References, reference_logits
from onboard.verify.seeds import fresh_seed
from onboard.verify.tolerances import FLOOR_OF_STAGES, MARGIN_OF_STAGES, SAME
from onboard.verify.transforms.trial import Trial, follow_trial, matched


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
    """The error of what it is compared with in this dtype, against itself in float32; 0 in float32."""
    checks: list[Check] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    graph_replays: int = 0
    """Forward passes that replayed a CUDA graph."""
    world_size: int = 1
    """Ranks that divide the model from the stage sharding on."""
    beside: str = "transformers"
    """What it is compared with."""

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
    references: References = reference_logits,
) -> VerifyReport:
    """Run the pipeline and check the model after every transform, on random prompts of different
    lengths.

    Until caches are inserted that is whole prefill; from then on also chunked prefill, decode one
    by one, and decode in a batch that prompts join at different times. With a `world_size` above
    one all ranks run the pipeline, and from the stage sharding on each its share.

    Arguments as for `LLM`; `transforms` replaces the pipeline of one rank, `on_check` is called
    with the report as it is after each transform, and `references` computes what is compared with:
    transformers' own model does, where nothing else is given.
    """
    folder = Path.cwd() if root is None else Path(root).expanduser()
    overrides = {"device": device, "dtype": dtype, "compile_backend": compile_backend, "mode": mode}
    runtime = with_settings(resolve_config(str(model), folder, config, overrides), settings)
    if runtime.skip_loading_weights:
        raise UsageError(
            "skip_loading_weights is set and random weights have nothing to be compared with",
            hint="Leave it out",
        )
    if runtime.world_size > 1 and runtime.dist_mapping.pp > 1:
        raise UsageError(
            "verify compares each rank's logits, and of pipeline stages the last alone has any",
            hint="Leave dist_mapping.pp out",
        )
    checkpoint, asked = find_checkpoint(runtime), "world_size" in (settings or {})
    seed = fresh_seed() if seed is None else seed
    ranks = led_ranks(checkpoint, runtime, root=folder, model=str(model), must=asked)
    with nullcontext() if ranks is None else closing(ranks):
        trial = Trial(checkpoint, runtime, folder, str(model), seed)
        report, observe = _checked(trial, str(model), seed, on_check, references)
        with nullcontext() if ranks is None else _followed(ranks, trial, seed):
            trial.run(observe, transforms)
    return report


@contextmanager
def _followed(ranks: LedRanks, trial: Trial, seed: int) -> Iterator[None]:
    """Have all other ranks do what this one does in the block."""
    trial.context.facts.append(str(ranks.division))
    with ranks.workers.together():
        ranks.workers.begin(follow_trial, *trial.said, seed)
        yield
        ranks.workers.answers()


def _checked(
    trial: Trial,
    model: str,
    seed: int,
    on_check: Callable[[VerifyReport], None] | None,
    references: References,
) -> tuple[VerifyReport, Observer]:
    """Return an empty report, and the observer that fills it."""
    context = trial.context
    reference = references(context, [Asked.whole(prompt) for prompt in trial.prompts])
    reference_error = _worst(reference.own, reference.exact) if reference.own else 0.0
    report = VerifyReport(
        model=model,
        device=str(context.device),
        dtype=str(context.dtype).removeprefix("torch."),
        seed=seed,
        prompt_lengths=[len(prompt) for prompt in trial.prompts],
        tolerance=_tolerance(context.dtype, reference_error),
        reference_error=reference_error,
        beside=reference.whose,
        world_size=context.ranks.world_size,
        facts=context.facts,
    )

    def observe(key: str, module: nn.Module, _: TransformContext) -> None:
        if trial.is_as_before() and report.checks:
            check = dataclasses.replace(report.checks[-1], transform=key)
        else:
            check = _check(key, module, trial, reference.exact)
        found = matched(context.history[-1])
        report.checks.append(dataclasses.replace(check, matched=found))
        report.graph_replays = getattr(module, "replays", 0)
        if on_check is not None:
            on_check(report)

    return report, observe


def _worst(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest error over prompts, NaN if any is (which Python's `max` hides behind a
    number).
    """
    errors = [rmse_ratio(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _check(key: str, module: nn.Module, trial: Trial, reference: Sequence[torch.Tensor]) -> Check:
    try:
        logits = trial.logits(module)
    except Exception as error:  # whatever a broken graph raises is the finding
        if not trial.context.ranks.is_alone:  # the others would wait for this one
            raise
        return Check(key, exception=" ".join(f"{type(error).__name__}: {error}".split()))
    return Check(key, {way: _worst(found, reference) for way, found in logits.items()})


def _tolerance(dtype: torch.dtype, reference_error: float) -> float:
    return SAME if dtype == torch.float32 else MARGIN_OF_STAGES * reference_error + FLOOR_OF_STAGES
