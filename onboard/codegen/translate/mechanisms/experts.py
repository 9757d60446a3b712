"""The experts of a mixture in generated files: one module each where checkpoints have them so, else
the stacks.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from onboard.analysis.blocks.spec_mixtures import MixtureParameters
from onboard.analysis.recognise.mixture_roles import ANY
from onboard.analysis.recognise.stretches import statements_of
from onboard.analysis.source import find_method
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance, ModuleList
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    op,
    same_code,
)
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.parts.handed_routing import (
    handed_on,
    hands,
    same_place,
    take,
)
from onboard.codegen.translate.mechanisms.parts.numbered_parts import modules_numbered
from onboard.render import render

KIND = "experts"
_ROLES = ("gate", "down", "up")
MODULES = "modules"
_SUM = """
{result} = {base}
for {number}, {expert} in enumerate(self.{experts}):
    {share} = ({weights}({indices} == {number})).sum(dim=-1, keepdim=True)
    {result} = {result} + ({expert}({x}) * {share}).masked_fill({share} == 0, 0.0)
"""
"""What `onboard.analysis.recognise.mixture_roles.summed` computes."""


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


class Mixtures(Mechanism):
    """Statements that send tokens to experts, which are modules of a list."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """One op in their place; tensors where a function makes of them what it hands to a mixture."""
        for each in frame.translator.findings.mixtures.values():
            if statements and each.handed is not None and hands(each.handed, statements[0], frame):
                return [handed_on(each.handed, statements[-1])]
        found = frame.cls and frame.translator.findings.mixtures.get(frame.cls.cls.__name__)
        if not found or not statements or not _begins(found, statements[0], frame):
            return None
        if found.handed is not None:
            take(found.handed, frame)
        if found.layout == ANY:
            return [
                *_in_its_place(found, statements[found.count - 1], frame),
                *statements[found.count :],
            ]
        if found.router is not None:
            _choose(found, found.router, frame)
        mixed = _mixed(found, frame)
        if found.base is not None:
            mixed = ast.BinOp(frame.code(name(found.base)), ast.Add(), mixed)
        frame.bind(found.result, Code(mixed), statements[0])
        last = statements[found.count - 1]
        end = [ast.Return(name(found.result))] if isinstance(last, ast.Return) else []
        return [*(ast.copy_location(item, last) for item in end), *statements[found.count :]]


def _in_its_place(found: MixtureParameters, last: ast.stmt, frame: Frame) -> list[ast.stmt]:
    """Return the statements that stand in place of a mixture's, of which `last` is the last one: they
    are translated as if the model's code had them.
    """
    text = _SUM.format(
        result=found.result,
        base=found.base or f"{found.x}.new_zeros(())",
        experts=f"{found.experts}.values()" if found.named else found.experts,
        weights=_times_weights(found),
        indices=_rows_of(found.indices, found),
        x=found.x,
        **{each: frame.fresh(each) for each in ("number", "expert", "share")},
    )
    if found.identities is not None:
        beyond = f"{_rows_of(found.indices, found)} >= {_first_identity(found)}"
        kept = f"({_times_weights(found)}({beyond}))"
        text += f"{found.result} = {found.result} + {kept}.sum(dim=-1, keepdim=True) * {found.x}\n"
    if isinstance(last, ast.Return):
        text += f"return {found.result}\n"
    body = ast.parse(text).body
    for node in (node for statement in body for node in ast.walk(statement)):
        ast.copy_location(node, last)
        if isinstance(node, ast.stmt):
            node.col_offset = -1  # no mixture begins there
    return body


def _first_identity(found: MixtureParameters) -> str:
    """Return the id of the first expert that returns its input."""
    if found.identities is True:
        return f"len(self.{found.experts})"
    return f"self.{found.identities}"


def _times_weights(found: MixtureParameters) -> str:
    """Return the weights of the choices, and what multiplies them with those of an expert."""
    match found.weighting:
        case "none":
            weights = ""
        case "all":
            weights = f"{found.weights}.gather(-1, {found.indices}) * "
        case _:
            weights = f"{_rows_of(str(found.weights), found)} * "
    scale = "" if found.scale is None else f"self.{found.scale} * "
    return scale + weights


def _rows_of(variable: str, found: MixtureParameters) -> str:
    return variable if found.in_rows else f"{variable}.reshape({found.x}.shape[0], -1)"


def _begins(found: MixtureParameters, statement: ast.stmt, frame: Frame) -> bool:
    """Whether a statement is the first of those that the analysis found."""
    assert frame.cls is not None
    method = find_method(frame.cls.cls, found.method)
    if method is None or frame.owner is not method[0]:
        return False
    every = list(statements_of(method[1].body))
    if found.begin >= len(every):
        raise Untranslatable(f"the statement {found.begin} of {found.method}, which has fewer")
    return same_place(every[found.begin], statement)


def _choose(found: MixtureParameters, router: str, frame: Frame) -> None:
    """Write the choice of each token's experts; note that it reads the router."""
    first, *rest = router.split(".")
    owner = frame.evaluate(attribute(name("self"), first))
    if rest and isinstance(owner, Instance):
        for state in frame.translator.reached(owner):
            state.read_outside.update(rest)
    layer, x = attribute(name("self"), first, *rest), frame.code(name(found.x))
    size = _last_size(x)
    given = call(attribute(x, "reshape"), ast.Constant(-1), size) if found.routed_rows else x
    dtype = attribute(layer, "weight", "dtype")
    logits = call(layer, call(attribute(given, "to"), dtype))
    if not found.routed_rows:
        logits = call(attribute(logits, "flatten"), ast.Constant(0), ast.Constant(-2))
    torch_name, wide = name("torch"), attribute(name("torch"), "float32")
    frame.bind(variable := frame.fresh("router_logits"), Code(logits))
    shares = call(
        attribute(torch_name, "softmax"), name(variable), dim=ast.Constant(-1), dtype=wide
    )
    largest = call(
        attribute(torch_name, "topk"), shares, ast.Constant(found.chosen), dim=ast.Constant(-1)
    )
    assert found.weights is not None
    pair = [name(found.weights, store=True), name(found.indices, store=True)]
    frame.emit(ast.Assign([ast.Tuple(list(pair), ast.Store())], largest))
    weights: ast.expr = name(found.weights)
    if found.renormalised:
        total = call(attribute(weights, "sum"), dim=ast.Constant(-1), keepdim=ast.Constant(True))
        weights = ast.BinOp(weights, ast.Div(), total)
    cast = call(attribute(weights, "to"), attribute(x, "dtype"))
    frame.emit(ast.Assign([name(found.weights, store=True)], cast))
    frame.env.values |= {key: Code(name(key)) for key in (found.weights, found.indices)}


def _last_size(x: ast.expr) -> ast.expr:
    return ast.Subscript(attribute(x, "shape"), ast.Constant(-1), ast.Load())


def _mixed(found: MixtureParameters, frame: Frame) -> ast.expr:
    """Return the op's call; note that it reads the weights of the experts."""
    x, chosen = (frame.code(name(each)) for each in (found.x, found.indices))
    weights, whole = _weights(found, x, chosen, frame), x
    if found.router is not None:
        x = call(attribute(x, "reshape"), ast.Constant(-1), _last_size(x))
    if not found.in_rows:
        chosen, weights = (_in_rows(each, x) for each in (chosen, weights))
    if found.scale is not None:
        weights = ast.BinOp(weights, ast.Mult(), attribute(name("self"), found.scale))
    lists, biases = _matrices(found, frame)
    settings = [
        ast.Constant(found.up is not None or found.fused is not None),
        ast.Constant(found.activation),
    ]
    mixed: ast.expr = call(op("torch_moe"), x, chosen, weights, *lists, *settings, *biases)
    if found.identities is not None:
        count = frame.code(ast.parse(_first_identity(found), mode="eval").body)
        of_them = ast.BinOp(weights, ast.Mult(), ast.Compare(chosen, [ast.GtE()], [count]))
        kept = call(attribute(of_them, "sum"), dim=ast.Constant(-1), keepdim=ast.Constant(True))
        same = call(attribute(ast.BinOp(kept, ast.Mult(), x), "to"), attribute(x, "dtype"))
        mixed = ast.BinOp(mixed, ast.Add(), same)
    return call(attribute(mixed, "view_as"), whole) if found.router is not None else mixed


def _weights(found: MixtureParameters, x: ast.expr, chosen: ast.expr, frame: Frame) -> ast.expr:
    """Return the weights of the choices."""
    if found.weights is None:
        return call(attribute(name("torch"), "ones_like"), chosen, dtype=attribute(x, "dtype"))
    weights = frame.code(name(found.weights))
    if found.weighting != "all":
        return weights
    rows, of_rows = (
        call(attribute(each, "flatten"), ast.Constant(0), ast.Constant(-2))
        for each in (weights, chosen)
    )
    picked = call(attribute(rows, "gather"), ast.Constant(-1), of_rows)
    return call(attribute(picked, "view_as"), chosen)


def _matrices(found: MixtureParameters, frame: Frame) -> tuple[list[ast.expr], list[ast.expr]]:
    """Return the matrices of the experts, a list a projection, and their biases, if any; note that
    they are read.
    """
    layers = [found.gate, found.down, found.up]
    if found.experts is None:
        return [_of_one_module(name("self"), found, role) for role in _ROLES], []
    path = attribute(name("self"), *found.experts.split("."))
    experts: Value | None
    if found.numbered:
        experts = modules_numbered(found.experts, frame)
    else:
        experts = frame.evaluate(call(attribute(path, "values")) if found.named else path)
    if not isinstance(experts, ModuleList | Instance):
        raise Untranslatable(f"experts in self.{found.experts}, which is no list of modules")
    own = tuple(made for made in experts.made if frame.translator.translates(made.cls))
    for state in frame.translator.reached(Instance(own, experts.expr)):
        state.read_outside.update(layer.split(".")[0] for layer in [*layers, found.size] if layer)
    if isinstance(experts, Instance):
        return [_of_one_module(experts.code(), found, role) for role in _ROLES], []
    biases = _of_modules(experts, found, "bias") if found.biased else []
    return _of_modules(experts, found, "weight"), biases


def _of_modules(experts: ModuleList, found: MixtureParameters, part: str) -> list[ast.expr]:
    """Return the lists of one part of the experts' layers: gate, down, up."""
    if found.fused is not None and found.gate is not None and found.down is not None:
        first = 0 if found.fused == "gate" else 1
        gate, up = (_each(experts, found.gate, part, half) for half in (first, 1 - first))
        return [gate, _each(experts, found.down, part), up]
    nothing = ast.List([], ast.Load()) if part == "weight" else ast.Constant(None)
    layers = (found.gate, found.down, found.up)
    return [_each(experts, layer, part) if layer else nothing for layer in layers]


def _in_rows(chosen: ast.expr, x: ast.expr) -> ast.expr:
    """Return what is one after the other with a row for each token of `x` [tokens, hidden]."""
    tokens = ast.Subscript(attribute(x, "shape"), ast.Constant(0), ast.Load())
    return call(attribute(chosen, "reshape"), tokens, ast.Constant(-1))


def _of_one_module(owner: ast.expr, found: MixtureParameters, role: str) -> ast.expr:
    """Return the list of one projection's matrices, of a module that has those of all experts."""
    layer: str | None = getattr(found, role)
    if layer is None:
        return ast.List([], ast.Load())
    match found.layout:
        case "flat" if found.size is not None:
            every: ast.expr = call(attribute(owner, layer, "chunk"), attribute(owner, found.size))
        case "stacks" | "own":
            every = call(attribute(owner, layer, "unbind"))
        case _:
            every = attribute(owner, layer)
    if role in found.turned:
        element = attribute(name("weight"), "T")
        return ast.ListComp(element, [ast.comprehension(name("weight", store=True), every, [], 0)])
    return call(name("list"), every)


def _each(experts: ModuleList, layer: str, part: str, half: int | None = None) -> ast.expr:
    """Return `[expert.layer.part for expert in experts]`, or one half of each."""
    element = attribute(_inside(name("expert"), layer), part)
    if half is not None:
        halves = call(attribute(element, "chunk"), ast.Constant(2))
        element = ast.Subscript(halves, ast.Constant(half), ast.Load())
    loop = ast.comprehension(name("expert", store=True), experts.code(), [], 0)
    return ast.ListComp(element, [loop])


def _inside(owner: ast.expr, path: str) -> ast.expr:
    """Return a module inside another one; of an `nn.Sequential` by its number."""
    for part in path.split("."):
        number = (
            ast.Subscript(owner, ast.Constant(int(part)), ast.Load()) if part.isdigit() else None
        )
        owner = attribute(owner, part) if number is None else number
    return owner
