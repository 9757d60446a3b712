"""Is the graph still the model? Compare its logits with transformers' own after every transform."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from onboard.config import Mode, with_settings
from onboard.errors import UsageError
from onboard.graph.context import TransformContext
from onboard.graph.pipeline import Observer
from onboard.graph.transform import BaseTransform
from onboard.runtime.ranks.leading import LedRanks, led_ranks
from onboard.runtime.resolve import ConfigLike, find_checkpoint, resolve_config
from onboard.verify.hf_logits import References, reference_logits
from onboard.verify.seeds import fresh_seed
from onboard.verify.tolerances import SAME
from onboard.verify.transforms.stage_limits import Limit, Limits, usual_error, worst_error
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
    usual: dict[str, float] = field(default_factory=dict)
    """Likewise the error of the median row."""
    limit: Limit = field(default_factory=lambda: Limit(SAME))
    matched: bool = True
    """The transform found something to do in this model."""

    @property
    def passes(self) -> bool:
        """Whether everything ran and stayed within the limit; NaN does not."""
        within = all(error <= self.limit.error for error in self.errors.values())
        if self.limit.usual is not None:
            within &= all(error <= self.limit.usual for error in self.usual.values())
        return self.exception is None and within


@dataclass
class VerifyReport:
    """What `verify_model` found."""

    model: str
    device: str
    dtype: str
    seed: int
    prompt_lengths: list[int]
    limit: Limit
    """The last transform's."""
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
        return next((check for check in self.checks if not check.passes), None)

    @property
    def passed(self) -> bool:
        """Whether the graph was the model after every transform."""
        return self.first_failure is None

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        failure, found = self.first_failure, dataclasses.asdict(self)
        del found["limit"]
        return {
            **found,
            "tolerance": self.limit.error,
            "reference_error": self.limit.reference_error,
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
    if runtime.quantize != "none":
        raise UsageError(
            "quantize changes the weights, and verify compares with those of the checkpoint",
            hint="Leave it out; onboard kld tells by how much it changes the model",
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
    limits = Limits(context, trial.prompts, seed, references)
    report = VerifyReport(
        model=model,
        device=str(context.device),
        dtype=str(context.dtype).removeprefix("torch."),
        seed=seed,
        prompt_lengths=[len(prompt) for prompt in trial.prompts],
        limit=limits.limit,
        beside=limits.beside,
        world_size=context.ranks.world_size,
        facts=context.facts,
    )

    def observe(key: str, module: nn.Module, _: TransformContext) -> None:
        if trial.is_as_before() and report.checks:
            check = dataclasses.replace(report.checks[-1], transform=key)
        else:
            report.limit = limits.now()
            check = _check(key, module, trial, limits)
        found = matched(context.history[-1])
        report.checks.append(dataclasses.replace(check, matched=found))
        report.graph_replays = getattr(module, "replays", 0)
        if on_check is not None:
            on_check(report)

    return report, observe


def _check(key: str, module: nn.Module, trial: Trial, limits: Limits) -> Check:
    try:
        logits = trial.logits(module)
    except Exception as error:  # whatever a broken graph raises is the finding
        if not trial.context.ranks.is_alone:  # the others would wait for this one
            raise
        return Check(key, exception=" ".join(f"{type(error).__name__}: {error}".split()))
    errors = {way: worst_error(found, limits.exact) for way, found in logits.items()}
    usual = {way: usual_error(found, limits.exact) for way, found in logits.items()}
    return Check(key, errors, usual=usual, limit=limits.limit)
