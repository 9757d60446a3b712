"""The logits of a repository's own class on a checkpoint's weights: in the child process that may run
it, which has the weights as open files.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from pydantic import BaseModel

from onboard.analysis.tiny.loaded_config import load_config
from onboard.errors import OnboardError
from onboard.graph.factory import overridden
from onboard.hf.hf_model import build_reference
from onboard.verify.hf_logits import Asked
from onboard.verify.quantised_inputs import LayerInputs, quantise_linears
from onboard.verify.rounding.in_float64 import InFloat64


class Stored(BaseModel):
    """Where a tensor's bytes are."""

    file: int
    """The number of the open file."""
    offset: int
    shape: list[int]
    dtype: str
    """As torch calls it."""


class Order(BaseModel):
    """What is wanted of a model: its logits of these rows, in float32 and in the run's dtype."""

    asked: list[tuple[list[int], list[int]]]
    """Token ids of each text, and the rows of its logits."""
    stored: dict[str, Stored]
    dtype: str
    """In which the run has the weights, as torch calls it."""
    in_float64: bool = False
    """The rows in float64 and no others, of a run in float32."""
    overrides: dict[str, int]
    """Fields of the config, as those of a run with fewer layers."""
    inputs: dict[str, LayerInputs] = {}
    """How the run quantises what linear layers are given, by the name of their weight."""


@torch.inference_mode()
def write_logits(config: Mapping[str, Any], order: Order, output: BinaryIO) -> int:
    """Write the rows of all texts to a file, float32: those in the run's dtype, if that is another
    one, then those in float32 with the weights as the run's dtype rounds them; or those in float64
    as float64. Return how long a row is.
    """
    read, dtype = StoredWeights(order.stored), getattr(torch, order.dtype)
    rounded: dict[str, torch.dtype] = {}
    if dtype != torch.float32:
        model = _loaded(config, order.overrides, read, dtype, rounded)
        rounded = {name: weight.dtype for name, weight in model.named_parameters()}
        quantise_linears(model, order.inputs)
        _write(model, order, output)
        del model
    if order.in_float64:
        exact = InFloat64(_loaded(config, order.overrides, read, torch.float64, rounded))
        return _write(exact, order, output)
    return _write(_loaded(config, order.overrides, read, torch.float32, rounded), order, output)


class StoredWeights:
    """Tensors of a checkpoint, mapped from open files."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._maps: dict[int, mmap.mmap] = {}

    def names(self) -> set[str]:
        """Return the names of the tensors."""
        return set(self._stored)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored, not to be written to."""
        place = self._stored[name]
        dtype = getattr(torch, place.dtype)
        count = math.prod(place.shape)
        if count == 0:
            return torch.empty(place.shape, dtype=dtype)
        if place.file not in self._maps:
            self._maps[place.file] = mmap.mmap(place.file, 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nobody may write there, which nobody does
            mapped = self._maps[place.file]
            flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=place.offset)
        return flat.view(place.shape)


def _loaded(
    config: Mapping[str, Any],
    overrides: Mapping[str, int],
    weights: StoredWeights,
    dtype: torch.dtype,
    rounded: Mapping[str, torch.dtype],
) -> Any:
    """Return the model with its weights, rounded to these dtypes before; in float64 as a run in
    float32 has them.
    """
    run_dtype = torch.float32 if dtype == torch.float64 else dtype
    made = overridden(load_config(config), overrides)
    model = build_reference(made, attn_implementation="eager", dtype=dtype).eval()
    state, found = model.state_dict(), weights.names()
    filled = set()
    for name in sorted(state.keys() & found):
        tensor = weights.read(name).to(rounded.get(name, run_dtype))
        state[name].copy_(tensor)
        filled.add(state[name].data_ptr())
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.data_ptr() not in filled:
            raise OnboardError(
                f"the repository's {type(model).__name__} has {name}, which is not in the checkpoint"
            )
    return model


def _write(model: Any, order: Order, output: BinaryIO) -> int:
    size = 0
    for rows in _rows(model, [Asked(ids, rows) for ids, rows in order.asked]):
        size = rows.shape[-1]
        output.write(rows.contiguous().numpy().tobytes())
    output.flush()
    return size


def _rows(model: Any, asked: Sequence[Asked]) -> Iterator[torch.Tensor]:
    for each in asked:
        ids = torch.tensor([each.ids])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        yield logits[0, each.rows].to(torch.promote_types(logits.dtype, torch.float32))
