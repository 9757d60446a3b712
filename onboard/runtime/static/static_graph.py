"""A checkpoint's graph with a static cache, with its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.cache_init.static_cache import FORMS, cache_shapes
from onboard.graph.context import TransformContext
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import Stages
from onboard.runtime.build import make_context
from onboard.runtime.length_dependent_rope import length_dependent_rope
from onboard.runtime.limits import Defaults

_STAGES = (
    *(Stages.FACTORY, Stages.EXPORT, Stages.POST_EXPORT),
    *(Stages.PATTERN_MATCHER, Stages.WEIGHT_LOAD),
)
_BEFORE = "replace_counted_positions"
_HINT = "Use --cache paged"


def static_graph(
    checkpoint: Path,
    runtime: RuntimeConfig,
    form: str,
    *,
    root: Path | None = None,
    model: str | None = None,
    defaults: Defaults | None = None,
) -> tuple[fx.GraphModule, TransformContext]:
    """Return a model's graph with a static cache (`graph/cache_init/static_cache.py`), on the run's
    device, and the context that it was made in.

    `runtime` is that of a paged run, and `defaults` its limits where it says none; nothing is
    fused. Raises `OnboardError` for a model whose tokens meet by more than causal attention.
    """
    if form not in FORMS:
        raise UsageError(f"there is no static cache {form!r}", hint=f"There are {', '.join(FORMS)}")
    if runtime.mode == "transformers":
        raise UsageError("mode transformers has no graph", hint=_HINT)
    context = make_context(checkpoint, runtime, root=root, model=model, defaults=defaults)
    _refuse_special(context)
    key = f"insert_{form.replace('_', '_cache_')}"
    wanted = pipeline_for(context, {key: {"enabled": True}})
    kept = [each for each in wanted if each.config.stage in _STAGES or each.key in (_BEFORE, key)]
    gm = Pipeline(kept).run(context)
    assert isinstance(gm, fx.GraphModule)
    return gm, context


def _refuse_special(context: TransformContext) -> None:
    if context.codebooks.count > 1:
        raise OnboardError("tokens of several codebooks have no static run", hint=_HINT)
    if length_dependent_rope(context.factory.text_config.to_dict()) is not None:
        raise OnboardError(
            "the model's rotary table depends on the length of the text, so cached keys change",
            hint=_HINT,
        )


def empty_caches(gm: fx.GraphModule, length: int, device: torch.device) -> list[torch.Tensor]:
    """Return caches of zeros for one text of at most `length` tokens."""
    return [
        torch.zeros(1, heads, length, size, dtype=dtype, device=device)
        for heads, size, dtype in cache_shapes(gm)
    ]
