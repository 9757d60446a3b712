"""Comprehensions: of modules, over known items, and over what is known at run time only."""

from __future__ import annotations

import ast

from onboard.codegen.translate.frame import Frame
from onboard.codegen.translate.values import (
    Code,
    Env,
    Instance,
    Items,
    ModuleList,
    Untranslatable,
    Value,
    is_static,
    name,
    residual,
)


def comprehension(node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Value:
    """Return a comprehension with one loop; a list of modules is recognised by its element."""
    from onboard.codegen.translate.evaluate import evaluate

    generator = node.generators[0]
    if len(node.generators) > 1:
        raise Untranslatable(f"a nested comprehension at {frame.source.location(node)}")
    iterable = evaluate(generator.iter, frame)
    if isinstance(iterable, Items) and not generator.ifs and isinstance(generator.target, ast.Name):
        return _unrolled(node.elt, generator.target.id, iterable, frame)
    env = Env(dict(frame.env.values))
    for target in ast.walk(generator.target):
        if isinstance(target, ast.Name):
            env.values[target.id] = Code(name(target.id), is_static(iterable))
    with frame.branch(env) as statements:
        element = evaluate(node.elt, frame)
        tests = [residual(evaluate(item, frame)) for item in generator.ifs]
    if statements:
        raise Untranslatable(f"a comprehension with statements at {frame.source.location(node)}")
    loop = ast.comprehension(generator.target, residual(iterable), tests, 0)
    expr = type(node)(residual(element), [loop])
    if isinstance(element, Instance):
        return ModuleList(element.made, expr)
    return Code(expr, is_static(iterable) and is_static(element))


def _unrolled(element: ast.expr, variable: str, iterable: Items, frame: Frame) -> Value:
    """Return the elements that a comprehension over known items makes."""
    from onboard.codegen.translate.evaluate import evaluate

    out = []
    for item in iterable.items:
        with frame.branch(Env({**frame.env.values, variable: item})) as statements:
            out.append(evaluate(element, frame))
        if statements:
            raise Untranslatable(f"a comprehension with statements at {frame.source.location(element)}")
    return Items(tuple(out))
