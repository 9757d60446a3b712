"""The two models of an equivalence test: Hugging Face's and the generated one, with the same random
weights.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from onboard.analysis.tiny.random_weights import fill_integers, is_table
from onboard.errors import OnboardError
from onboard.graph.factory import default_dtype
from onboard.hf.architecture import is_own
from onboard.hf.codebooks import with_tokens
from onboard.hf.expert_weights import separate_experts
from onboard.hf.hf_model import from_config, without_missing_towers
from onboard.modeling import load_model_file, registered_model

_LARGEST_MEAN = 100.0
_MADE_FROM = re.compile(r"from transformers (\S+),$", re.MULTILINE)
"""Where a generated file says which version it comes from."""


def hf_causal_lm(
    model_class: Any, config: Any, seed: int, device: str = "cpu", dtype: str = "float32"
) -> nn.Module:
    """Return Hugging Face's model with eager attention and random weights everywhere."""
    with without_missing_towers(), _unset_is_nan():
        model: nn.Module = from_config(
            model_class,
            # Constructors of repositories' code may change theirs
            copy.deepcopy(config),
            attn_implementation="eager",
            dtype=getattr(torch, dtype),
        )
    randomize_(model, seed)
    return with_tokens(model).to(device).eval()  # type: ignore[no-any-return]


@contextmanager
def _unset_is_nan() -> Iterator[None]:
    """Fill what `torch.empty` makes with NaN, in place of what was in memory: of a small model that
    is some other tensor's numbers, say, which look like a choice.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def generated_causal_lm(
    model_file: Path, config: Any, device: str = "cpu", dtype: str = "float32"
) -> nn.Module:
    """Return the model of a generated model file for `config`; its parameters have `dtype`.

    Raises:
        OnboardError: the file reads a field that this version of transformers does not know, so
            does not heed.
    """
    _check_fields(model_file, config)
    load_model_file(model_file)
    # Not .to(dtype): that would round the float32 tables of RoPE too
    with default_dtype(getattr(torch, dtype)):
        model = registered_model(type(config).__name__)(config)
    return model.to(device).eval()


def _check_fields(model_file: Path, config: Any) -> None:
    """Refuse a config with fields that the file reads and that this transformers, another than the
    file's, ignores.
    """
    text, cls = model_file.read_text(encoding="utf-8"), type(config)
    made_from = _MADE_FROM.search(text)
    if (
        made_from is None
        or made_from[1] == transformers.__version__
        or not dataclasses.is_dataclass(cls)
    ):
        return
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if ast.unparse(node.value) in ("config", "self.config")}
    if unknown := sorted(
        field for field in read & vars(config).keys() if not hasattr(cls(), field)
    ):
        raise OnboardError(
            f"{model_file.name} reads {cls.__name__}.{', '.join(unknown)}, of which transformers"
            f" {transformers.__version__} knows nothing",
            hint=f"Use transformers {made_from[1]}, from which the file was generated",
        )


@torch.no_grad()
def randomize_(module: nn.Module, seed: int) -> None:
    """Fill every parameter and persistent buffer of `module` with random values that keep
    activations near one.

    Matrices are normal with variance 2 / (rows + columns) (Glorot and Bengio 2010). Vectors (norm
    weights, biases, sinks) scatter around the value that they were initialised to, because ones and
    zeros hide mistakes. Tables that the model works out for itself stay: with other numbers, which
    do not go together, it would be another model. Other tables of integers get zeros and ones.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in _distinct_tensors(module):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() >= 2:
            tensor.copy_(noise * (2 / (tensor.shape[-1] + tensor.shape[-2])) ** 0.5)
        else:
            tensor.copy_(_center(tensor) + 0.2 * noise)
    fill_integers(module, generator)


def _center(vector: torch.Tensor) -> float:
    """Return the mean of what a vector was initialised to; 1 where it was not."""
    mean = float(vector.float().mean())
    return mean if abs(mean) <= _LARGEST_MEAN else 1.0


def _distinct_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The floating-point tensors of the state dict, a tied one once, without computed tables."""
    tables = {name for name, buffer in module.named_buffers() if is_table(buffer)}
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in tables}
    floating = [tensor for tensor in state.values() if tensor.is_floating_point()]
    return list({tensor.data_ptr(): tensor for tensor in floating}.values())


def save_weights(model: Any, folder: Path, eager: Sequence[str] = ()) -> None:
    """Save a model of Hugging Face, without parts that text does not run where they are a repository's
    own: nothing here runs those, and code may make them as large as they are.
    """
    prefixes = tuple(f"{path}." for path in eager if is_own(model.config))
    kept = {k: v for k, v in model.state_dict().items() if not k.startswith(prefixes)}
    model.save_pretrained(folder, state_dict=kept if prefixes else None)


def copy_weights(source: nn.Module, target: nn.Module, eager: Sequence[str] = ()) -> None:
    """Load the weights of transformers' `source` into `target`, experts one by one where
    checkpoints have them so.

    A name or shape that only one of them has is an error, unless it lies in one of the modules
    `eager` of `source`, which the generated model leaves out.
    """
    prefixes = tuple(f"{path}." for path in eager)
    expected, found = separate_experts(source), target.state_dict()
    expected = {
        name: tensor for name, tensor in expected.items() if not f"{name}.".startswith(prefixes)
    }
    assert expected.keys() == found.keys(), (
        f"parameter names differ: missing {sorted(expected.keys() - found.keys())},"
        f" unexpected {sorted(found.keys() - expected.keys())}"
    )
    target.load_state_dict(expected, strict=True)
