"""What the uses of a function have in common: the facts with which it is translated."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace

from onboard.codegen.translate.language.args import Args, spread
from onboard.codegen.translate.language.handed.by_name import Output
from onboard.codegen.translate.language.handed.left_in_arguments import Left
from onboard.codegen.translate.language.object_values import Self
from onboard.codegen.translate.language.partial_classes import joined_classes
from onboard.codegen.translate.language.sequences import sequence_of_all
from onboard.codegen.translate.language.statements.assignments.own_entries import OwnEntries
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Mapping, Value


def bind(
    node: ast.FunctionDef, args: Args, *, method: bool
) -> tuple[dict[str, Value], dict[str, Value]]:
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
    defaults = dict(
        zip(names[len(names) - len(node.args.defaults) :], node.args.defaults, strict=True)
    )
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return defaults | {item.arg: default for item, default in pairs if default is not None}


def default_fact(node: ast.expr) -> Value:
    """Return what is known of a parameter that a use leaves out."""
    try:
        return Known(ast.literal_eval(node))
    except ValueError:
        return Code(node, static=True)


def join_facts(old: Value, new: Value) -> Value:
    """Return what holds for both of two uses."""
    # The first layer of a text gets None, and a layer without an object
    if isinstance(new, OwnEntries | Left) or (isinstance(new, Output) and old.equals(NONE)):
        old, new = new, old
    both = old if old.same_fact(new) else joined_classes(old, new) or old.joined(new)
    if type(both) is not Code or both.form is not None:
        return both
    return replace(both, form=sequence_of_all((old, new)))


def join_uses(known: dict[str, Value], new: dict[str, Value]) -> dict[str, Value] | None:
    """Return what holds of the arguments of a use as well, too; None where nothing else does."""
    joined = {key: join_facts(known.get(key, NONE), new.get(key, NONE)) for key in {**known, **new}}
    same = all(key in known and known[key].same_fact(fact) for key, fact in joined.items())
    return None if same else joined


def as_parameters(facts: dict[str, Value]) -> dict[str, Value]:
    """Return facts as the values of parameters inside the function."""
    names = Counter(own for key, fact in facts.items() for own in spread({key: fact}))
    if twice := [key for key, count in names.items() if count > 1]:
        raise Untranslatable(f"{twice[0]} beside an object's field of that name")
    return {key: fact.as_parameter(key) for key, fact in facts.items()}


def handed_apart(node: ast.FunctionDef, facts: dict[str, Value]) -> dict[str, Value]:
    """Return facts in the order of a definition's parameters, of an object those of its fields."""
    order = [item.arg for item in (*node.args.args, *node.args.kwonlyargs)]
    return spread({key: facts[key] for key in dict.fromkeys((*order, *facts)) if key in facts})


def rest_parameters(node: ast.FunctionDef, given: dict[str, Value]) -> dict[str, Value]:
    """Return `**kwargs` inside a function: what its uses pass besides its other parameters, of all that
    they do.
    """
    if node.args.kwarg is None:
        return {}
    others = [node.args.vararg] if node.args.vararg is not None else []
    named = {item.arg for item in (*node.args.args, *node.args.kwonlyargs, *others)}
    rest = {key: value for key, value in given.items() if key not in named}
    return {node.args.kwarg.arg: Mapping(rest)}


def sets_attributes(node: ast.FunctionDef) -> bool:
    """Whether a method works on `self` and returns nothing before its end."""
    inside = [item for statement in node.body[:-1] for item in ast.walk(statement)]
    last = [] if isinstance(node.body[-1], ast.Return) else list(ast.walk(node.body[-1]))
    stores = [
        item
        for item in inside + last
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    ]
    return bool(stores) and not any(
        isinstance(item, ast.Return) and item.value is not None for item in inside + last
    )


def stores_attributes(node: ast.FunctionDef) -> bool:
    """Whether a method assigns attributes of `self`, or registers buffers of it."""
    return any(
        isinstance(item, ast.Attribute)
        and ast.unparse(item.value) == "self"
        and (isinstance(item.ctx, ast.Store) or item.attr == "register_buffer")
        for item in ast.walk(node)
    )


def receiver(node: ast.FunctionDef) -> dict[str, Value]:
    """Return what a method calls the object that it is of: a class method, too, finds what it wants
    of its class there.
    """
    kinds = {ast.unparse(item) for item in node.decorator_list}
    first = node.args.args[0].arg if "classmethod" in kinds else "self"
    return {first: Self()}


def all_bound(node: ast.FunctionDef, args: Args) -> dict[str, Value]:
    """Return what a call of a forward passes, by name, `**kwargs` too."""
    bound, rest = bind(node, args, method=True)
    return rest | bound
