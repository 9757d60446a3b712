"""Execute statements partially: known branches are taken, run-time statements are emitted."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from onboard.codegen.translate.evaluate import binary, bind_result, code, evaluate, settle, truth
from onboard.codegen.translate.frame import Frame
from onboard.codegen.translate.values import (
    COMPLEX,
    NONE,
    Code,
    Env,
    Half,
    Hole,
    Instance,
    Items,
    Known,
    Mapping,
    ModuleList,
    Result,
    Untranslatable,
    Value,
    attribute,
    call,
    is_static,
    name,
    residual,
    same,
)

GOES_ON, RETURNS, RAISES = "goes on", "returns", "raises"


def execute(statements: Sequence[ast.stmt], frame: Frame) -> str:
    """Execute statements; return how they end (`GOES_ON`, `RETURNS`, `RAISES`)."""
    for statement in statements:
        handler = _STATEMENTS.get(type(statement))
        if handler is None:
            raise Untranslatable(f"{type(statement).__name__} at {frame.source.location(statement)}")
        ending = handler(statement, frame)
        if ending is not None:
            return str(ending)
    return GOES_ON


def _assign(node: ast.Assign, frame: Frame) -> None:
    value = evaluate(node.value, frame)
    for target in node.targets:
        store(target, value, frame, node)


def _ann_assign(node: ast.AnnAssign, frame: Frame) -> None:
    if node.value is not None:
        store(node.target, evaluate(node.value, frame), frame, node)


def _aug_assign(node: ast.AugAssign, frame: Frame) -> None:
    read = ast.copy_location(_as_load(node.target), node)
    value = binary(node.op, evaluate(read, frame), settle(evaluate(node.value, frame), frame))
    store(node.target, value, frame, node)


def _as_load(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def store(target: ast.expr, value: Value, frame: Frame, origin: ast.AST) -> None:
    """Assign a value to a target."""
    match target:
        case ast.Name(id=variable):
            _store_name(variable, value, frame, origin)
        case ast.Tuple(elts=targets) | ast.List(elts=targets):
            _unpack(targets, value, frame, origin)
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            store_attribute(attr, settle(value, frame), frame, origin)
        case ast.Subscript():
            _store_item(target, settle(value, frame), frame, origin)
        case _:
            raise Untranslatable(f"an assignment to {ast.unparse(target)}")


def _store_name(variable: str, value: Value, frame: Frame, origin: ast.AST) -> None:
    if not isinstance(value, Result):
        frame.bind(variable, value, origin)
        return
    if _is_plain_tuple(value):
        frame.bind(variable, Code(value.expr), origin)
        return
    names = [f"{variable}_{index}" for index in range(value.holes)]
    frame.env.values[variable] = bind_result(value, names, frame, origin)


def _is_plain_tuple(result: Result) -> bool:
    """Whether a result is a tuple of its run-time parts and nothing else."""
    shape = result.shape
    return not result.transposed and isinstance(shape, Items) and all(isinstance(item, Hole) for item in shape.items)


def _unpack(targets: list[ast.expr], value: Value, frame: Frame, origin: ast.AST) -> None:
    if isinstance(value, Result) and (names := _hole_names(targets, value)) is not None:
        bound = bind_result(value, names, frame, origin)
        assert isinstance(bound, Items)
        for target, item in zip(targets, bound.items, strict=True):
            assert isinstance(target, ast.Name)
            frame.env.values[target.id] = item
        return
    value = settle(value, frame)
    match value:
        case Items(items=items) if len(items) == len(targets):
            _unpack_items(targets, items, frame, origin)
        case Known(value=tuple() | list() as known) if len(known) == len(targets):
            _unpack_items(targets, tuple(map(Known, known)), frame, origin)
        case Code(form=form) if form == COMPLEX and len(targets) == 2:
            _unpack_items(targets, (Half(value, 0), Half(value, 1)), frame, origin)
        case Code():
            _unpack_code(targets, value, frame, origin)
        case _:
            raise Untranslatable(f"unpacking at {frame.source.location(origin)}")


def _hole_names(targets: list[ast.expr], result: Result) -> list[str] | None:
    """Return the target names of the result's parts when each part has one."""
    if not (isinstance(result.shape, Items) and len(result.shape.items) == len(targets)):
        return None
    names = {}
    for target, item in zip(targets, result.shape.items, strict=True):
        if not isinstance(target, ast.Name) or not isinstance(item, Hole | Known):
            return None
        if isinstance(item, Hole):
            names[item.index] = target.id
    return [names[index] for index in range(result.holes)] if len(names) == result.holes else None


def _unpack_items(targets: list[ast.expr], items: tuple[Value, ...], frame: Frame, origin: ast.AST) -> None:
    """Assign one by one, or in one statement when a later item reads an earlier target."""
    stores = {target.id for target in targets if isinstance(target, ast.Name)}
    reads = {
        node.id
        for item in items[1:]
        if isinstance(item, Code)
        for node in ast.walk(item.expr)
        if isinstance(node, ast.Name)
    }
    if stores & reads and all(isinstance(item, Code) for item in items):
        elements = [item.expr for item in items if isinstance(item, Code)]
        frame.emit(ast.Assign([_store_tuple(targets)], ast.Tuple(elements, ast.Load())), origin)
        for target, item in zip(targets, items, strict=True):
            assert isinstance(target, ast.Name)
            assert isinstance(item, Code)
            frame.env.values[target.id] = Code(name(target.id), item.static, item.transposed)
        return
    for target, item in zip(targets, items, strict=True):
        store(target, item, frame, origin)


def _store_tuple(targets: list[ast.expr]) -> ast.Tuple:
    return ast.Tuple([_stored(target) for target in targets], ast.Store())


def _stored(target: ast.expr) -> ast.expr:
    if not isinstance(target, ast.Name):
        raise Untranslatable(f"unpacking into {ast.unparse(target)}")
    return name(target.id, store=True)


def _unpack_code(targets: list[ast.expr], value: Code, frame: Frame, origin: ast.AST) -> None:
    """Unpack a run-time tuple; parts of a transposed whole (chunks of the last dimension) are transposed too."""
    attributes = [target for target in targets if isinstance(target, ast.Attribute)]
    names = [name(f"{item.attr}_value", True) if item in attributes else _stored(item) for item in targets]
    frame.emit(ast.Assign([ast.Tuple(list(names), ast.Store())], value.expr), origin)
    for target, part in zip(targets, names, strict=True):
        assert isinstance(part, ast.Name)
        frame.env.values[part.id] = Code(name(part.id), value.static, value.transposed)
        if target in attributes:
            store(target, frame.env.values[part.id], frame, origin)


def store_attribute(attr: str, value: Value, frame: Frame, origin: ast.AST | None) -> None:
    """Assign `self.attr`; only `__init__` may."""
    if frame.kind != "init":
        raise Untranslatable(f"forward assigns self.{attr}")
    path = attribute(name("self"), attr)
    assert isinstance(path, ast.Attribute)
    target = ast.Attribute(path.value, attr, ast.Store())
    frame.emit(ast.Assign([target], residual(value)), origin)
    frame.env.values[f"self.{attr}"] = _at(value, path)


def _at(value: Value, path: ast.expr) -> Value:
    """Return a value as it is read back from the attribute `path`."""
    match value:
        case Code(static=static):
            return Code(path, static)
        case Instance(made=made):
            return Instance(made, path)
        case ModuleList(made=made):
            return ModuleList(made, path)
        case Items() | Mapping():
            return Code(path, is_static(value))
    return value


def _store_item(target: ast.Subscript, value: Value, frame: Frame, origin: ast.AST) -> None:
    owner, key = evaluate(target.value, frame), evaluate(target.slice, frame)
    if isinstance(owner, Mapping) and isinstance(key, Known):
        owner.items[key.value] = value
        return
    if isinstance(owner, Mapping):
        if not isinstance(target.value, ast.Name):
            raise Untranslatable(f"a computed key at {frame.source.location(origin)}")
        if frame.loops:
            raise Widened(target.value.id)
        frame.bind(target.value.id, Code(residual(owner)), origin)
        owner = frame.env.values[target.value.id]
    index = code(target.slice, frame) if not isinstance(target.slice, ast.Slice) else target.slice
    frame.emit(ast.Assign([ast.Subscript(residual(owner), index, ast.Store())], residual(value)), origin)
    if (
        isinstance(owner, Code)
        and isinstance(value, Code)
        and value.form is not None
        and isinstance(target.value, ast.Name)
    ):
        frame.env.values[target.value.id] = Code(owner.expr, owner.static, form=f"dict of {value.form}")


class Widened(Exception):
    """A dict with known keys got a computed key: it has to exist at run time."""

    def __init__(self, variable: str) -> None:
        super().__init__(variable)
        self.variable = variable


def _expr(node: ast.Expr, frame: Frame) -> None:
    """Keep calls that work in place; everything else an expression statement does is bookkeeping."""
    if isinstance(node.value, ast.Constant):
        return
    value = evaluate(node.value, frame)
    if isinstance(value, Code) and isinstance(value.expr, ast.Call) and _in_place(value.expr):
        frame.emit(ast.Expr(value.expr), node)


def _in_place(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and (
        (node.func.attr.endswith("_") and not node.func.attr.endswith("__")) or node.func.attr == "append"
    )


def _return(node: ast.Return, frame: Frame) -> str:
    value = NONE if node.value is None else evaluate(node.value, frame)
    statement = ast.Return(None)
    frame.returns.append((statement, value))
    frame.emit(statement, node)
    return RETURNS


def _if(node: ast.If, frame: Frame) -> str | None:
    test = evaluate(node.test, frame)
    decided = truth(test)
    if decided is not None:
        ending = execute(node.body if decided else node.orelse, frame)
        return None if ending == GOES_ON else ending
    return _branch(node, test, frame)


def _branch(node: ast.If, test: Value, frame: Frame) -> str | None:
    """Keep both sides; where one has no translation, take this config's side and guard it."""
    sides = [_side(body, frame) for body in (node.body, node.orelse)]
    failed = [isinstance(side, Untranslatable) for side in sides]
    if any(failed):
        return _fold(node, test, sides, frame)
    (body, body_env, body_end), (orelse, else_env, else_end) = sides
    if RAISES in (body_end, else_end):  # a check of the config, which transformers made already
        kept = (orelse, else_env, else_end) if body_end == RAISES else (body, body_env, body_end)
        return _take(kept, frame)
    if body_end == RETURNS and else_end == GOES_ON:
        frame.emit(ast.If(residual(test), body, []), node)
        return _take((orelse, else_env, else_end), frame)
    if RETURNS in (body_end, else_end):
        frame.emit(ast.If(residual(test), body, orelse), node)
        if body_end == else_end:
            return RETURNS
        frame.env = body_env
        return None
    joined = _join((body, body_env), (orelse, else_env))
    if body or orelse:
        frame.emit(_if_statement(residual(test), body, orelse), node)
    frame.env = joined
    return None


Side = tuple[list[ast.stmt], Env, str]


def _side(body: list[ast.stmt], frame: Frame) -> Any:
    count = len(frame.returns)
    env = Env({key: _own_copy(value) for key, value in frame.env.values.items()})
    try:
        with frame.branch(env) as statements:
            ending = execute(body, frame)
            return statements, frame.env, ending
    except Untranslatable as error:
        del frame.returns[count:]
        return error


def _own_copy(value: Value) -> Value:
    return Mapping(dict(value.items)) if isinstance(value, Mapping) else value


def _take(side: Side, frame: Frame) -> str | None:
    statements, env, ending = side
    frame.out.extend(statements)
    frame.env = env
    return None if ending == GOES_ON else ending


def _fold(node: ast.If, test: Value, sides: list[Any], frame: Frame) -> str | None:
    index = 0 if is_static(test) and frame.translator.decide(node.test, test, frame) else 1
    if not is_static(test) or isinstance(sides[index], Untranslatable):
        raise next(side for side in sides if isinstance(side, Untranslatable))
    expr = residual(test)
    frame.translator.guard(expr if index == 0 else ast.UnaryOp(ast.Not(), expr), frame)
    return _take(sides[index], frame)


def _if_statement(test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> ast.If:
    if body:
        return ast.If(test, body, orelse)
    return ast.If(ast.UnaryOp(ast.Not(), test), orelse, [])


def _join(*branches: tuple[list[ast.stmt], Env]) -> Env:
    """Return what is known after either branch; what differs becomes a run-time variable."""
    (first, one), (second, other) = branches
    joined = Env()
    for key in {**one.values, **other.values}:
        a, b = one.values.get(key), other.values.get(key)
        if a is None or b is None:
            joined.values[key] = a if a is not None else b  # type: ignore[assignment]
        elif same(a, b):
            joined.values[key] = a
        else:
            joined.values[key] = _joined(key, (a, first), (b, second))
    return joined


def _joined(key: str, *sides: tuple[Value, list[ast.stmt]]) -> Value:
    values = [value for value, _ in sides]
    if all(isinstance(value, Mapping) for value in values):
        first, second = (value.items for value in values if isinstance(value, Mapping))
        merged = {**second, **first}
        if all(same(first[item], second[item]) for item in first.keys() & second.keys()):
            return Mapping(merged)
    if key.startswith("self."):
        path = attribute(name("self"), key.removeprefix("self."))
        if all(isinstance(value, Instance) for value in values):
            return Instance(tuple(way for value in values if isinstance(value, Instance) for way in value.made), path)
        return Code(path, all(map(is_static, values)))
    for value, statements in sides:
        if not (
            isinstance(value, Code)
            and not value.transposed
            and isinstance(value.expr, ast.Name)
            and value.expr.id == key
        ):
            statements.append(ast.Assign([name(key, store=True)], residual(value)))
    return Code(name(key), all(map(is_static, values)))


def _for(node: ast.For, frame: Frame) -> str | None:
    """Execute a loop body until what is known at its start holds at its end, too."""
    iterable, element = _iteration(node.iter, frame)
    for _ in range(20):
        start = frame.env
        env = Env({key: _own_copy(value) for key, value in start.values.items()})
        try:
            with frame.branch(env) as body, frame.loop():
                _bind_target(node.target, element, frame)
                if execute(node.body, frame) == RETURNS:
                    raise Untranslatable(f"a return in a loop at {frame.source.location(node)}")
                changed = _changed(node.target, start, frame.env)
        except Widened as widened:
            changed = [widened.variable]
        if not changed:
            if body:
                frame.emit(ast.For(_plain_target(node.target), iterable, body, []), node)
            return None
        for key in changed:
            _widen(key, frame, node)
    raise Untranslatable(f"a loop without a fixed point at {frame.source.location(node)}")


def _changed(target: ast.expr, start: Env, end: Env) -> list[str]:
    """Return the variables from before a loop that mean something else after its body."""
    own = {item.id for item in ast.walk(target) if isinstance(item, ast.Name)}
    shared = [key for key in start.values if key in end.values and key not in own]
    return [key for key in shared if not same(start.values[key], end.values[key])]


def _widen(key: str, frame: Frame, node: ast.AST) -> None:
    value = frame.env.values[key]
    code_value = residual(value)
    frame.bind(key, Code(code_value), node)


def _iteration(node: ast.expr, frame: Frame) -> tuple[ast.expr, Value | None]:
    """Return what a loop runs over, and the value of an element when something is known of it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enumerate":
        iterable, element = _iteration(node.args[0], frame)
        return call(name("enumerate"), iterable), Items(
            (Code(name("index"), static=True), element or Code(name("item")))
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "set":
        # The order of a set of strings differs from run to run, and with it the exported graph.
        return call(name("sorted"), code(node, frame)), Code(name("item"), static=True)
    value = settle(evaluate(node, frame), frame)
    if isinstance(value, ModuleList):
        return value.expr, Instance(value.made, name("item"))
    return residual(value), Code(name("item"), is_static(value))


def _bind_target(target: ast.expr, element: Value | None, frame: Frame) -> None:
    match target, element:
        case ast.Name(id=variable), Instance(made=made):
            frame.env.values[variable] = Instance(made, name(variable))
        case ast.Name(id=variable), _:
            frame.env.values[variable] = Code(name(variable), element is not None and is_static(element))
        case ast.Tuple(elts=targets), Items(items=items) if len(targets) == len(items):
            for part, item in zip(targets, items, strict=True):
                _bind_target(part, item, frame)
        case ast.Tuple(elts=targets), _:
            for part in targets:
                _bind_target(part, None, frame)
        case _:
            raise Untranslatable(f"a loop over {ast.unparse(target)}")


def _plain_target(target: ast.expr) -> ast.expr:
    node = ast.parse(f"for {ast.unparse(target)} in x: pass").body[0]
    assert isinstance(node, ast.For)
    return node.target


def _with(node: ast.With, frame: Frame) -> str | None:
    """Execute the body: the contexts of modeling code (no_grad, autocast) do not matter in inference."""
    ending = execute(node.body, frame)
    return None if ending == GOES_ON else ending


def _raise(node: ast.Raise, frame: Frame) -> str:
    return RAISES


def _nothing(node: ast.stmt, frame: Frame) -> None:
    return None


_STATEMENTS: dict[type[ast.stmt], Callable[[Any, Frame], str | None]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _ann_assign,
    ast.AugAssign: _aug_assign,
    ast.Expr: _expr,
    ast.Return: _return,
    ast.If: _if,
    ast.For: _for,
    ast.With: _with,
    ast.Raise: _raise,
    ast.Assert: _nothing,
    ast.Pass: _nothing,
    ast.Delete: _nothing,
    ast.Import: _nothing,
    ast.ImportFrom: _nothing,
}
