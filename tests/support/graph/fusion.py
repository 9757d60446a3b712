"""What the tests of loading and fusion share: small modules, exported, with random weights in a
checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx, nn

from onboard.graph.canonicalise import clean_up
from onboard.graph.context import TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.shapes import propagate_shapes
from onboard.graph.transform import TransformInfo, get_transform, transform_keys
from tests.support.graph.harness import settled_config


def exported(
    model: nn.Module, *shape: int, device: str = "meta", dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """Export a module of one float input [batch, sequence, size], its first two sizes dynamic."""
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    model = copy.deepcopy(model).eval()
    memo = {
        id(p): nn.Parameter(p.detach().to(device), requires_grad=False) for p in model.parameters()
    }
    for module in model.modules():
        module._parameters.update(
            {name: memo[id(p)] for name, p in module._parameters.items() if p is not None}
        )
    return export_to_graph(
        model, {"x": torch.empty(shape, dtype=dtype)}, {"x": dynamic}, torch.device("cpu")
    )


def random_state(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return random float32 tensors for every parameter, each tied tensor once."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator) * 0.3 + 0.1
        for name, p in model.named_parameters()
    }


def context_for(
    folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **runtime: Any
) -> TransformContext:
    """Save `tensors` as a checkpoint in `folder`, and make a context on the CPU in float32 that
    loads from there.
    """
    if tensors is not None:
        save_file(dict(tensors), folder / "model.safetensors")
    config = SimpleNamespace(architectures=None, model_type="none")
    factory: Any = SimpleNamespace(
        checkpoint=folder, config=config, mode="graph", eager_modules=(), towers=()
    )
    return TransformContext(factory, settled_config(**runtime), torch.device("cpu"), torch.float32)


def apply(
    key: str, gm: nn.Module, context: TransformContext | None = None, **fields: Any
) -> tuple[Any, TransformInfo, TransformContext]:
    """Apply one transform as the runner would, clean-up and shapes included."""
    cls = get_transform(key)
    context = context or context_for(Path())
    shapes = fields.pop("shapes", True)
    if isinstance(gm, fx.GraphModule) and shapes:
        propagate_shapes(gm, torch.device("cpu"))
    new, info = cls(cls.config_class(stage=transform_keys()[key], **fields)).apply(gm, context)
    if isinstance(new, fx.GraphModule) and not info.is_clean:
        clean_up(new)
    return new, info, context


def targets(gm: fx.GraphModule) -> list[str]:
    """Return the operators that the graph calls, without the namespace of aten."""
    return [
        str(node.target).removeprefix("aten.")
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]
