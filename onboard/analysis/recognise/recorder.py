"""Watch a transformers model run: what its attention, its helper functions and its modules get and
give.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.utils import ModelOutput

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.analysis.recognise.bounds.value_guards import guarded
from onboard.analysis.recognise.scans.watch import LoopCall, loops_watched
from onboard.errors import OnboardError
from onboard.hf.old.layers.own_triangles import is_causal_alone
from onboard.ops.sparse.sparse import chosen_keys

NAME = "onboard_recorder"
_OTHERS = ("torch", "transformers", "builtins")


@dataclass
class AttentionCall:
    """One call of transformers' attention interface."""

    path: str
    """Module path of the layer's attention."""
    window: int | None
    """Sliding window that the keyword states."""
    mask_is_causal: bool
    """The mask is exactly causal, narrowed by the window or cut into the config's chunks."""
    keywords: dict[str, Any]
    """Scaling, soft cap, sinks: scalars, or "tensor"."""
    heads: int
    kv_heads: int
    beside: int = 0
    """Keys behind those of the text's tokens: what they stand for, a module that makes them
    tells.
    """


@dataclass
class FunctionCall:
    """One call of a function of the modeling file with tensors only, or truth values behind them."""

    name: str
    arguments: list[torch.Tensor]
    outputs: list[torch.Tensor]
    module: str = ""
    """The name of the module that defines it."""
    called: bool = True
    """The model calls it; False: it was tried alone."""
    flags: tuple[bool, ...] = ()
    """The truth values that it was given behind the tensors."""
    guarded: bool = False
    """It bounds or asks what tensors hold."""


@dataclass
class HelperCall:
    """One call of a function of the modeling file: its parameters by name, without what goes into
    `**kwargs`.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


@dataclass
class ModuleCall:
    """What a module got and gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    left: tuple[Any, ...] = ()
    """What lies in objects, lists and dicts that it got, since it may have put something there."""


@dataclass
class Recording:
    """What was seen in one forward pass."""

    logits: torch.Tensor
    attention: list[AttentionCall] = field(default_factory=list)
    functions: list[FunctionCall] = field(default_factory=list)
    helpers: list[HelperCall] = field(default_factory=list)
    loops: list[LoopCall] = field(default_factory=list)
    modules: dict[str, list[ModuleCall]] = field(default_factory=dict)


def record(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Recording:
    """Run `model` with canonical attention in place of its own and note all that passes by.

    Code that takes attention by a name that it knows, and no other, keeps its own.
    """
    try:
        return _recorded_run(model, inputs, NAME)
    except OnboardError:
        raise
    except Exception:  # whatever it raises for other names
        config: Any = model.config
        return _recorded_run(model, inputs, config._attn_implementation)


def _recorded_run(model: nn.Module, inputs: dict[str, torch.Tensor], known_as: str) -> Recording:
    recording = Recording(torch.empty(0))
    tokens = next((each.shape[1] for each in inputs.values() if each.dim() > 1), None)
    with ExitStack() as stack:
        stack.enter_context(_attention_recorded(model, recording, known_as))
        stack.enter_context(loops_watched(model, recording.loops, tokens))
        for name in modeling_modules(model):
            stack.enter_context(_functions_recorded(model, sys.modules[name], recording))
        stack.enter_context(modules_recorded(model, recording.modules))
        stack.enter_context(torch.no_grad())
        recording.logits = model(**inputs, use_cache=False).logits
    return recording


def modeling_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules that define a model's classes: a multimodal model's text
    model has its own.
    """
    own = (type(module).__module__ for module in model.modules())
    return list(
        dict.fromkeys([type(model).__module__, *(name for name in own if ".modeling_" in name)])
    )


def first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output."""
    if isinstance(value, torch.Tensor):
        return value
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else ()
    )
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


def _copied(output: Any) -> Any:
    """Return an output with copies of its tensors, those too that code has put into an output
    class beside its fields; an object of code's own is a tuple of what it keeps.
    """
    if not isinstance(output, ModelOutput):
        return tree_map(_copy, output)
    cls: Any = type(output)
    kept = cls.__new__(cls)  # its constructor may take no fields by position
    vars(kept).update(vars(output))
    for key, value in output.items():
        kept[key] = _copied(value)
    return kept


def keeps_fields(item: object) -> bool:
    """Whether something is an object of no class of PyTorch's or transformers', nor a tuple, a list or
    a dict; one that is among what it keeps has no end.
    """
    return _is_own(item) and not _has_itself(item)


def _is_own(item: object) -> bool:
    others = isinstance(item, torch.Tensor | nn.Module | tuple | list | dict | type)
    own = type(item).__module__.split(".")[0] not in _OTHERS
    return own and not others and hasattr(item, "__dict__")


def _has_itself(item: Any, within: tuple[object, ...] = ()) -> bool:
    """Whether something, or what it keeps, is among what that keeps."""
    if any(item is each for each in within):
        return True
    held = vars(item) if _is_own(item) else item
    parts = (
        held.values() if isinstance(held, dict) else held if isinstance(held, tuple | list) else ()
    )
    return any(_has_itself(part, (*within, item)) for part in parts)


def fields_in(item: object) -> Iterator[Any]:
    """Yield what an object keeps but texts, and of objects in it what these keep, one by one."""
    for part in vars(item).values():
        if keeps_fields(part):
            yield from fields_in(part)
        elif not isinstance(part, str):
            yield part


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return tuples, lists, dicts and objects with what they hold changed, in a copy. What code puts
    at an output beside its fields stays as it is.
    """

    def changed(item: Any) -> Any:
        if not keeps_fields(item):
            return change(item)
        made = copy(item)
        vars(made).update({key: mapped(change, part) for key, part in vars(item).items()})
        return made

    whole = tree_map(changed, value)
    if isinstance(value, ModelOutput):
        for key in vars(value).keys() - vars(whole).keys():
            setattr(whole, key, getattr(value, key))
    return whole


@contextmanager
def modules_recorded(model: nn.Module, calls: dict[str, list[ModuleCall]]) -> Iterator[None]:
    """Note the calls of every submodule; one about no text, as of an expert that no token chose,
    tells nothing.
    """
    handles = []
    for path, module in model.named_modules():

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            kept = _copied(output)  # what follows may work in place
            left = (part for item in (*args, *kwargs.values()) for part in _inside(item))
            if not (isinstance(kept, torch.Tensor) and kept.numel() == 0):
                call = ModuleCall(args, kwargs, kept, tuple(map(_copied, left)))
                calls.setdefault(path, []).append(call)

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _inside(item: Any) -> Iterator[Any]:
    """Yield what lies in objects, lists and dicts, however deep, lists and dicts themselves first."""
    kept = vars(item) if keeps_fields(item) else item
    if isinstance(item, list | dict):
        yield item
    parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else ()
    for part in parts:
        nested = isinstance(part, list | dict) or keeps_fields(part)
        yield from _inside(part) if nested else (part,)


def _copy(value: Any) -> Any:
    if keeps_fields(value):
        return tuple(map(_copied, fields_in(value)))
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextmanager
def _attention_recorded(model: nn.Module, recording: Recording, known_as: str) -> Iterator[None]:
    paths = {module: path for path, module in model.named_modules()}

    def attention(
        module: nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        window, cap, sinks = (keywords.get(item) for item in ("sliding_window", "softcap", "s_aux"))
        attention_mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
        if isinstance(by_query := keywords.get("sinks"), torch.Tensor):
            sinks = by_query.squeeze(-1).transpose(1, 2)
        settings = {
            "scaling": scaling,
            "softcap": cap,
            "s_aux": None if sinks is None else "tensor",
        }
        if (beside := _keys_beside(attention_mask, query.shape[2], window)) > 0:
            sizes = query.shape[1], key.shape[1], beside
            recording.attention.append(AttentionCall(paths[module], window, True, settings, *sizes))
            of_op = (attention_mask, 0.0, False, scaling, sinks, None, cap)
            out = torch.ops.onboard.torch_attention(
                *(item.transpose(1, 2) for item in (query, key, value)), *of_op
            )
            return out, None
        if query.shape[2] != key.shape[2]:
            raise OnboardError(
                f"{paths[module]} attends from {query.shape[2]} states to {key.shape[2]}: "
                "there is no cached form of attention among states that are not one a token"
            )
        chunk = _chunk(attention_mask, model.config)
        told = attention_mask is None and _is_told(module, keywords)
        causal = chunk is not None or told or _is_causal(attention_mask, query.shape[2], window)
        bias = keywords.get("position_bias")
        if not causal and bias is None and _hides_later_keys(attention_mask, window):
            causal, bias = True, attention_mask
        recording.attention.append(
            AttentionCall(paths[module], window, causal, settings, query.shape[1], key.shape[1])
        )
        indices = keywords.get("indices")
        chosen = bias if indices is None else chosen_keys(indices, key.shape[2])
        if chunk is not None:
            chosen = _same_chunk(query.shape[2], chunk)
        settings_of_op = (chosen, 0.0, True, scaling, sinks, window, cap, "bnsd")
        out = torch.ops.onboard.torch_attention(query, key, value, *settings_of_op)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    config: Any = model.config
    saved = config._attn_implementation
    config._attn_implementation = known_as
    try:
        yield
    finally:
        config._attn_implementation = saved


def _is_told(module: nn.Module, keywords: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal: it is said to be, or is by itself."""
    return keywords.get("is_causal") is True or is_causal_alone(module)


def _same_chunk(length: int, chunk: int) -> torch.Tensor:
    chunks = torch.arange(length) // chunk
    return chunks.unsqueeze(1) == chunks


def _chunk(mask: torch.Tensor | None, config: Any) -> int | None:
    """Return the length of the chunks that a mask cuts the text into; None for another mask."""
    chunk = getattr(config, "attention_chunk_size", None)
    if mask is None or chunk is None or chunk >= mask.shape[-1]:
        return None
    length = mask.shape[-1]
    allowed = _same_chunk(length, chunk) & torch.ones(length, length, dtype=torch.bool).tril()
    return chunk if bool(((mask == 0) == allowed).all()) else None


def _is_causal(mask: torch.Tensor | None, length: int, window: int | None) -> bool:
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    allowed = (distance >= 0) & (distance < (window or length))
    return mask is not None and bool(((mask == 0) == allowed).all())


def _keys_beside(mask: torch.Tensor | None, length: int, window: int | None) -> int:
    """Return how many keys a mask has behind those of the text's tokens, which it shows
    causally.
    """
    more = 0 if mask is None else mask.shape[-1] - length
    return (
        more
        if more > 0 and mask is not None and _is_causal(mask[..., :length], length, window)
        else 0
    )


def _hides_later_keys(mask: torch.Tensor | None, window: int | None) -> bool:
    """Whether a mask is a bias of its own that is causal: later keys have the least number, others
    what it likes; but not where it lacks the window, and has nothing else.
    """
    if mask is None or mask.dim() != 4 or not mask.is_floating_point():
        return False
    if window is not None and _is_causal(mask, mask.shape[-1], None):
        return False
    later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    return bool((mask[..., later] <= torch.finfo(mask.dtype).min / 2).all())


@contextmanager
def _functions_recorded(model: nn.Module, module: Any, recording: Recording) -> Iterator[None]:
    """Replace the functions of a file of modeling code by recording ones, where its code looks them
    up: by their names, or as what constructors chose and the model's modules have.
    """
    with ExitStack() as stack:
        for owner in (module, *model.modules()):
            for name, value in list(vars(owner).items()):
                if inspect.isfunction(value) and value.__module__ == module.__name__:
                    known = name if owner is module else value.__name__
                    recorded = _recorded(known, value, recording)
                    stack.enter_context(mock.patch.object(owner, name, recorded))
        yield


def _recorded(name: str, function: Callable[..., Any], recording: Recording) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        outputs, bounds = guarded(lambda: function(*args, **kwargs))
        recording.helpers.append(HelperCall(name, function, _bound(function, args, kwargs)))
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        flags = args[len(tensors) :]
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        if all(type(item) is bool for item in flags) and all(
            isinstance(o, torch.Tensor) for o in results
        ):
            recording.functions.append(
                FunctionCall(
                    name,
                    tensors,
                    list(results),
                    function.__module__,
                    flags=flags,
                    guarded=bounds,
                )
            )
        return outputs

    return wrapper


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    rest = [
        key
        for key, item in signature.parameters.items()
        if item.kind is inspect.Parameter.VAR_KEYWORD
    ]
    return {key: value for key, value in bound.arguments.items() if key not in rest}
