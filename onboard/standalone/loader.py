"""From a folder with config.json and safetensors to the model.

Every exported package has this file. `weights.json` beside it says where the checkpoint's names
differ from the parameters', as they were when the model was exported.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from onboard.errors import OnboardError
from onboard.graph.factory import default_dtype
from onboard.graph.weight_load.converted_weights import Source
from onboard.graph.weight_load.parameters import move_buffers, set_parameter, tied_names
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.hf.json_floats import json_floats
from onboard.hf.parameters_on import parameters_on
from onboard.hub import with_own_type
from onboard.modeling import first_position, is_registered, registered_config, registered_model
from onboard.sources.declared_type import with_declared_type

SOURCES = Path(__file__).with_name("weights.json")


def load(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Return the model of a checkpoint, in evaluation mode.

    `dtype` None is the checkpoint's own. The model's `forward(input_ids, position_ids)`, both
    [batch, sequence] int64, gives an output whose `logits` are [batch, sequence, vocabulary].
    Raises `OnboardError` for a checkpoint that is damaged or another model's.
    """
    config, checkpoint = read_config(Path(folder)), Checkpoint(Path(folder))
    model = build(config, dtype or checkpoint_dtype(config))
    allocate(model, torch.device(device))
    filled = fill(model, ((name, checkpoint.read(name)) for name in checkpoint.names()))
    refuse_missing(model, filled)
    return model


def positions(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions [batch, sequence] of texts that begin with `input_ids` [batch,
    sequence].
    """
    start = first_position(model.config)
    length = input_ids.shape[1]
    return torch.arange(start, start + length, device=input_ids.device).expand(input_ids.shape)


def read_config(folder: Path) -> Any:
    """Return the config of the text model in a folder."""
    read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = with_own_type(with_declared_type(read, folder))
    own = registered_config(values["model_type"])
    return text_model_config(
        own.from_dict(json_floats(values))
        if own
        else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    )


def text_model_config(config: Any) -> Any:
    """Return a config, or the part of it that the model was written for."""
    if not is_registered(type(config).__name__) and hasattr(config, "get_text_config"):
        return config.get_text_config(decoder=True)
    return config


def checkpoint_dtype(config: Any) -> torch.dtype:
    """Return the dtype that a config names, float32 if it names none."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model with parameters that have no memory yet, and buffers that have their values,
    on the CPU.
    """
    with torch.device("cpu"), parameters_on(torch.device("meta"), dtype), default_dtype(dtype):
        model = registered_model(type(config).__name__)(config)
    model.config = config
    return model.eval().requires_grad_(False)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters memory, zeros; what is tied stays so."""
    for names in tied_names(model):
        parameter = model.get_parameter(names[0])
        zeros = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)
        for name in names:
            set_parameter(model, name, zeros)
    move_buffers(model, device)


def fill(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy a checkpoint's tensors, as they come, into the parameters and saved buffers; return the
    names filled.

    Of several names of one parameter only the first one counts. Raises `OnboardError` for a tensor
    of another shape.
    """
    wanted = _wanted(model)
    readers: dict[str, list[str]] = defaultdict(list)
    for target, source in wanted.items():
        for name in source.names:
            readers[name].append(target)
    held: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    filled = set()
    for name, tensor in weights:
        for target in readers.get(name, ()):
            held[target][name] = tensor
            if held[target].keys() == set(wanted[target].names):
                parts = held.pop(target)
                _copy(
                    _tensor(model, target),
                    wanted[target].of([parts[each] for each in wanted[target].names]),
                    target,
                )
                filled.add(target)
    return filled


def refuse_missing(model: nn.Module, filled: set[str]) -> None:
    """Raise `OnboardError` when a parameter got no values; a buffer keeps those that it was made
    with.
    """
    missing = [names[0] for names in tied_names(model) if names[0] not in filled]
    if missing:
        raise OnboardError(
            f"the checkpoint has nothing for {missing[0]} ({len(missing)} parameters)"
        )


def _wanted(model: nn.Module) -> dict[str, Source]:
    """Return where each parameter and each saved buffer is in the checkpoint."""
    found: Mapping[str, Any] = (
        json.loads(SOURCES.read_text(encoding="utf-8")) if SOURCES.is_file() else {}
    )
    sources = {
        name: Source(**{**values, "names": tuple(values["names"])})
        for name, values in found.items()
    }
    saved = model.state_dict().keys()
    names = [names[0] for names in tied_names(model)] + [
        name for name, _ in model.named_buffers() if name in saved
    ]
    return {name: sources.get(name, Source((name,))) for name in names}


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), leaf)
    return tensor


def _copy(target: torch.Tensor, values: torch.Tensor, name: str) -> None:
    if target.shape != values.shape:
        found, expected = list(values.shape), list(target.shape)
        raise OnboardError(f"{name} is {found} in the checkpoint and {expected} in the model")
    with torch.no_grad():
        target.copy_(values)
