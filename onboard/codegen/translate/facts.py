"""What the uses of a function have in common: the facts with which it is translated."""

from __future__ import annotations

import ast
from dataclasses import replace

from onboard.codegen.translate.args import Args
from onboard.codegen.translate.values import (
    COMPLEX,
    Code,
    Config,
    Folded,
    Half,
    Instance,
    Items,
    KeyBias,
    Known,
    Mapping,
    Mask,
    PaddingMask,
    Untranslatable,
    Value,
    joined_ways,
    may_be_none,
    name,
    same,
)


def bind(node: ast.FunctionDef, args: Args, *, method: bool) -> tuple[dict[str, Value], dict[str, Value]]:
    """Bind arguments to a definition's parameters; return them and what falls into `**kwargs`."""
    if args.stars:
        raise Untranslatable(f"a call of {node.name} with *args")
    names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)][1 if method else 0 :]
    extra = args.positional[len(names) :]
    if extra and node.args.vararg is None:
        raise Untranslatable(f"too many arguments for {node.name}")
    bound = dict(zip(names, args.positional, strict=False))
    if node.args.vararg is not None:
        bound[node.args.vararg.arg] = Items(tuple(extra))
    named = {*names, *(item.arg for item in node.args.kwonlyargs)}
    bound |= {key: value for key, value in args.keywords.items() if key in named}
    rest = {key: value for key, value in args.keywords.items() if key not in named}
    if rest and node.args.kwarg is None:
        raise Untranslatable(f"{node.name} takes no {', '.join(rest)}")
    return bound, rest


def default_nodes(node: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return a definition's defaults by parameter."""
    names = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
    defaults = dict(zip(names[len(names) - len(node.args.defaults) :], node.args.defaults, strict=True))
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return defaults | {item.arg: default for item, default in pairs if default is not None}


def default_fact(node: ast.expr) -> Value:
    """Return what is known of a parameter that a use leaves out."""
    try:
        return Known(ast.literal_eval(node))
    except ValueError:
        return Code(node, static=True)


def fact_of(value: Value) -> Value:
    """Return what a function may know of an argument: constants, the config, a mask; run-time values only by kind."""
    match value:
        case Known() | Config() | Mask():
            return value
        case Folded() | KeyBias():
            return replace(value, expr=name("_"))
        case Code(static=static, form=form, optional=optional):
            return Code(name("_"), static, form=form, optional=optional)
        case Instance():
            return replace(value, expr=name("_"))
        case Mapping(items=items) if all(isinstance(item, Known | Mask) for item in items.values()):
            return value
        case Items(items=(Half(whole=whole), Half())):
            return Code(name("_"), form=whole.form)
        case Items(items=items):
            return Code(name("_"), all(isinstance(fact_of(item), Known) for item in items))
    return Code(name("_"))


def join_facts(old: Value, new: Value) -> Value:
    """Return what holds for both of two uses."""
    if same_fact(old, new):
        return old
    if isinstance(old, Mask) and isinstance(new, Mask):
        return PaddingMask()
    if isinstance(old, Instance) and isinstance(new, Instance):
        return Instance(joined_ways(old.made, new.made), name("_"), old.optional or new.optional)
    if isinstance(old, Code) and isinstance(new, Code) and old.form != new.form and COMPLEX in (old.form, new.form):
        raise Untranslatable("an argument that is a complex RoPE table here and something else there")
    static = all(isinstance(item, Known | Config) or (isinstance(item, Code) and item.static) for item in (old, new))
    optional = any(may_be_none(item) for item in (old, new))
    return Code(name("_"), static, optional=optional)


def same_fact(old: Value, new: Value) -> bool:
    """Whether two facts say the same."""
    if isinstance(old, Folded) and isinstance(new, Folded):
        return (old.transposed, old.turned) == (new.transposed, new.turned)
    if isinstance(old, Code) and isinstance(new, Code):
        return type(old) is type(new) and (old.static, old.form, old.optional) == (new.static, new.form, new.optional)
    return same(old, new)


def as_parameters(facts: dict[str, Value]) -> dict[str, Value]:
    """Return facts as the values of parameters inside the function."""
    values: dict[str, Value] = {}
    for key, fact in facts.items():
        match fact:
            case Config(obj=obj):
                values[key] = Config(name(key), obj)
            case Folded() | KeyBias():
                values[key] = replace(fact, expr=name(key))
            case Code(static=static, form=form, optional=optional):
                values[key] = Code(name(key), static, form=form, optional=optional)
            case Instance():
                values[key] = replace(fact, expr=name(key))
            case _:
                values[key] = fact
    return values


def sets_attributes(node: ast.FunctionDef) -> bool:
    """Whether a method works on `self` and returns nothing before its end."""
    inside = [item for statement in node.body[:-1] for item in ast.walk(statement)]
    last = [] if isinstance(node.body[-1], ast.Return) else list(ast.walk(node.body[-1]))
    stores = [item for item in inside + last if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)]
    return bool(stores) and not any(isinstance(item, ast.Return) and item.value is not None for item in inside + last)


def all_bound(node: ast.FunctionDef, args: Args) -> dict[str, Value]:
    """Return what a call of a forward passes, by name, `**kwargs` too."""
    bound, rest = bind(node, args, method=True)
    return rest | bound
