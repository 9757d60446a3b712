"""Comprehensions: of modules, over known items, and over what is known at run time only."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions import dicts
from onboard.codegen.translate.language.expressions.module_lists import is_row, modules_of_row
from onboard.codegen.translate.language.forms import LIST, MAYBE, TUPLE, TUPLES
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import ByName
from onboard.codegen.translate.language.handed.listed import (
    Listed,
    Objects,
    as_object,
    at_run_time,
    listed,
    made_of,
)
from onboard.codegen.translate.language.holes import Result
from onboard.codegen.translate.language.object_values import (
    Choice,
    Instance,
    ModuleList,
    ModuleRows,
    ModuleTable,
    NamedModules,
    Repeated,
)
from onboard.codegen.translate.language.sequences import item_in, sequence_of, sequence_of_all
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    same_code,
)
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Items,
    Known,
    Mapping,
    Mask,
    PaddingMask,
    Value,
)


def comprehension(
    node: ast.ListComp | ast.GeneratorExp | ast.SetComp,
    frame: Frame,
    before: Sequence[ast.Assign] = (),
) -> Value:
    """Return a comprehension with one loop; a list of modules is recognised by its element.

    `before` are assignments that come before each element, whose values are written where they are
    read.
    """
    generator = _only_loop(node, frame)
    if (items := _known_items(generator, frame)) is not None and not before:
        made = _unrolled(node.elt, generator.target, items, frame)
        if isinstance(made, Items) and isinstance(node, ast.ListComp):
            return replace(made, kind=LIST)
        return made
    over, env = _loop_variables(generator, frame)
    with frame.branch(env) as statements:
        for assignment in before:
            _substitute(assignment, frame)
        element = as_object(frame.evaluate(node.elt))
        tests = [frame.evaluate(item).code() for item in generator.ifs]
    _check_pure(statements, node, frame)
    loop = ast.comprehension(generator.target, over, tests, 0)
    if (objects := made_of(element)) is not None:
        shape, code = objects
        static = _is_static(generator, env) and element.is_static
        form = LIST if isinstance(node, ast.ListComp) else None
        return Objects(type(node)(code, [loop]), static, form=form, shape=shape)
    expr = type(node)(element.code(), [loop])
    if isinstance(element, Instance):
        element = _of_classes_here(element, expr.generators[0], frame)
        return ModuleList(element.made, type(node)(element.code(), expr.generators))
    if isinstance(element, ModuleList | ModuleTable) and is_row(element):
        return ModuleRows(element, expr)
    same = element.equals(NONE) or isinstance(element, Setting)
    if same and not tests:
        return Repeated(element, expr)
    kind = TUPLES if sequence_of(element) == TUPLE else LIST
    form = kind if isinstance(node, ast.ListComp) else None
    return Code(expr, _is_static(generator, env) and element.is_static, form=form)


def _of_classes_here(module: Instance, loop: ast.comprehension, frame: Frame) -> Instance:
    """Return a module that is made of one class or another as one of the class that the small model
    has, where it has the other nowhere; guarded.
    """
    match module.expr:
        case ast.IfExp(
            test, body=ast.Call(func=ast.Name(id=first)), orelse=ast.Call(func=ast.Name(id=other))
        ):
            program = frame.translator
            ways = [way for way in module.made if program.translates(way.cls)]
            absent = {way.cls.__name__ for way in ways if not program.modules_of(way.cls)}
            if (first in absent) is (other in absent):
                return module
            holds = ast.UnaryOp(ast.Not(), test) if first in absent else test
            every = call(name("all"), ast.GeneratorExp(holds, [loop]))
            if not program.decide(every, Code(every, static=True), frame):
                return module
            program.guard(every, frame)
            made = tuple(way for way in module.made if way.cls.__name__ not in absent)
            return Instance(made, module.expr.orelse if first in absent else module.expr.body)
    return module


def dict_comprehension(node: ast.DictComp, frame: Frame) -> Value:
    """Return `{key: value for ...}`; one of masks is as good as a mask."""
    generator = _only_loop(node, frame)
    if (known := dicts.unrolled(node, frame)) is not None:
        return known
    over, env = _loop_variables(generator, frame)
    with frame.branch(env) as statements:
        key, value = frame.evaluate(node.key).code(), frame.evaluate(node.value)
        value = (
            Code(value.expr)
            if isinstance(value, Result) and value.is_plain_tuple
            else frame.settle(value)
        )
        tests = [frame.evaluate(item).code() for item in generator.ifs]
    if isinstance(value, Mask):
        return value if not isinstance(value, PaddingMask) else PaddingMask()
    _check_pure(statements, node, frame)
    if (original := dicts.copied(node, key, value)) is not None:
        return frame.evaluate(original)
    form = (
        f"dict of {value.form or MAYBE}"
        if isinstance(value, Code) and (value.form or value.optional)
        else None
    )
    loop = ast.comprehension(generator.target, over, tests, 0)
    made = value.code()
    if isinstance(node.value, ast.List) and isinstance(made, ast.Tuple):
        made = ast.List(made.elts, ast.Load())  # which may grow
    whole = ast.DictComp(key, made, [loop])
    static = _is_static(generator, env) and value.is_static
    if isinstance(value, Instance) and frame.kind == "init" and frame.translator.specialised:
        return NamedModules(whole, static, made=value.made)
    return Code(whole, static, form=form)


def _only_loop(
    node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, frame: Frame
) -> ast.comprehension:
    if len(node.generators) > 1:
        raise Untranslatable(f"a nested comprehension at {frame.source.location(node)}")
    return node.generators[0]


def _loop_variables(generator: ast.comprehension, frame: Frame) -> tuple[ast.expr, Env]:
    """Return what a comprehension runs over, and the variables with its own."""
    over, element = iteration(generator.iter, frame)
    env = Env(dict(frame.env.values))
    bind_target(generator.target, element, env)
    return over, env


def _is_static(generator: ast.comprehension, env: Env) -> bool:
    names = [item.id for item in ast.walk(generator.target) if isinstance(item, ast.Name)]
    return all(env.values[item].is_static for item in names)


def _substitute(assignment: ast.Assign, frame: Frame) -> None:
    (target,) = assignment.targets
    value = frame.evaluate(assignment.value)
    if isinstance(target, ast.Subscript):
        owner, key = frame.evaluate(target.value), frame.evaluate(target.slice)
        if not (isinstance(owner, Mapping) and isinstance(key, Known) and value.is_static):
            raise Untranslatable(f"a list whose elements change {ast.unparse(target)} first")
        owner.items[key.value] = value
        return
    assert isinstance(target, ast.Name)
    if not (value.is_static or isinstance(value, Choice)):
        raise Untranslatable(
            f"a list whose elements are computed in several steps, {target.id} first"
        )
    frame.env.values[target.id] = value


def _check_pure(statements: list[ast.stmt], node: ast.expr, frame: Frame) -> None:
    if statements:
        raise Untranslatable(f"a comprehension with statements at {frame.source.location(node)}")


def _known_items(generator: ast.comprehension, frame: Frame) -> tuple[Value, ...] | None:
    """Return what a comprehension runs over when all of it is known."""
    if generator.ifs or not isinstance(generator.target, ast.Name):
        return None
    with frame.branch(Env(dict(frame.env.values))) as statements:
        value = frame.evaluate(generator.iter)
    return value.items if isinstance(value, Items) and not statements else None


def _unrolled(element: ast.expr, target: ast.expr, items: tuple[Value, ...], frame: Frame) -> Value:
    """Return the elements that a comprehension over known items makes."""
    out = []
    for item in items:
        env = Env(dict(frame.env.values))
        env.values[ast.unparse(target)] = item
        with frame.branch(env) as statements:
            out.append(frame.evaluate(element))
        _check_pure(statements, element, frame)
    first = out[0] if out else None
    if (
        isinstance(first, Instance)
        and len(out) > 1
        and all(_same_module(first, other) for other in out)
    ):
        loop = ast.comprehension(
            name("_", store=True), call(name("range"), ast.Constant(len(out))), [], 0
        )
        return ModuleList(first.made, ast.ListComp(first.expr, [loop]))
    return Items(tuple(out))


def _same_module(first: Instance, other: Value) -> bool:
    return isinstance(other, Instance) and same_code(first.expr, other.expr) and first.equals(other)


def iteration(node: ast.expr, frame: Frame) -> tuple[ast.expr, Value | None]:
    """Return what a loop runs over, and the value of an element when something is known of it."""
    match node:
        case ast.Call(func=ast.Name(id="enumerate" as function), args=[inner, *start]):
            over, element = iteration(inner, frame)
            index = Code(name("index"), static=True)
            counted = call(name(function), over, *(frame.code(item) for item in start))
            return counted, Items((index, element or Code(name("item"))))
        case ast.Call(func=ast.Name(id="zip" as function), args=parts, keywords=[]) if parts:
            overs, elements = zip(*(iteration(part, frame) for part in parts), strict=True)
            known = tuple(item or Code(name("item")) for item in elements)
            return call(name(function), *overs), Items(known)
        case ast.Call(func=ast.Attribute(value=owner, attr="items"), args=[], keywords=[]) if (
            isinstance(modules := frame.evaluate(owner), ModuleList)
        ):
            key = Code(name("key"), static=True)
            item = Instance(modules.made, name("item"))
            return call(attribute(modules.expr, "items")), Items((key, item))
        case ast.Call(func=ast.Name(id="set")):
            # The order of a set of strings differs from run to run, and with it the exported graph.
            return call(name("sorted"), frame.code(node)), Code(name("item"), static=True)
    return _over(frame.settle(frame.evaluate(node)))


def _over(value: Value) -> tuple[ast.expr, Value]:
    if isinstance(value, ModuleList):
        return value.expr, Instance(value.made, name("item"))
    value = listed(value)
    if isinstance(value, Listed):
        value = at_run_time(value)
    if isinstance(value, ModuleRows | Objects):
        return value.expr, value.item(name("item"))
    whole = Code(value.code(), value.is_static, form=sequence_of_all((value,)))
    return whole.expr, item_in(name("item"), value if isinstance(value, Code) else whole)


def bind_target(target: ast.expr, element: Value | None, env: Env) -> None:
    """Bind a loop's variables to what is known of an element."""
    match target, element:
        case ast.Name(id=variable), Instance(made=made):
            env.values[variable] = Instance(made, name(variable))
        case ast.Name(id=variable), ModuleList() | ModuleTable():
            env.values[variable] = replace(element, expr=name(variable))
        case ast.Name(id=variable), ByName():
            env.values[variable] = element.renamed("item", variable)
        case ast.Tuple(), ModuleList() if modules := modules_of_row(element):
            bind_target(target, modules, env)
        case ast.Name(id=variable), _:
            static = element is not None and element.is_static
            form = None if element is None else sequence_of_all((element,))
            optional = element is not None and element.may_be_none
            env.values[variable] = Code(name(variable), static, form=form, optional=optional)
        case ast.Tuple(elts=targets), Items(items=items) if len(targets) == len(items):
            for part, item in zip(targets, items, strict=True):
                bind_target(part, item, env)
        case ast.Tuple(elts=targets), _:
            known = item_in(element.expr, element) if isinstance(element, Code) else None
            for part in targets:
                bind_target(part, known, env)
        case _:
            raise Untranslatable(f"a loop over {ast.unparse(target)}")
