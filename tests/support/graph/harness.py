"""What the tests of the graph framework share: tiny checkpoints' configs, contexts, random weights,
errors.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.export import Dim
from transformers import AutoConfig

from onboard.config import SettledConfig
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.fx import nodes_of
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import BaseTransform, Stages, TransformConfig, TransformInfo
from tests.support import checkpoints

TINY: dict[str, Any] = {**checkpoints.TINY, "head_dim": 8, "pad_token_id": 0}


def settled_config(**fields: Any) -> SettledConfig:
    """Return a configuration of small limits, where `fields` say no others."""
    return SettledConfig(
        **{"max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 2048, **fields}
    )


def make_context(
    folder: Path, model_type: str = "llama", mode: Literal["graph", "hf"] = "graph", **config: Any
) -> TransformContext:
    """Save a tiny config in `folder` (and the canonical llama as its model file) and make a context
    on the CPU.
    """
    attention = {key: config.pop(key) for key in ("attn_implementation",) if key in config}
    AutoConfig.for_model(model_type, **{**TINY, **config}).save_pretrained(folder / "checkpoint")
    (folder / "models").mkdir(exist_ok=True)
    shutil.copyfile(checkpoints.MODEL_FILE, folder / "models" / "modeling_llama.py")
    factory = ModelFactory(
        folder / "checkpoint", root=folder, dtype=torch.float32, model_kwargs=attention, mode=mode
    )
    return TransformContext(factory, settled_config(), torch.device("cpu"), torch.float32)


def randomize(module: nn.Module, seed: int) -> None:
    """Give every parameter (wherever it lies now) random values on the CPU; ties stay."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                values = torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.3
                owner._parameters[name] = made.setdefault(
                    id(param), nn.Parameter(values, requires_grad=False)
                )


def run_only(
    context: TransformContext, keys: Iterable[str], **overrides: dict[str, Any]
) -> nn.Module:
    """Run the transforms of the default pipeline whose key is in `keys`."""
    wanted = set(keys)
    return Pipeline(
        [transform for transform in load_pipeline(overrides) if transform.key in wanted]
    ).run(context)


EXPORT = (
    "build_model",
    "export_to_gm",
    "cleanup_noop_slice",
    "cleanup_noop_add",
    "cleanup_input_constraints",
)


def export(context: TransformContext) -> fx.GraphModule:
    """Build, export and clean up the context's model."""
    gm = run_only(context, EXPORT)
    assert isinstance(gm, fx.GraphModule)
    return gm


def random_inputs(
    batch: int, sequence: int, vocabulary: int = 97
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random token ids and their positions, [batch, sequence] each."""
    return torch.randint(vocabulary, (batch, sequence)), torch.arange(sequence).expand(
        batch, sequence
    ).contiguous()


def rmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square error relative to the root mean square of `expected`."""
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float((error / expected.double().square().mean().sqrt()).detach())


class _Given(BaseTransform[TransformConfig]):
    """Starts a pipeline with a graph that is there already."""

    key = "given"

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(
            TransformConfig(stage=Stages.FACTORY, requires_clean_graph=False, run_per_gm=False)
        )
        self.gm = gm

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        return self.gm, TransformInfo(is_clean=False, has_valid_shapes=True)


@dataclass
class Transformed:
    """A module's graph after some transforms, and how often each matched."""

    gm: fx.GraphModule
    matches: dict[str, int]
    facts: list[str]

    def count(self, *targets: Any) -> int:
        """Return how many calls of `targets` are left."""
        return len(nodes_of(self.gm, *targets))


def transform(
    keys: Iterable[str],
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    **overrides: dict[str, Any],
) -> Transformed:
    """Export `module` (batch and sequence, the first two dimensions, dynamic) and run some
    transforms on the graph.
    """
    dims = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs}
    wanted = set(keys) | {"cleanup_noop_slice", "cleanup_noop_add", "cleanup_input_constraints"}
    chosen = [each for each in load_pipeline(overrides) if each.key in wanted]
    gm = export_to_graph(module.eval(), inputs, dims, torch.device("cpu"))
    context = TransformContext(None, settled_config(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    result = Pipeline([_Given(gm), *chosen]).run(context)
    assert isinstance(result, fx.GraphModule)
    return Transformed(
        result, {entry.key: entry.num_matches for entry in context.history}, context.facts
    )


def worst_error(
    result: Transformed,
    module: nn.Module,
    make_inputs: Callable[[int, int], Mapping[str, torch.Tensor]],
) -> float:
    """Return the largest rmse between graph and module over several batch and sequence sizes, all
    inputs random.
    """
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    errors = []
    for batch, sequence in ((2, 11), (1, 1), (1, 9), (4, 16)):
        inputs = make_inputs(batch, sequence)
        with torch.no_grad():
            errors.append(rmse(result.gm(*inputs.values()), module(**inputs)))
    return max(errors)
