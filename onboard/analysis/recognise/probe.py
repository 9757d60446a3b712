"""Recognise blocks by what they do: compare a module's output with that of canonical candidates on
the same input.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.bounds.value_guards import guarded
from onboard.analysis.recognise.recorder import FunctionCall, first_tensor
from onboard.ops.rope.rope import complex_freqs, side_by_side
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME_FORMULA

_COARSE_EPS = 0.37
"""An epsilon that matters: with it a candidate that forgets or misplaces epsilon is found out."""
_WIDTH = 64


@dataclass
class Finding:
    """What a probe found."""

    kind: str
    parameters: dict[str, Any] = field(default_factory=dict)
    evidence: list[str] = field(default_factory=list)


def probe_norm(module: nn.Module) -> Finding | None:
    """Recognise RMSNorm, RMSNorm with 1 + weight, LayerNorm (with or without weight and bias) and
    l2 norm.

    The module must be a leaf with at most the parameters weight and bias; its epsilon is the float
    attribute that makes the candidate fit even when it is large.
    """
    inside = [*module.named_children(), *module.named_buffers()]
    if inside or not {name for name, _ in module.named_parameters()} <= {"weight", "bias"}:
        return None
    for eps in _float_attributes(module):
        probe = copy.deepcopy(module)
        setattr(probe, eps, _COARSE_EPS)
        x = torch.randn(2, 3, *_shape(probe), generator=torch.Generator().manual_seed(7)) * 2 + 0.5
        found = _fit_norm(probe, eps, x)
        if found is not None:
            return found
    return None


def _fit_norm(probe: nn.Module, eps: str, x: torch.Tensor) -> Finding | None:
    try:
        expected, bounded = guarded(lambda: probe(x))
    except REFUSED:
        return None
    if bounded or not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return None
    for kind, parameters, candidate in _norm_candidates(probe, eps):
        error = rmse_ratio(candidate(x), expected)
        if error < SAME_FORMULA:
            return Finding(
                kind,
                {"eps": eps, **parameters},
                [f"probe: {kind} fits with rmse ratio {error:.1e}"],
            )
    return None


Candidate = tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]


def _norm_candidates(module: nn.Module, eps_name: str) -> Iterator[Candidate]:
    ops = torch.ops.onboard
    eps = getattr(module, eps_name)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:
        yield "l2norm", {}, lambda x: ops.torch_l2norm(x, eps)
        if bias is None:
            ones = {"unit_offset": False, "weightless": True}
            yield "rmsnorm", ones, lambda x: ops.torch_rmsnorm(x, x.new_ones(x.shape[-1]), eps)
    elif weight.dim() == 1 and bias is None:
        yield "rmsnorm", {"unit_offset": False}, lambda x: ops.torch_rmsnorm(x, weight, eps)
        yield "rmsnorm", {"unit_offset": True}, lambda x: ops.torch_rmsnorm(x, 1.0 + weight, eps)
    names = {
        "weight": "self.weight" if weight is not None else "None",
        "bias": "self.bias" if bias is not None else "None",
    }
    if weight is None or weight.dim() == 1:
        yield (
            "layernorm",
            {"per_head": False, **names},
            lambda x: ops.torch_layernorm(x, weight, bias, eps),
        )
    if weight is not None and weight.dim() == 1:
        offset = {"per_head": False, **names, "unit_offset": True}
        yield "layernorm", offset, lambda x: ops.torch_layernorm(x, 1.0 + weight, bias, eps)
    elif weight is not None and bias is None:
        yield (
            "layernorm",
            {"per_head": True, **names},
            lambda x: ops.torch_layernorm(x, None, None, eps) * weight,
        )


def _float_attributes(module: nn.Module) -> list[str]:
    return [key for key, value in vars(module).items() if type(value) is float]


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) else (_WIDTH,)


def probe_mlp(module: nn.Module, config: Any) -> Finding | None:
    """Recognise a gated or plain MLP of linear layers and its activation.

    Weights are found by shape and by trying: gated is down(act(gate(x)) * up(x)), plain is
        down(act(up(x))).
    """
    linears = {name: child for name, child in module.named_children() if _linear(child) is not None}
    if len(linears) not in (2, 3):
        return None
    width = next(iter(module.parameters())).new_empty(0)
    for activation in _activations(config):
        act: Any = ACT2FN[activation]
        for names in _orders(list(linears)):
            for hidden in {_linear(linears[names[0]])[0]}:  # type: ignore[index]
                x = torch.randn(
                    2, 3, hidden, generator=torch.Generator().manual_seed(11), dtype=width.dtype
                )
                found = _fit_mlp(module, names, act, activation, x)
                if found is not None:
                    return found
    return None


def _fit_mlp(
    module: nn.Module, names: list[str], act: Any, activation: str, x: torch.Tensor
) -> Finding | None:
    first, last = getattr(module, names[0]), getattr(module, names[-1])
    try:
        expected = module(x)
        hidden = first(x)
        if len(names) == 3:
            kind, out = "gated", last(act(hidden) * getattr(module, names[1])(x))
        else:
            kind, out = "plain", None
            size_in = _linear(last)[0]  # type: ignore[index]
            if hidden.shape[-1] == 2 * size_in:
                gate, up = hidden.chunk(2, dim=-1)
                kind, out = "gated, fused", last(act(gate) * up)
            else:
                out = last(act(hidden))
    except REFUSED:
        return None
    if not isinstance(expected, torch.Tensor) or out.shape != expected.shape:
        return None
    error = rmse_ratio(out, expected)
    if not error <= SAME_FORMULA:
        return None
    evidence = (
        f"probe: {kind} MLP ({', '.join(names)}) with {activation} fits with rmse ratio {error:.1e}"
    )
    return Finding("mlp", {"mlp": kind, "activation": activation}, [evidence])


def _linear(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output size of a linear layer, or of one with its weight transposed
    (Conv1D).
    """
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _orders(names: list[str]) -> list[list[str]]:
    if len(names) == 2:
        return [names, names[::-1]]
    return [[a, b, c] for a in names for b in names for c in names if len({a, b, c}) == 3]


def _activations(config: Any) -> list[str]:
    """Return the activations that the config names."""
    values = [
        value for value in config.to_dict().values() if isinstance(value, str) and value in ACT2FN
    ]
    return list(dict.fromkeys([*values, "silu", "gelu", "relu"]))


def probe_rotary(output: Any) -> bool:
    """Whether a module's output is cos + i sin or (cos, sin): tensors whose squares add up to one
    constant.
    """
    if isinstance(output, torch.Tensor) and output.is_complex():
        return bool(
            (output.abs() - output.abs().mean()).abs().max() < 1e-4 * output.abs().mean()
        ) and bool(output.real.std() > 0)
    if not (
        isinstance(output, tuple)
        and len(output) == 2
        and all(isinstance(item, torch.Tensor) for item in output)
    ):
        return False
    cos, sin = output
    if cos.shape != sin.shape or not cos.is_floating_point():
        return False
    radius = cos.square() + sin.square()
    return bool(
        (radius - radius.mean()).abs().max() < 1e-4 * radius.mean().clamp(min=1e-6)
    ) and bool(cos.std() > 0)


def is_doubled(output: Any) -> bool:
    """Whether cos has every angle twice, first half and second half alike."""
    first, second = output[0].chunk(2, dim=-1)
    return torch.equal(first, second)


def probe_rope(call: FunctionCall) -> Finding | None:
    """Recognise a helper that applies RoPE to q and k [batch, heads, seq, dim], given cos and sin;
    or, to these or to [batch, seq, heads, dim], given complex numbers; or to one of them.

    Of one that takes truth values, too, it is said for those that it was given. One that bounds or asks
    what tensors hold is none.
    """
    if call.guarded:
        return None
    if call.flags:
        found = probe_rope(replace(call, flags=()))
        if found is None or found.parameters.get("single"):
            return None
        return replace(found, parameters=found.parameters | {"flags": call.flags})
    if len(call.arguments) == 3 and len(call.outputs) == 1:
        x, first, second = call.arguments
        return _single_rope(x, first, second, call.outputs[0])
    if len(call.arguments) == 3 and len(call.outputs) == 2:
        return _complex_rope(call.arguments, call.outputs)
    if len(call.arguments) == 5 and len(call.outputs) == 2:
        return _probe_indexed_rope(call)
    if len(call.arguments) != 4 or len(call.outputs) != 2:
        return None
    q, k, cos, sin = call.arguments
    if q.dim() != 4 or cos.shape != sin.shape or cos.dim() != 3:
        return None
    if cos.shape[1] != q.shape[2] or k.dim() != 4 or cos.shape[1] != k.shape[2]:
        return None
    for parameters, rotated in _rope_candidates(q, k, cos, sin):
        error = worst(rmse_ratio(a, b) for a, b in zip(rotated, call.outputs, strict=True))
        if error < SAME_FORMULA:
            fits = f"probe: {parameters['op']} fits with rmse ratio {error:.1e}"
            return Finding("rope", parameters, [fits])
    return None


def _single_rope(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, output: torch.Tensor
) -> Finding | None:
    """Recognise the rotation of pairs of neighbouring channels of one tensor, by tables [batch, seq,
    dim / 2], cos and sin in either order.
    """
    tables = first, second
    if x.dim() != 4 or first.shape != second.shape or [each.dim() for each in tables] != [3, 3]:
        return None
    if not all(each.is_floating_point() for each in tables) or first.shape[-1] * 2 > x.shape[-1]:
        return None
    op = "torch_rope_with_complex_freqs"
    for sin_first, dim in itertools.product((False, True), (1, 2)):
        cos, sin = tables[::-1] if sin_first else tables
        if output.shape != x.shape or x.shape[3 - dim] != cos.shape[1]:
            continue
        freqs = torch.complex(cos.float(), sin.float())
        error = rmse_ratio(getattr(torch.ops.onboard, op)(x, x, freqs, dim)[0], output)
        if error < SAME_FORMULA:
            found = {"op": op, "unsqueeze_dim": dim, "single": True, "sin_first": sin_first}
            return Finding("rope", found, [f"probe: {op} fits with rmse ratio {error:.1e}"])
    return None


def _complex_rope(arguments: list[torch.Tensor], outputs: list[torch.Tensor]) -> Finding | None:
    q, k, freqs = arguments
    if not freqs.is_complex() or freqs.dim() != 3 or q.dim() != 4 or k.dim() != 4:
        return None
    op = "torch_rope_with_complex_freqs"
    for dim in (1, 2):
        if q.shape[3 - dim] != freqs.shape[1] or k.shape[3 - dim] != freqs.shape[1]:
            continue
        rotated = getattr(torch.ops.onboard, op)(q, k, freqs, dim)
        error = worst(rmse_ratio(a, b) for a, b in zip(rotated, outputs, strict=True))
        if error < SAME_FORMULA:
            return Finding(
                "rope",
                {"op": op, "unsqueeze_dim": dim},
                [f"probe: {op} fits with rmse ratio {error:.1e}"],
            )
    return None


def _probe_indexed_rope(call: FunctionCall) -> Finding | None:
    """Recognise one that takes whole tables [..., positions, dim] and the positions [batch, seq] to
    look up.
    """
    q, k, cos, sin, positions = call.arguments
    if positions.dtype != torch.int64 or positions.dim() != 2 or cos.shape != sin.shape:
        return None
    if (
        cos.dim() not in (2, 4)
        or cos.shape[:-2].numel() != 1
        or int(positions.max()) >= cos.shape[-2]
    ):
        return None
    tables = [table.view(table.shape[-2:])[positions] for table in (cos, sin)]
    found = probe_rope(FunctionCall(call.name, [q, k, *tables], call.outputs))
    if found is not None:
        found.parameters["table_dims"] = cos.dim()
    return found


def _rope_candidates(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> Iterator[tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]]:
    """Yield parameters of canonical ops and what they make of q and k."""
    ops = torch.ops.onboard
    half_rotation = "torch_rope_with_explicit_cos_sin"
    yield {"op": half_rotation}, ops.torch_rope_with_explicit_cos_sin(q, k, cos, sin, 1)
    yield (
        {
            "op": "torch_rope_with_complex_freqs",
            "frequencies": "side_by_side" if side_by_side(cos, sin) else "half_apart",
        },
        ops.torch_rope_with_complex_freqs(q, k, complex_freqs(cos, sin), 1),
    )
    yield (
        {"op": "torch_rope_with_qk_interleaving"},
        ops.torch_rope_with_qk_interleaving(q, k, cos, sin, 1),
    )
    if 2 * cos.shape[-1] <= min(q.shape[-1], k.shape[-1]):
        tables = (torch.cat((table, table), dim=-1) for table in (cos, sin))
        yield (
            {"op": half_rotation, "half_tables": True},
            ops.torch_rope_with_explicit_cos_sin(q, k, *tables, 1),
        )


def scale_of(output: Any) -> float:
    """Return the factor of cos and sin."""
    if isinstance(output, torch.Tensor):
        return float(output.abs().mean())
    cos = first_tensor(output)
    assert cos is not None
    return float((output[0].square() + output[1].square()).mean().sqrt())
