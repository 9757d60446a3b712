"""The experts of a mixture in generated files: one module each where checkpoints have them so, else
the stacks.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    same_code,
)
from onboard.render import render

KIND = "experts"
MODULES = "modules"


def is_separate(recognised: Any) -> bool:
    """Whether a recognised class (or None) becomes a list of one module an expert."""
    return (
        recognised is not None
        and recognised.kind == KIND
        and recognised.parameters["layout"] == MODULES
    )


def inputs(parameters: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return the parameters of the experts' forward among `names`, in their order."""
    wanted = {parameters[role] for role in ("x", "indices", "weights")}
    return [item for item in names if item in wanted]


def init_body(
    body: list[ast.stmt], class_name: str, recognised: Mapping[str, Any]
) -> list[ast.stmt]:
    """Return the statements of a class's `__init__` as experts need them, others' as they are.

    The activation's name stands in place of its function, and one module an expert in place of the
    stacks where checkpoints have them so. `recognised` is what the analysis found: class name ->
    how its block is generated.
    """
    for own_class, block in recognised.items():
        if block.kind != KIND or class_name not in (own_class, block.parameters["act_class"]):
            continue
        if class_name == (block.parameters["act_class"] or own_class):
            body = _with_name(body, block.parameters)
        if class_name == own_class:
            body = _with_modules(body, class_name, block.parameters)
    return body


def _with_name(body: list[ast.stmt], parameters: Mapping[str, Any]) -> list[ast.stmt]:
    """Return the statements with the activation's name in place of its function."""
    out: list[ast.stmt] = []
    leaf = (parameters["act"] or "").split(".")[-1]
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Attribute(attr=attr) as target], value=value) if (
                attr == leaf
            ):
                key = (
                    value.slice
                    if isinstance(value, ast.Subscript)
                    else ast.Constant(parameters["activation"])
                )
                out.append(ast.copy_location(ast.Assign([target], key), statement))
            case _:
                out.append(statement)
    return out


def _with_modules(
    body: list[ast.stmt], class_name: str, parameters: Mapping[str, Any]
) -> list[ast.stmt]:
    """Return the statements with one module an expert in place of the stacks, where checkpoints
    have them so.
    """
    separate = parameters["layout"] == MODULES
    out: list[ast.stmt] = []
    for statement in body:
        match statement:
            case ast.If(test=test, body=inside, orelse=[]) if separate:
                inside = _with_modules(inside, class_name, parameters)
                out.extend(
                    inside if _counts_more_than_none(test, inside) else [ast.If(test, inside, [])]
                )
            case ast.Assign(targets=[ast.Attribute(attr=attr)], value=value) if (
                separate and _is_parameter(value)
            ):
                if attr == parameters["down_stack"]:
                    out.append(
                        ast.copy_location(
                            _extend(value, class_name, parameters["down_transposed"]), statement
                        )
                    )
            case _:
                out.append(statement)
    return out


def _counts_more_than_none(test: ast.expr, body: list[ast.stmt]) -> bool:
    """Whether a condition is `experts > 0` and what it guards makes that many experts, so that it
    says nothing.
    """
    match test, body:
        case (
            ast.Compare(left=number, ops=[ast.Gt()], comparators=[ast.Constant(value=0)]),
            [
                ast.Expr(
                    value=ast.Call(
                        args=[
                            ast.GeneratorExp(
                                generators=[ast.comprehension(iter=ast.Call(args=[n]))]
                            )
                        ]
                    )
                )
            ],
        ):
            return same_code(number, n)
    return False


def _is_parameter(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "nn.Parameter"


def _extend(value: ast.expr, class_name: str, transposed: bool) -> ast.stmt:
    """Return `self.extend(Expert(hidden, intermediate) for _ in range(experts))`, the sizes those
    of the stack.
    """
    match value:
        case ast.Call(
            args=[
                ast.Call(args=[ast.Tuple(elts=[experts, first, second])] | [experts, first, second])
            ]
        ):
            hidden, intermediate = (second, first) if transposed else (first, second)
        case _:
            raise Untranslatable(f"the sizes of the experts in {ast.unparse(value)}")
    element = call(name(expert_class(class_name)), hidden, intermediate)
    loop = ast.comprehension(name("_", store=True), call(name("range"), experts), [], 0)
    return ast.Expr(call(attribute(name("self"), "extend"), ast.GeneratorExp(element, [loop])))


def expert_class(class_name: str) -> str:
    """Return the name of one expert's class."""
    return class_name.removesuffix("s") if class_name.endswith("Experts") else f"{class_name}Item"


def expert_text(class_name: str, parameters: Mapping[str, Any]) -> str:
    """Return the class of one expert's weights."""
    return render("model/expert.py.j2", name=expert_class(class_name), **parameters).strip()
