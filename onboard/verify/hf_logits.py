"""transformers' own logits on a checkpoint's weights: what a run is measured against."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from onboard.errors import OnboardError
from onboard.gpu import system_memory
from onboard.graph.context import TransformContext
from onboard.graph.factory import default_dtype
from onboard.graph.weight_load.computed_tables import saved_tables, take_computed
from onboard.graph.weight_load.quantised_folder import decoded_state, open_checkpoint
from onboard.hf.architecture import is_own
from onboard.hf.hf_model import load_reference
from onboard.verify.quantised_inputs import quantise_inputs, round_caches
from onboard.verify.rounding.in_float64 import InFloat64

_MEMORY_SHARE = 0.8
"""Of the free memory: the rest is for activations."""


@dataclass(frozen=True)
class Asked:
    """A sequence of tokens, the rows of its logits that are wanted, and what a processor made
    beside the tokens.
    """

    ids: list[int]
    rows: list[int]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def whole(cls, ids: Sequence[int]) -> Asked:
        """Ask for all rows."""
        return cls(list(ids), list(range(len(ids))))


@dataclass(frozen=True)
class Reference:
    """Logits of transformers' model, [rows, vocabulary] float32 on the CPU for each sequence."""

    exact: list[torch.Tensor]
    """In float32, with the weights as the run's dtype rounds them."""
    own: list[torch.Tensor] | None
    """In the run's dtype, with inputs quantised where the run quantises them, and keys and values
    rounded where it caches them so; None when that is float32.
    """
    how: str
    whose: str = "transformers"
    in_float64: Callable[[], list[torch.Tensor]] | None = None
    """Computes the rows anew, in float64, for a run in float32; raises `OnboardError` where that
    cannot be.
    """


References = Callable[[TransformContext, Sequence[Asked]], Reference]
"""Computes the logits that a run is compared with."""


def reference_logits(context: TransformContext, asked: Sequence[Asked]) -> Reference:
    """Run transformers' model of a run's checkpoint on each sequence by itself, without cache.

    Raises:
        OnboardError: transformers cannot load the checkpoint, or finds weights missing.
    """
    run, how = _way(context, torch.float32)
    own, dtypes = None, None
    if context.dtype != torch.float32:
        own, dtypes = run(context, asked, context.dtype, None)
        release()
    exact, dtypes = run(context, asked, torch.float32, dtypes)
    release()
    return Reference(exact, own, how, in_float64=partial(_in_float64, context, asked, dtypes))


def _in_float64(
    context: TransformContext, asked: Sequence[Asked], rounded: Dtypes
) -> list[torch.Tensor]:
    """Return the logits in float64 of weights that are `rounded` before, [rows, vocabulary] of
    each sequence.
    """
    run, _ = _way(context, torch.float64)
    try:
        return run(context, asked, torch.float64, rounded)[0]
    except OnboardError:
        raise
    except Exception as error:  # whatever a model's code raises in a dtype that it is not made for
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise OnboardError(f"transformers' model does not run in float64: {reason}") from error
    finally:
        release()


def why_no_reference(context: TransformContext) -> str:
    """Return why transformers has no logits for a run; empty when it has."""
    if context.runtime.skip_loading_weights:
        return "the run's weights are random, not the checkpoint's"
    return ""


def has_own_code(context: TransformContext) -> bool:
    """Whether a run's model is of a class that transformers has not."""
    return is_own(context.factory.config)


def fits(context: TransformContext, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the checkpoint's weights fit in a dtype into the memory that the device has free."""
    sizes = open_checkpoint(context.factory.checkpoint).names().values()
    needed = dtype.itemsize * sum(math.prod(meta.shape) for meta in sizes)
    if context.device.type == "cuda":
        return needed < _MEMORY_SHARE * torch.cuda.mem_get_info(context.device)[0]
    return needed < _MEMORY_SHARE * system_memory().free


Dtypes = dict[str, torch.dtype]
"""Of a model's parameters, by name: some models keep a few in float32."""
_Rows = tuple[list[torch.Tensor], Dtypes]


def _way(context: TransformContext, dtype: torch.dtype) -> tuple[Callable[..., _Rows], str]:
    """Return what runs the model in this dtype, and how."""
    return (_run, "whole") if fits(context, dtype) else (_run_layer_by_layer, "layer by layer")


@torch.inference_mode()
def _run(
    context: TransformContext, asked: Sequence[Asked], dtype: torch.dtype, rounded: Dtypes | None
) -> _Rows:
    """Return the logits of the model in a dtype, with its weights `rounded` before, and the
    weights' dtypes.
    """
    model: Any = load_model(context, dtype)
    if rounded is None and dtype != torch.float32:
        quantise_inputs(model, context)
        round_caches(model, context)
    if rounded is not None:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(rounded[name]).to(parameter.dtype)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if dtype == torch.float64:
        model = InFloat64(model)
    return model_logits(model, asked), dtypes


@torch.inference_mode()
def _run_layer_by_layer(
    context: TransformContext, asked: Sequence[Asked], dtype: torch.dtype, rounded: Dtypes | None
) -> _Rows:
    """Do what `_run` does, with the weights of one layer at a time."""
    from onboard.verify.layerwise import LayerByLayer

    def rounding(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if rounded is None else tensor.to(rounded[name]).to(tensor.dtype)

    factory = copy.copy(context.factory)
    factory.dtype = dtype
    model = factory.multimodal_model()
    dtypes = {
        name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    if rounded is None and dtype != torch.float32:
        quantise_inputs(model, context)
        round_caches(model, context)
    parts = LayerByLayer(model, open_checkpoint(factory.checkpoint), context.device, rounding)
    _as_computed(model, context)
    if dtype != torch.float64:
        calls = [partial(_rows, asked=each, device=context.device) for each in asked]
        with _exact_products():
            return parts.run(calls), dtypes
    exact = InFloat64(model)
    calls = [partial(_rows_of, exact, asked=each, device=context.device) for each in asked]
    # Around all threads, too: the default is the whole process's
    with default_dtype(torch.float64):
        return parts.run(calls), dtypes


def release() -> None:
    """Give back the memory of models that nothing refers to: transformers' hold reference
    cycles.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_model(context: TransformContext, dtype: torch.dtype) -> Any:
    """Return transformers' model with the checkpoint's weights, decoded where they are quantised, on
    the run's device.

    Raises:
        OnboardError: transformers cannot load the checkpoint, or finds weights missing.
    """
    config, folder = copy.deepcopy(context.factory.config), context.factory.checkpoint
    try:
        model, report = load_reference(
            config,
            folder,
            state=decoded_state(folder),
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OnboardError(
            f"transformers cannot load {folder}: {reason}", hint="Fetch the checkpoint again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise OnboardError(
            f"transformers finds no {missing[0]} in {folder}", hint="Fetch the checkpoint again"
        )
    _as_computed(model, context)
    return model.to(context.device).eval()


def _as_computed(model: nn.Module, context: TransformContext) -> None:
    """Give transformers' model the tables that its constructor computes where the checkpoint has their
    roundings, as the run of the generated model has them; roundings of what is there are evidence
    that both compute the same.
    """
    if context.factory.mode == "graph":
        take_computed(saved_tables(model), lambda: context.factory.computed_tables)


def model_logits(model: nn.Module, asked: Sequence[Asked]) -> list[torch.Tensor]:
    """Return the wanted rows of each sequence's logits, [rows, vocabulary] on the CPU: float32, of
    a model in float64 float64.
    """
    with _exact_products():
        return [_rows(model, each, next(model.parameters()).device) for each in asked]


def _rows(model: Any, asked: Asked, device: torch.device) -> torch.Tensor:
    ids, dtype = torch.tensor([asked.ids], device=device), next(model.parameters()).dtype
    inputs = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in asked.inputs.items()
    }
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return logits[0, asked.rows].to(torch.promote_types(logits.dtype, torch.float32)).cpu()


def _rows_of(model: Any, _: Any, asked: Asked, device: torch.device) -> torch.Tensor:
    return _rows(model, asked, device)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute products of float32 in float32, which convolutions on a GPU otherwise do not."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in settings]
    try:
        for each in settings:
            each.allow_tf32 = False
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.allow_tf32 = value
