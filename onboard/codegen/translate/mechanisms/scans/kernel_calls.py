"""The canonical ops of kernels: what functions of packages compute that are stood in for is known,
and need not be recognised.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.expressions.decisions import assigned
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Global
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    constant,
)
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Unread, Value
from onboard.codegen.translate.mechanisms.recurrent import bound, scan, without_zeros
from onboard.hf.old import recurrent_forms
from onboard.hf.old.fla import linear_attention_forms, rwkv7_forms
from onboard.hf.old.fla.kda_gates import fused_kda_gate
from onboard.hf.old.fla.token_axis import shown_by
from onboard.ops.written_forms import CallForm

_STATE, _FIRST, _GATES = "output_final_state", "head_first", "use_gate_in_kernel"
_BEFORE = "initial_state"
_OF_FLA = CallForm(
    "",
    fixed={_BEFORE: None, "cu_seqlens": None},
    ignored=frozenset({_STATE}),
    with_state=True,
)


def _of_fla(expression: str) -> CallForm:
    return replace(_OF_FLA, expression=f"torch.ops.onboard.{expression}")


def _of_rwkv7(tensors: str) -> CallForm:
    form = _of_fla(f"torch_dplr_delta_rule({tensors}, scale)")
    return replace(form, ignored=form.ignored | {"safe_gate", "chunk_size", "lower_bound"})


_OF_TOKENS = frozenset({"q", "k", "v", "g", "gk", "beta", "r", "w", "a", "b", "kk"})
"""What functions of `fla` are given of each token."""
_FORMS: dict[Callable[..., Any], CallForm] = {
    linear_attention_forms.chunk_gated_delta_rule: _of_fla(
        "torch_gated_delta_rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel)"
    ),
    linear_attention_forms.chunk_delta_rule: _of_fla(
        "torch_delta_rule(q, k, v, beta, scale, use_qk_l2norm_in_kernel)"
    ),
    linear_attention_forms.chunk_kda: replace(
        _of_fla("torch_kda(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel)"),
        fixed=_OF_FLA.fixed | {_GATES: False},
        ignored=_OF_FLA.ignored | {"A_log", "dt_bias"},  # which gates alone are read with
    ),
    linear_attention_forms.chunk_simple_gla: replace(
        _of_fla("torch_lightning_attention(q * scale, k, v, -g_gamma)"),
        fixed=_OF_FLA.fixed | {"g": None},
    ),
    linear_attention_forms.chunk_rwkv6: _of_fla(
        "torch_gated_linear_attention(r * scale, k, v, w, u)"
    ),
    linear_attention_forms.chunk_gla: _of_fla("torch_gated_linear_attention(q * scale, k, v, g)"),
    linear_attention_forms.fused_recurrent_gla: _of_fla(
        "torch_gated_linear_attention(q * scale, k, v, gk)"
    ),
    rwkv7_forms.chunk_dplr_delta_rule: _of_rwkv7("q, k, v, a, b, gk"),
    rwkv7_forms.fused_recurrent_dplr_delta_rule: _of_rwkv7("q, k, v, a, b, gk"),
    rwkv7_forms.chunk_rwkv7: _of_rwkv7("r, k, v, a, b, w"),
    rwkv7_forms.fused_recurrent_rwkv7: _of_rwkv7("r, k, v, a, b, w"),
    rwkv7_forms.fused_mul_recurrent_rwkv7: _of_rwkv7("r, k, v, -kk, kk * a, w"),
    recurrent_forms.causal_conv1d_fn: CallForm(
        "torch.ops.onboard.torch_causal_conv1d(x, weight.unsqueeze(1), bias, activation=activation)",
        fixed={"return_final_states": False},
        turned=frozenset({"x"}),
    ),
    recurrent_forms.selective_scan_fn: CallForm(
        "torch.ops.onboard.torch_selective_scan(u, delta, A, B, C, D, z, delta_bias)",
        fixed={"delta_softplus": True, "return_last_state": False},
        turned=frozenset({"u", "delta", "B", "C", "z"}),
    ),
    recurrent_forms.mamba_chunk_scan_combined: CallForm(
        "torch.ops.onboard.torch_ssm(x, A, B, C, D, dt, dt_bias, dt_limit, chunk_size)",
        fixed={"dt_softplus": True, "return_final_states": False, "return_varlen_states": False},
    ),
}


class KernelCalls(Mechanism):
    """Functions of `fla`, mamba_ssm and causal_conv1d."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """The op that a function computes."""
        return _op(function, _FORMS[function], args, frame) if _has_form(function) else None

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """The op that every function of a module's table computes, or both of a condition, whichever
        is taken.
        """
        functions = _functions(callee, frame)
        if not isinstance(callee, Code) or not functions or not all(map(_has_form, functions)):
            return None
        first, *rest = [_op(each, _FORMS[each], args, frame) for each in dict.fromkeys(functions)]
        return first if all(_is_same(each, first) for each in rest) else None


def _has_form(function: Any) -> bool:
    return callable(function) and function in _FORMS


def _functions(callee: Value, frame: Frame) -> list[Any]:
    """Return the functions that may be called; none where that is not known."""
    match callee:
        case Code(
            expr=ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=attr))
        ) if frame.cls is not None:
            modules = frame.translator.modules_of(frame.cls.cls)
            tables = [vars(item).get(attr) for item in modules]
            return [each for item in tables if isinstance(item, dict) for each in item.values()]
        case Code(expr=ast.Name(id=variable)):
            match assigned(frame).get(variable):
                case [ast.IfExp(body=ast.Name() as one, orelse=ast.Name() as other)]:
                    sides = [frame.evaluate(side) for side in (one, other)]
                    return [side.obj if isinstance(side, Global) else None for side in sides]
    return []


def _is_same(one: Value, other: Value) -> bool:
    """Whether two results are the same op of the same, and a state that nothing may read."""
    match one, other:
        case Items(items=(first, _)), Items(items=(second, _)):
            return _is_same(first, second)
    return ast.dump(one.code()) == ast.dump(other.code())


def _op(function: Any, form: CallForm, args: Args, frame: Frame) -> Value:
    """Return what a call of a function gives; the state behind it is for caches."""
    if _FIRST in inspect.signature(function).parameters:
        args, form = _ordered(function, form, args, frame)
    if " * scale" in form.expression:
        args = _with_scale(function, args)
    if _GATES in form.fixed:
        args = _with_decays(function, args, frame)
    if _BEFORE in form.fixed:
        args = without_zeros(bound(function, args), {_BEFORE}, frame)
    made = scan(function, form, args)
    if not isinstance(made, Items):
        return made
    return Items((made.items[0], Unread(f"the state that {function.__name__} leaves")))


def _with_decays(function: Any, args: Args, frame: Frame) -> Args:
    """Return the arguments of `chunk_kda` with the decays that it makes of its gates, where it does."""
    given = bound(function, args)
    if not given[_GATES].equals(Known(True)):
        return args
    gates = Args([given["g"], given["A_log"]], {"dt_bias": given["dt_bias"]}, [])
    decays = frame.translator.call_function(fused_kda_gate, gates, frame)
    return Args([], given | {"g": decays, _GATES: Known(False)}, [])


def _ordered(function: Any, form: CallForm, args: Args, frame: Frame) -> tuple[Args, CallForm]:
    """Return the arguments of a function of `fla`, which may be given heads before tokens, and how
    it is called with them.

    Raises:
        Untranslatable: nothing tells which come first.
    """
    first = _heads_come_first(bound(function, args), frame)
    if first is None:
        raise Untranslatable(f"{function.__name__} with heads or tokens first, which nothing tells")
    if function is linear_attention_forms.chunk_simple_gla:
        args = _of_heads(args, frame, first)
    turned = _OF_TOKENS & form.parameters if first else frozenset[str]()
    return args, replace(form, turned=turned, ignored=form.ignored | {_FIRST})


def _heads_come_first(given: Mapping[str, Value], frame: Frame) -> bool | None:
    match given[_FIRST]:
        case Known(value=bool(said)):
            return said
        case Known(value=None) if given.get("g_gamma", NONE).equals(NONE):
            return shown_by(type(frame.translator.model))
        case Known(value=None):
            return False  # decays of heads are younger than heads before tokens
    return None


def _of_heads(args: Args, frame: Frame, heads_first: bool) -> Args:
    """Return the arguments of `chunk_simple_gla` with decays that are the same for all tokens, `g`
    of `decay[None, None, :].expand(...)`, or `decay[None, :, None]` where heads come first, as
    `g_gamma`.
    """
    given, made = args.keywords.get("g"), assigned(frame)
    at = 1 if heads_first else 2
    decay = _of_all_tokens(given.expr, made, at) if isinstance(given, Code) else None
    if decay is None or _changes(decay, made):
        return args
    if not isinstance(decay, ast.Attribute):  # made on the way, on whichever device
        query = args.keywords.get("q") or args.positional[0]
        decay = call(attribute(decay, "to"), attribute(query.code(), "device"))
    heads: dict[str, Value] = {"g": NONE, "g_gamma": Code(decay)}
    return Args(args.positional, args.keywords | heads, args.stars)


def _changes(expr: ast.expr, made: Mapping[str, Sequence[ast.expr | None]]) -> bool:
    """Whether a variable of an expression is assigned several times."""
    names = (node.id for node in ast.walk(expr) if isinstance(node, ast.Name))
    return any(len(made.get(key, ())) > 1 for key in names)


def _of_all_tokens(
    expr: ast.expr, made: Mapping[str, Sequence[ast.expr | None]], at: int
) -> ast.expr | None:
    """Return what has been expanded to the batch and the tokens, which it has no dimensions for, only
    for its own, `at`; `made` is what variables were assigned.
    """
    match expr:
        case ast.Name(id=variable) if values := made.get(variable):
            *before, last = values
            return None if last is None else _of_all_tokens(last, {**made, variable: before}, at)
        case ast.Call(func=ast.Attribute(value=inner, attr="contiguous")):
            return _of_all_tokens(inner, made, at)
        case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[place]) if ast.unparse(
            place
        ).endswith("device"):
            return _of_all_tokens(inner, made, at)
        case ast.Call(
            func=ast.Attribute(
                value=ast.Subscript(value=decay, slice=ast.Tuple(elts=places)), attr="expand"
            )
        ) if [ast.unparse(item) for item in places] == [
            ":" if i == at else "None" for i in range(3)
        ]:
            return decay
    return None


def _with_scale(function: Any, args: Args) -> Args:
    """Return them with the scale that is meant where none is given."""
    given = bound(function, args)
    if not given["scale"].equals(NONE):
        return args
    query = given[next(iter(inspect.signature(function).parameters))]
    size = ast.Subscript(attribute(query.code(), "shape"), constant(-1), ast.Load())
    root = Code(ast.BinOp(size, ast.Pow(), constant(-0.5)))
    return Args(args.positional, args.keywords | {"scale": root}, args.stars)
