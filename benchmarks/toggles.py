"""Decode steps of a whole model with single transforms on (or off), beside those without, and how
often each matched.

    python benchmarks/toggles.py config.json [--on multi_stream_mla_attn ...] [--off fuse_gdn_gating
                                 ...] [--batch 1 64] [--context 1024] [--steps 64] [--rounds 3]
                                 [--device cuda]

Weights are random, at the config's true shapes. Each engine is built alone, first and last the one
that no transform was changed in: what these two differ by is the measurement's own scatter. A
figure is the least of all rounds' median step, in milliseconds; a transform that matched nothing
has changed nothing, whatever its times say.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.bench.subject import Subject, open_subject
from onboard.bench.whole_measurement import fitted_runtime, vocabulary_of
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine


@dataclass(frozen=True)
class Variant:
    """What is changed of a model's pipeline."""

    key: str = ""
    """A transform; "" for none."""
    enabled: bool = True

    @property
    def transforms(self) -> dict[str, dict[str, Any]]:
        """What it is to the configuration."""
        return {self.key: {"enabled": self.enabled}} if self.key else {}

    def __str__(self) -> str:
        return f"{self.key} {'on' if self.enabled else 'off'}" if self.key else "as it is"


def matches(engine: Engine, key: str) -> int:
    """Return how often a transform matched when an engine was built."""
    return sum(entry.num_matches for entry in engine.history if entry.key == key and entry.enabled)


def step_times(
    engine: Engine, subject: Subject, shapes: list[Shape], rounds: int
) -> Iterator[float]:
    """Yield the milliseconds of a decode step of each shape."""
    for shape in shapes:
        prompts = shape.prompts(vocabulary_of(subject), seed=1)
        run_batch(engine, prompts, 3)
        runs = [run_batch(engine, prompts, shape.output) for _ in range(rounds)]
        yield 1e3 * min(statistics.median(run.decode_steps) for run in runs)


def measure(
    subject: Subject, variant: Variant, shapes: list[Shape], rounds: int, watched: list[str]
) -> str:
    """Build an engine, time it and give it back; return its row."""
    runtime = fitted_runtime(subject, shapes, torch.device(subject.runtime.device))
    runtime = runtime.model_copy(
        update={"transforms": {**runtime.transforms, **variant.transforms}}
    )
    engine = build_engine(subject.folder, runtime, root=subject.root, model=subject.name)
    counts = [str(matches(engine, key)) for key in watched]
    times = [f"{time:.3f}" for time in step_times(engine, subject, shapes, rounds)]
    return f"| {' | '.join([str(variant), *counts, *times])} |"


def rows(
    config: str,
    variants: list[Variant],
    shapes: list[Shape],
    rounds: int,
    overrides: Mapping[str, Any],
) -> None:
    """Print the table, a row when it is there."""
    watched = list(dict.fromkeys(variant.key for variant in variants))
    columns = ["variant", *(f"matches of {key}" for key in watched)]
    columns += [f"ms, batch {shape.batch}, context {shape.context}" for shape in shapes]
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
    for variant in [Variant(), *variants, Variant()]:
        with open_subject(
            config, Path(), config=None, overrides=overrides, random_weights=True
        ) as subject:
            print(measure(subject, variant, shapes, rounds, watched), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config.json of a model that was onboarded")
    parser.add_argument(
        "--on", nargs="+", default=["multi_stream_mla_attn", "multi_stream_moe"], metavar="KEY"
    )
    parser.add_argument("--off", nargs="+", default=[], metavar="KEY")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    for name, default in {"context": 1024, "steps": 64, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    variants = [*(Variant(key) for key in args.on), *(Variant(key, False) for key in args.off)]
    shapes = [Shape(batch, args.context, args.steps) for batch in args.batch]
    print(torch.cuda.get_device_name() if args.device == "cuda" else args.device)
    rows(args.config, variants, shapes, args.rounds, {"device": args.device, "dtype": args.dtype})


if __name__ == "__main__":
    main()
