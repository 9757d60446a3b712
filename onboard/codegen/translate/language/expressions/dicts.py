"""Methods of dicts with known keys, dict comprehensions over what is known, and those that copy a dict."""

from __future__ import annotations

import ast
from collections import Counter

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions.decisions import decided_here
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Items, Known, Mapping, Value


def unrolled(node: ast.DictComp, frame: Frame) -> Mapping | None:
    """Return the dict that a comprehension over known items makes; None for another."""
    (generator,) = node.generators
    if generator.ifs and not frame.translator.specialised:
        return None
    entries: dict[str, Value] = {}
    with frame.branch(Env(dict(frame.env.values))) as statements:
        over = frame.evaluate(generator.iter)
        for item in over.items if isinstance(over, Items) else ():
            frame.env.values.update(_bound(generator.target, item))
            chosen = [_decided(test, frame) for test in generator.ifs]
            if None in chosen:
                return None
            if not all(chosen):
                continue
            key, value = frame.evaluate(node.key), frame.evaluate(node.value)
            if not (isinstance(key, Known) and isinstance(key.value, str)):
                return None
            entries[key.value] = value
    return Mapping(entries) if isinstance(over, Items) and not statements else None


def method(owner: Mapping, attr: str, args: Args) -> Value:
    """Return what a method of a dict gives."""
    key = (
        args.positional[0].value
        if args.positional and isinstance(args.positional[0], Known)
        else None
    )
    default = args.positional[1] if len(args.positional) > 1 else NONE
    if attr == "copy":
        return Mapping(dict(owner.items))
    if attr in ("get", "pop") and isinstance(key, str):
        value = owner.items.get(key, default)
        if attr == "pop":
            owner.items.pop(key, None)
        return value
    if attr == "setdefault" and isinstance(key, str):
        return owner.items.setdefault(key, default)
    if attr == "update" and not args.stars:
        for item in args.positional:
            if not isinstance(item, Mapping):
                raise Untranslatable("update of a dict by an unknown one")
            owner.items.update(item.items)
        owner.items.update(args.keywords)
        return NONE
    if attr in ("keys", "values", "items"):
        pairs: list[tuple[Value, Value]] = [
            (Known(entry), value) for entry, value in owner.items.items()
        ]
        if attr == "items":
            return Items(tuple(map(Items, pairs)))
        return Items(tuple(pair[attr == "values"] for pair in pairs))
    if attr == "most_common":
        return _most_common(owner, args)
    raise Untranslatable(f"dict.{attr}")


def _most_common(counts: Mapping, args: Args) -> Value:
    """Return the texts of a known `Counter` and how often each is there, the most frequent first."""
    known = {key: count.value for key, count in counts.items.items() if isinstance(count, Known)}
    if len(known) < len(counts.items) or not args.known():
        raise Untranslatable("most_common of counts that are not known")
    pairs = Counter(known).most_common(*(x.value for x in args.positional))  # type: ignore[attr-defined]
    return Items(tuple(Items((Known(key), Known(count))) for key, count in pairs), kind=LIST)


def copied(node: ast.DictComp, key: ast.expr, value: Value) -> ast.expr | None:
    """Return `d` for `{k: v for k, v in d.items()}`, whatever was written for `k` and `v`."""
    match node.generators:
        case [
            ast.comprehension(
                target=ast.Tuple(elts=[first, second]), iter=ast.Call() as over, ifs=[]
            )
        ]:
            kept = ast.unparse(key) == ast.unparse(first) and ast.unparse(
                value.code()
            ) == ast.unparse(second)
            if kept and isinstance(over.func, ast.Attribute) and over.func.attr == "items":
                return over.func.value
    return None


def _decided(test: ast.expr, frame: Frame) -> bool | None:
    value = frame.evaluate(test)
    known = value.truth()
    return decided_here(value, frame) if known is None else known


def _bound(target: ast.expr, item: Value) -> dict[str, Value]:
    match target, item:
        case ast.Name(id=variable), _:
            return {variable: item}
        case ast.Tuple(elts=targets), Items(items=items) if len(targets) == len(items):
            pairs = zip(targets, items, strict=True)
            return {name: value for part, own in pairs for name, value in _bound(part, own).items()}
    return {}
