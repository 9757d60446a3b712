"""What the tests of the graph framework share: tiny checkpoints' configs, contexts, random weights, errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from transformers import AutoConfig

from onboard.config import RuntimeConfig
from onboard.graph.context import TransformContext
from onboard.graph.factory import ModelFactory
from onboard.graph.pipeline import Pipeline, load_pipeline

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_context(
    folder: Path, model_type: str = "llama", mode: Literal["generated", "hf"] = "generated", **config: Any
) -> TransformContext:
    """Save a tiny config in `folder` (and the canonical llama as its model file) and make a context on the CPU."""
    attention = {key: config.pop(key) for key in ("attn_implementation",) if key in config}
    AutoConfig.for_model(model_type, **{**TINY, **config}).save_pretrained(folder / "checkpoint")
    (folder / "models").mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("canonical_llama.py"), folder / "models" / "modeling_llama.py")
    factory = ModelFactory(folder / "checkpoint", root=folder, dtype=torch.float32, model_kwargs=attention, mode=mode)
    return TransformContext(factory, RuntimeConfig(), torch.device("cpu"), torch.float32)


def randomize(module: nn.Module, seed: int) -> None:
    """Give every parameter (wherever it lies now) random values on the CPU; ties stay."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                values = torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.3
                owner._parameters[name] = made.setdefault(id(param), nn.Parameter(values, requires_grad=False))


def run_only(context: TransformContext, keys: Iterable[str], **overrides: dict[str, Any]) -> nn.Module:
    """Run the transforms of the default pipeline whose key is in `keys`."""
    wanted = set(keys)
    return Pipeline([transform for transform in load_pipeline(overrides) if transform.key in wanted]).run(context)


EXPORT = ("build_model", "export_to_gm", "cleanup_noop_slice", "cleanup_noop_add", "cleanup_input_constraints")


def export(context: TransformContext) -> fx.GraphModule:
    """Build, export and clean up the context's model."""
    gm = run_only(context, EXPORT)
    assert isinstance(gm, fx.GraphModule)
    return gm


def random_inputs(batch: int, sequence: int, vocabulary: int = 97) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random token ids and their positions, [batch, sequence] each."""
    return torch.randint(vocabulary, (batch, sequence)), torch.arange(sequence).expand(batch, sequence).contiguous()


def rmse(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square error relative to the root mean square of `expected`."""
    error = (actual.double() - expected.double()).square().mean().sqrt()
    return float(error / expected.double().square().mean().sqrt())
