"""Checkpoints of the zoo's families in small, with random weights; and graphs of one rank, without a
group.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx

from onboard.config import RuntimeConfig
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import Stages
from onboard.parallel.ranks import Ranks
from onboard.runtime.build import make_context
from onboard.testing.models import hf_causal_lm
from onboard.testing.suite import EquivalenceSuite

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = sorted(
    path.stem.removeprefix("modeling_") for path in (ROOT / "models").glob("modeling_*.py")
)


def suite_of(family: str) -> type[EquivalenceSuite]:
    """Return the generated tests of a family, which have its config in small."""
    module = importlib.import_module(f"tests.equivalence.test_{family}_modeling")
    return next(value for name, value in vars(module).items() if name.startswith("Test"))


def save_family(folder: Path, family: str, seed: int, **changed: Any) -> Path:
    """Save transformers' model of a family with random weights; return the checkpoint's folder."""
    suite = suite_of(family)
    config = copy.deepcopy(suite.config)
    for name, value in changed.items():
        setattr(config, name, value)
    checkpoint = folder / family
    hf_causal_lm(suite.reference, config, seed).save_pretrained(checkpoint)  # type: ignore[operator]
    return checkpoint


def divided(
    checkpoint: Path, ranks: Ranks, settings: Mapping[str, Any] | None = None, **runtime: Any
) -> tuple[fx.GraphModule, TransformContext]:
    """Return a rank's graph as it is before its weights are loaded; nobody else has to be there."""
    config = RuntimeConfig(device="cpu", dtype="float32", **runtime)
    context = make_context(checkpoint, config, root=ROOT)
    context.ranks = ranks
    stages = list(Stages)[: list(Stages).index(Stages.SHARDING) + 1]
    transforms = [each for each in load_pipeline(settings or {}) if each.config.stage in stages]
    gm = Pipeline(transforms).run(context)
    assert isinstance(gm, fx.GraphModule)
    return gm, context
