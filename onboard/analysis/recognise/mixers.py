"""Recognise what recurrent mixers and latent attention are made of, by comparing outputs with
canonical ops.

transformers writes the convolution and the scans of its mixers as helper functions with the
arguments of the kernels that can replace them. A helper whose arguments fit a `CallForm` is called
again, with other settings, too; it is that op when the form's expression, which is also what
generated code will say, gives the same.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.scales import linear_variants
from onboard.analysis.recognise.bounds.value_guards import guarded
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import HelperCall
from onboard.ops.library import op_sources
from onboard.ops.written_forms import CallForm
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME


def call_forms() -> dict[str, tuple[CallForm, ...]]:
    """Return the ways in which the helper functions are called that compute an op, by op."""
    found = {op: source.called_as for op, source in op_sources().items()}
    return {
        op: form if isinstance(form, tuple) else (form,) for op, form in found.items() if form != ()
    }


def probe_scan(call: HelperCall) -> Finding | None:
    """Recognise a helper function that is one of `call_forms`."""
    ways = ((op, way, form) for op, all in call_forms().items() for way, form in enumerate(all))
    for op, way, form in ways:
        if not form.parameters <= call.arguments.keys() or not _is_plain(form, call.arguments):
            continue
        empty = {
            key: torch.zeros_like(call.arguments[key])
            for key in form.empty
            if isinstance(call.arguments.get(key), torch.Tensor)
        }
        errors = [
            scan_error(form, call.function, {**call.arguments, **empty, **other})
            for other in ({}, *form.settings)
        ]
        errors += wide_errors(form, call.function, call.arguments | empty, errors)
        if all(error < SAME for error in errors):
            evidence = [f"probe: {op} fits with rmse ratio {worst(errors):.1e}"]
            return Finding("scan", {"op": op} | ({"way": way} if way else {}), evidence)
    return None


def _is_plain(form: CallForm, arguments: dict[str, Any]) -> bool:
    rest = arguments.keys() - form.parameters - form.fixed.keys() - form.ignored - form.empty
    return all(arguments.get(key) == value for key, value in form.fixed.items()) and all(
        arguments[key] is None for key in rest
    )


def scan_error(
    form: CallForm,
    helper: Callable[..., Any],
    arguments: dict[str, Any],
    ignored: Collection[str] = (),
) -> float:
    """Return how far a helper, which has no arguments `ignored`, is from what a form says."""
    turned = {
        key: _turn(value) if key in form.turned else value for key, value in arguments.items()
    }
    try:
        output = helper(**{key: value for key, value in arguments.items() if key not in ignored})
        actual = eval(form.expression, {"torch": torch}, turned)
    except REFUSED:
        return float("inf")  # another function with these parameters
    expected = output[0] if form.with_state else output
    actual = actual.transpose(1, 2) if form.turned else actual
    same = isinstance(expected, torch.Tensor) and actual.shape == expected.shape
    return rmse_ratio(actual, expected) if same else float("inf")


def wide_errors(
    form: CallForm,
    helper: Callable[..., Any],
    arguments: dict[str, Any],
    errors: Sequence[float],
    ignored: Collection[str] = (),
) -> list[float]:
    """Return how far a helper is from a form, which it fits by its `errors` so far, for far larger
    values: where it bounds them it is none.
    """
    if not all(error < SAME for error in errors):
        return []

    def compute(given: Mapping[str, Any]) -> Any:
        turned = {key: _turn(item) if key in form.turned else item for key, item in given.items()}
        return eval(form.expression, {"torch": torch}, turned)

    wide = linear_variants(compute, arguments)
    return [scan_error(form, helper, each, ignored) for each in wide]


def _turn(value: Any) -> Any:
    return value.transpose(1, 2) if isinstance(value, torch.Tensor) else value


def probe_gated_norm(module: nn.Module) -> Finding | None:
    """Recognise an RMSNorm with a SiLU gate, `module(x, gate)`, and the attributes that are its
    epsilon and groups.
    """
    names = [name for name, _ in module.named_parameters()]
    weight: Any = getattr(module, "weight", None)
    if names != ["weight"] or list(module.children()) or weight.dim() != 1:
        return None
    for eps in [key for key, value in vars(module).items() if type(value) is float]:
        for group_size in _group_sizes(module):
            for before in (
                "False",
                "True",
                *(f"self.{key}" for key, v in vars(module).items() if type(v) is bool),
            ):
                errors = [
                    _gated_error(item, eps, group_size, before)
                    for item in _variants(module, eps, group_size, before)
                ]
                if worst(errors) < SAME:
                    parameters = {"eps": eps, "group_size": group_size, "norm_before_gate": before}
                    evidence = (
                        f"probe: torch_rmsnorm_gated fits with rmse ratio {worst(errors):.1e}"
                    )
                    return Finding("gated_rmsnorm", parameters, [evidence])
    return None


def _group_sizes(module: nn.Module) -> Iterator[str]:
    """Yield expressions for the channels that are normalised together; a module's own attributes go
    first.
    """
    for key, value in vars(module).items():
        if type(value) is int and not key.startswith("_"):
            yield f"self.{key}"
            yield f"self.weight.shape[0] // self.{key}"
    yield "self.weight.shape[0]"


def _variants(module: nn.Module, eps: str, group_size: str, before: str) -> Iterator[nn.Module]:
    """Yield copies with a coarse epsilon and each with one of the attributes in question
    changed.
    """
    weight: Any = module.weight
    changes: list[dict[str, Any]] = [{}, {eps: 0.37}]
    nodes = [node for node in ast.walk(ast.parse(group_size)) if isinstance(node, ast.Attribute)]
    attributes = [node.attr for node in nodes if type(getattr(module, node.attr, None)) is int]
    changes += [{key: size} for key in attributes for size in (2, weight.shape[0] // 2)]
    changes += [
        {before.removeprefix("self."): value}
        for value in (True, False)
        if before.startswith("self.")
    ]
    for change in changes:
        variant = copy.deepcopy(module)
        for key, value in change.items():
            setattr(variant, key, value)
        yield variant


def _gated_error(module: nn.Module, eps: str, group_size: str, before: str) -> float:
    weight: Any = module.weight
    x, gate = torch.randn(2, 2, 3, weight.shape[0], generator=torch.Generator().manual_seed(13))
    try:
        expected, bounded = guarded(lambda: module(x, gate))
        size, first = (eval(item, {"self": module}) for item in (group_size, before))
        actual = torch.ops.onboard.torch_rmsnorm_gated(
            x, weight, gate, getattr(module, eps), size, first
        )
    except REFUSED:
        return float("inf")
    same = isinstance(expected, torch.Tensor) and expected.shape == actual.shape
    return rmse_ratio(actual, expected) if same and not bounded else float("inf")


def probe_latent_attention(module: nn.Module) -> dict[str, str]:
    """Recognise a method of an attention module that expands latents into keys and values.

    Returns:
        {"expand": method, "kv_b_proj": linear layer}, empty when there is none. The method makes of
        latents and kpe, [batch, 1, sequence, rank or rope_dim], the keys [W_k latent, kpe] and the
        values W_v latent, bnsd.
    """
    methods = [
        key
        for key, value in vars(type(module)).items()
        if callable(value) and key not in ("forward", "__init__")
    ]
    linears = [
        (name, child)
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.bias is None
    ]
    sizes = sorted(
        {value for value in vars(module).values() if type(value) is int and 0 < value <= 1024}
    )
    for method in methods:
        for name, linear in linears:
            if any(_expands(getattr(module, method), linear, size) for size in sizes):
                return {"expand": method, "kv_b_proj": name}
    return {}


def _expands(method: Callable[..., Any], linear: Any, rope_dim: int) -> bool:
    generator = torch.Generator().manual_seed(17)
    latent = torch.randn(2, 1, 5, linear.in_features, generator=generator)
    kpe = torch.randn(2, 1, 5, rope_dim, generator=generator)
    try:
        key, value = method(latent, kpe)
    except REFUSED:
        return False
    nope = key.shape[-1] - rope_dim
    expanded = linear(latent.squeeze(1))
    if expanded.shape[-1] != key.shape[1] * (nope + value.shape[-1]):
        return False
    expanded = expanded.view(2, 5, key.shape[1], -1).transpose(1, 2)
    expected = torch.cat([expanded[..., :nope], kpe.expand(-1, key.shape[1], -1, -1)], -1)
    return rmse_ratio(key, expected) < SAME and rmse_ratio(value, expanded[..., nope:]) < SAME
