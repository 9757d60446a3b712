"""The canonical ops that replace attention and RoPE."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.modeling_utils import AttentionInterface as HFAttentionInterface

from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.expressions.items import item_of
from onboard.codegen.translate.language.expressions.objects import CONFIG_FACTS
from onboard.codegen.translate.language.forms import POSITIONS, ROWS, ROWS_OF_HEADS
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.object_values import (
    AttentionInterface,
    Global,
    Instance,
    Made,
)
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    constant,
    name,
    op,
    same_code,
)
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Half,
    Items,
    Known,
    Mask,
    Value,
    untransposed,
)
from onboard.codegen.translate.mechanisms.attention import chosen, compressed
from onboard.codegen.translate.mechanisms.attention.windows import with_window
from onboard.codegen.translate.mechanisms.tables import Cut

NORMS = (nn.LayerNorm,)
"""PyTorch's norms that generated files have a subclass of, of the same name, which calls the
canonical op.
"""
COMPLEX_ROPE = "torch_rope_with_complex_freqs"


def attention(args: Args) -> Value:
    """Return the canonical form of `attention_interface(module, q, k, v, mask, scaling=..., ...)`.

    The interface returns (output [batch, sequence, heads, dim], weights); weights are None here.
    """
    heads_first = args.positional[1:4]
    given = {
        **dict(zip(("attention_mask", "scaling"), args.positional[4:], strict=False)),
        **args.keywords,
    }
    by_sequence = all(isinstance(value, Code) and value.transposed for value in heads_first)
    if not (by_query := given.get("sinks", NONE)).equals(NONE):
        given = {**given, "s_aux": Code(_sinks(by_query.code()))}
    settings = [given.get(key, NONE) for key in ("scaling", "s_aux", "sliding_window", "softcap")]
    if (keys := chosen.indices(given.get("attention_mask"))) is not None:
        return Items((_sparse(heads_first, keys, settings), NONE))
    if any(isinstance(value, compressed.WithEntries) for value in heads_first[1:]):
        return _to_entries(args, heads_first, settings)
    layout = constant("bsnd" if by_sequence else "bnsd")
    qkv = [(untransposed(value) if by_sequence else value).code() for value in heads_first]
    fixed = [_bias(given).code(), constant(0.0), constant(True)]
    called = ast.Call(
        op("torch_attention"), [*qkv, *fixed, *(each.code() for each in settings), layout], []
    )
    return Items((Code(called, transposed=not by_sequence), NONE))


def _to_entries(args: Args, heads_first: list[Value], settings: list[Value]) -> Value:
    """Return the canonical form of attention to keys that have those of blocks behind them, or to
    the former alone.
    """
    alone = [
        Code(each.expr, transposed=each.transposed)
        for each in heads_first
        if isinstance(each, Code)
    ]
    positional = [args.positional[0], *alone, *args.positional[4:]]
    plain = attention(replace(args, positional=positional))
    assert isinstance(plain, Items)
    return compressed.attention(heads_first[1:], plain, turned(heads_first[0]), settings)


def _sinks(expr: ast.expr) -> ast.expr:
    """Return a logit of each query as [batch, sequence, heads]; modeling code has it as [batch,
    heads, sequence, 1].
    """
    match expr:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Call(func=ast.Attribute(value=inner, attr="transpose"), args=[one, two]),
                attr="unsqueeze",
            ),
            args=[last],
        ) if [ast.unparse(item) for item in (one, two, last)] == ["1", "2", "-1"]:
            return inner
    return call(
        attribute(call(attribute(expr, "squeeze"), constant(-1)), "transpose"),
        constant(1),
        constant(2),
    )


def _sparse(heads_first: list[Value], keys: Value, settings: list[Value]) -> Code:
    """Return the canonical form of attention to chosen keys, [batch, sequence, heads, dim]."""
    scale, *others = settings
    if not all(item.equals(NONE) for item in others):
        raise Untranslatable("attention to chosen keys with sinks, a window or a soft cap")
    qkv = [turned(value).code() for value in heads_first]
    return Code(ast.Call(op("torch_sparse_attention"), [*qkv, keys.code(), scale.code()], []))


def turned(value: Value) -> Code:
    """Return a value [batch, heads, sequence, dim] in the order bsnd, or the other way round."""
    if isinstance(value, Code) and value.transposed:
        return untransposed(value)
    return Code(value.code(), transposed=True)


def _bias(given: Mapping[str, Value]) -> Value:
    """Return what is added to the scores besides the causal mask: a mask with more in it, a bias of
    positions.
    """
    mask, bias = (given.get(key, NONE) for key in ("attention_mask", "position_bias"))
    if isinstance(mask, Mask) or mask.equals(NONE) or (isinstance(mask, Code) and mask.static):
        return bias
    if bias.equals(NONE):
        return mask
    raise Untranslatable("attention with a bias in its mask and another one")


def rope(
    function: Any,
    op_name: str,
    args: Args,
    complex_dim: int | None = None,
    table_dims: int | None = None,
    half_tables: bool = False,
    frequencies: str | None = None,
) -> Value:
    """Return the canonical form of `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`.

    A function that gets complex numbers instead of cos and sin gives them the dimension of heads at
    `complex_dim`. With `table_dims`, cos and sin are whole tables with so many dimensions, and
    positions follow them. With `half_tables` they have each frequency once, the op's twice. Of
    those that become complex numbers `frequencies` says where they have the two of each.
    """
    bound = inspect.signature(function).bind(*args.positional, **args.keywords)
    given = list(bound.arguments.values())
    q, k, *tables = given[: 4 if complex_dim is None else 3]
    if table_dims is not None:
        tables = [_taken(table, given[4], table_dims) for table in tables]
    dim = bound.arguments.get("unsqueeze_dim", Known(complex_dim or 1))
    if not (isinstance(dim, Known) and dim.value in (1, 2)):
        raise Untranslatable("RoPE along an unknown dimension")
    moved = all(isinstance(value, Code) and value.transposed for value in (q, k))
    q_code, k_code = ((untransposed(value) if moved else value).code() for value in (q, k))
    position = constant(3 - dim.value if moved else dim.value)
    codes = _tables(op_name, tables, frequencies)
    codes = [_twice(code) for code in codes] if half_tables else codes
    called = ast.Call(op(op_name), [q_code, k_code, *codes, position], [])
    return Result(called, Items((Hole(0), Hole(1))), 2, moved)


def _twice(table: ast.expr) -> ast.expr:
    """Return `torch.cat((table, table), dim=-1)`."""
    both = ast.Tuple([table, table], ast.Load())
    return call(attribute(name("torch"), "cat"), both, dim=constant(-1))


def _taken(table: Value, positions: Value, dims: int) -> Code:
    """Return `table[positions]` of a table [positions, dim], or of one with two dimensions of size
    one before these; of a cut one that is the rows of counted positions already, these.
    """
    if isinstance(table, Code) and table.form in (ROWS, ROWS_OF_HEADS):
        return _rows_again(table, positions)
    whole = table.expr if isinstance(table, Cut) else table.code()
    if dims == 4:
        whole = ast.Subscript(whole, ast.Tuple([constant(0), constant(0)], ast.Load()), ast.Load())
    return Code(ast.Subscript(whole, positions.code(), ast.Load()))


def _rows_again(rows: Code, positions: Value) -> Code:
    """Return rows of counted positions, [batch, sequence, dim], which code looks up by these."""
    if not isinstance(positions, Code) or positions.form != POSITIONS:
        raise Untranslatable("rows of counted positions, looked up by other ones")
    if rows.form == ROWS:
        return rows
    return Code(call(attribute(rows.code(), "squeeze"), constant(1)), form=ROWS)


def _tables(op_name: str, tables: list[Value], frequencies: str | None) -> list[ast.expr]:
    if op_name != COMPLEX_ROPE or len(tables) == 1:
        return [each.code() for each in tables]
    match tables:
        case [Half(whole=first, part=0), Half(whole=second, part=1)] if same_code(
            first.expr, second.expr
        ):
            return [first.expr]
        case [Code() as cos, Code() as sin] if frequencies is not None:
            return [_complex(cos.expr, sin.expr, frequencies)]
    raise Untranslatable("interleaved RoPE whose cos and sin do not come from the rotary embedding")


def _complex(cos: ast.expr, sin: ast.expr, frequencies: str) -> ast.expr:
    """Return the complex numbers of tables that have each frequency twice."""
    size = ast.Subscript(attribute(cos, "shape"), constant(-1), ast.Load())
    half = ast.BinOp(size, ast.FloorDiv(), constant(2))
    columns = (
        ast.Slice(step=constant(2)) if frequencies == "side_by_side" else ast.Slice(upper=half)
    )
    index = ast.Tuple([constant(...), columns], ast.Load())
    once = (ast.Subscript(table, index, ast.Load()) for table in (cos, sin))
    return call(
        attribute(name("torch"), "complex"), *(call(attribute(each, "float")) for each in once)
    )


def _has_flags(args: Args, flags: tuple[bool, ...]) -> bool:
    """Whether positional arguments have these truth values, and no others."""
    known = (value.value for value in args.positional if isinstance(value, Known))
    return tuple(value for value in known if type(value) is bool) == flags


def _usual(table: Mapping[Any, Any], frame: Frame) -> str | None:
    """Return the key of the attention that a table of classes has for any name it does not know."""
    config = getattr(frame.translator.model, "config", None)
    own = getattr(config, "_attn_implementation", None)
    return next((key for key in (_EAGER, own) if key in table), None)


def _is_dispatch(owner: Value) -> bool:
    return isinstance(owner, Global) and isinstance(owner.obj, HFAttentionInterface)


_EAGER = "eager"
"""How tables of attention classes, and parts of their keys, name the one that is written out."""


class CanonicalOps(Mechanism):
    """Attention by transformers' interface, RoPE, PyTorch's norms."""

    def call(self, function: Any, expr: ast.expr, args: Args, frame: Frame) -> Value | None:
        """Helpers that apply RoPE, and constructors of norms."""
        if function in NORMS and args.positional and not isinstance(args.positional[0], Items):
            frame.translator.own_norms.add(function.__name__)
            norm = Made(function, {"canonical": Known(True)})
            given = args.anywhere() if frame.translator.specialised else args
            return Instance((norm,), plain_call(name(function.__name__), given).expr)
        found = frame.translator.findings
        if not inspect.isfunction(function) or function.__name__ not in found.ropes:
            return None
        if not _has_flags(args, found.rope_flags.get(function.__name__, ())):
            return None
        dims = found.rope_dims.get(function.__name__), found.rope_tables.get(function.__name__)
        half = function.__name__ in found.half_ropes
        frequencies = found.rope_frequencies.get(function.__name__)
        op_name = found.ropes[function.__name__]
        return rope(function, op_name, args, *dims, half_tables=half, frequencies=frequencies)

    def call_value(self, callee: Value, args: Args, frame: Frame) -> Value | None:
        """Attention, and a norm of the last dimension."""
        match callee, args.positional:
            case AttentionInterface(), _:
                return attention(with_window(args, frame))
            case Instance(made=made), [Code(transposed=True) as only] if all(
                "canonical" in m.arguments for m in made
            ):
                return Code(ast.Call(callee.code(), [only.expr], []), transposed=True)
        return None

    def call_method(self, owner: Value, attr: str, args: Args, frame: Frame) -> Value | None:
        """The choice of an implementation of attention."""
        dispatch = _is_dispatch(owner) and attr in ("get_interface", "get")
        return AttentionInterface() if dispatch else None

    def item(self, owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
        """The eager one of a table of attention classes, or, where it has none, the one that the model
        has; and transformers' own table.
        """
        if _is_dispatch(owner):
            return AttentionInterface()
        match owner, index:
            case Global(obj=dict() as table), Known(value=key) if (
                key not in table and (usual := _usual(table, frame)) is not None
            ):
                asked = str(key).replace(CONFIG_FACTS["_attn_implementation"], usual)
                eager = table[found := asked if asked in table else usual]
                if inspect.isclass(eager):
                    return Global(eager, name(eager.__name__))
                return item_of(owner, Known(found), node, frame)
        return None
