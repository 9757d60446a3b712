"""What decides a test of the config: the parts of it that this config makes true or false."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from onboard.analysis.behaviour.lines_run import lines_run
from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config, Instance
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, stored_names
from onboard.codegen.translate.language.trees.token_counts import as_many
from onboard.codegen.translate.language.values import Code, Known, Value


def decided_here(test: Value, frame: Frame) -> bool | None:
    """Return what this config makes of a static test, and guard it; None where that cannot be
    told.
    """
    if not test.is_static or frame.cls is None:
        return None
    try:
        reasons, chosen = deciding(test.code(), frame)
    except Untranslatable:
        return None
    for reason in reasons:
        if not (frame.translator.specialised and _holds_always(reason, frame)):
            frame.translator.guard(reason, frame)
    return chosen


def decided_by_part(test: Value, frame: Frame) -> bool | None:
    """Return the value of `a and b`, of which one part is known at run time or by the layer only,
    where this config makes the other false; of `a or b` and `not x` likewise.
    """
    if not isinstance(test, Code):
        return None
    match WrittenOut(local_values(frame)).visit(deepcopy(test.expr)):
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            decided = decided_by_part(Code(inner), frame)
            return None if decided is None else not decided
        case ast.BoolOp(op=op, values=parts):
            stop = isinstance(op, ast.Or)
            static = [part for part in parts if is_of_config(part)]
            return stop if any(_is(stop, part, frame) for part in static) else None
    return None


def _is(outcome: bool, part: ast.expr, frame: Frame) -> bool:
    """Whether a static test has this outcome here, which is guarded; another one is not."""
    before = None if frame.cls is None else list(frame.cls.guards)
    if decided_here(Code(part, static=True), frame) is outcome:
        return True
    if frame.cls is not None and before is not None:
        frame.cls.guards[:] = before
    return False


def _holds_always(reason: ast.expr, frame: Frame) -> bool:
    """Whether a condition reads nothing but the modeling file's own names, `torch.float16` say."""
    names = {item.id for item in ast.walk(reason) if isinstance(item, ast.Name)}
    return names <= frame.source.namespace.keys() - frame.env.values.keys()


def decided_by_modules(node: ast.expr, test: Value, frame: Frame, config: Any) -> bool:
    """Return a static condition's value in a config, the same for all modules of the class.

    Raises:
        Untranslatable: modules of the class differ in it, or it cannot be evaluated.
    """
    values = {bool(value) for value in _in_modules(node, test, frame, config)}
    if len(values) != 1:
        raise Untranslatable(f"the condition {ast.unparse(node)}, which differs between layers")
    return values.pop()


def switched(args: Args, frame: Frame) -> Args:
    """Return a call's arguments with the switches that this config has, guarded, where these are
    constants to what is called.
    """
    known = {key: _switch(item, frame) for key, item in args.keywords.items()}
    return replace(
        args, positional=[_switch(item, frame) for item in args.positional], keywords=known
    )


def _switch(value: Value, frame: Frame) -> Value:
    """Return the truth value, text or None that a static value is in all modules of the class."""
    if type(value) is not Code or not value.static or frame.cls is None:
        return value
    frame.translator.hands_switches = True
    if not frame.translator.decides_switches:
        return value
    try:
        first, *rest = _in_modules(value.expr, value, frame, frame.translator.config)
    except Untranslatable:
        return value
    if not isinstance(first, bool | str | None) or any(first is not item for item in rest):
        return value
    same: ast.cmpop = ast.Eq() if isinstance(first, str) else ast.Is()
    test = ast.Compare(value.expr, [same], [ast.Constant(first)])
    return Known(first) if decided_here(Code(test, static=True), frame) else value


def _in_modules(node: ast.expr, test: Value, frame: Frame, config: Any) -> list[Any]:
    """Return a static value in a config, of each module of the class.

    Raises:
        Untranslatable: it cannot be evaluated.
    """
    known = [(key, value) for key, value in frame.env.values.items() if isinstance(value, Config)]
    configs = {key: value.obj for key, value in known if value.copy is None}
    names = {**frame.source.namespace, "config": config, **configs, **_settings(frame)}
    own: list[Any] = [] if frame.cls is None else [*frame.translator.modules_of(frame.cls.cls)]
    try:
        code = ast.unparse(written_out(test.code(), frame))
        return [eval(code, {**names, **_own_arguments(module, frame)}) for module in own or [None]]
    except Exception as error:
        raise Untranslatable(f"the condition {ast.unparse(node)}") from error


def _settings(frame: Frame) -> dict[str, Any]:
    """Return what this config has for the constructor's variables that come from it."""
    known = frame.env.values.items()
    return {key: value.value for key, value in known if isinstance(value, Setting)}


def same_number(left: Value, right: Value, frame: Frame) -> bool:
    """Whether two run-time values are the same code, variables that are assigned once written
    out, or are as many tokens.
    """
    if type(left) is not Code or type(right) is not Code:
        return False
    values = local_values(frame)
    one, other = (WrittenOut(values).visit(deepcopy(side.expr)) for side in (left, right))
    names = {item.id for item in ast.walk(one) if isinstance(item, ast.Name)}
    same = ast.dump(one) == ast.dump(other) and not names & stored_names(statements_of(frame))
    return same or as_many(left.expr, right.expr, statements_of(frame))


def is_of_config(expr: ast.expr) -> bool:
    """Whether code reads the config or an attribute of `self`, and nothing else."""
    names = {item.id for item in ast.walk(expr) if isinstance(item, ast.Name)} - {*_LOOK_UPS}
    calls = [item for item in ast.walk(expr) if isinstance(item, ast.Call)]
    plain = all(ast.unparse(item.func) in _LOOK_UPS for item in calls)
    return bool(names) and names <= {"self", "config"} and plain


_LOOK_UPS = ("getattr", "hasattr")


def _own_arguments(module: Any, frame: Frame) -> dict[str, Any]:
    """Return a module as `self`, and what it kept of its constructor's arguments under their own
    names.
    """
    if (
        frame.cls is None
        or frame.kind != "init"
        or (found := find_method(frame.cls.cls, "__init__")) is None
    ):
        return {"self": module}
    kept = [
        key
        for key in frame.env.values
        if _keeps(found[1], key) and isinstance(getattr(module, key, None), int)
    ]
    return {**{key: getattr(module, key) for key in kept}, "self": module}


def _keeps(node: ast.FunctionDef, key: str) -> bool:
    """Whether a constructor says `self.key = key` of an argument, and assigns neither anything
    else.
    """
    stores = [item for item in ast.walk(node) if isinstance(getattr(item, "ctx", None), ast.Store)]
    own = [item for item in stores if ast.unparse(item) in (key, f"self.{key}")]
    said = [
        item
        for item in ast.walk(node)
        if isinstance(item, ast.Assign) and ast.unparse(item.value) == key
    ]
    return len(own) == 1 and any(item.targets == own for item in said)


def absent_here(test: Value, made: Value, frame: Frame) -> bool:
    """Whether a module is made under a test that no layer of this config passes, and its class is
    nowhere; guarded.
    """
    if not (isinstance(made, Instance) and all(map(frame.translator.translates, made.classes))):
        return False
    if any(frame.translator.modules_of(cls) for cls in made.classes):
        return False
    return decided_here(test, frame) is False


def deciding(test: ast.expr, frame: Frame) -> tuple[list[ast.expr], bool]:
    """Return conditions, each true in this config, that together decide a static test, and its
    value.

    Raises:
        Untranslatable: the layers of this config differ in it.
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            reasons, value = deciding(operand, frame)
            return reasons, not value
        case ast.BoolOp(op=op, values=values):
            return _of_several(isinstance(op, ast.Or), values, frame)
        case ast.Compare(
            left=ast.Name(id=key),
            ops=[ast.Is() | ast.IsNot() as op],
            comparators=[ast.Constant(None)],
        ):
            if (made_if := _made_if(key, frame)) is not None:
                reasons, value = deciding(made_if, frame)
                return reasons, value is isinstance(op, ast.IsNot)
        case ast.Compare(
            ops=[ast.In()], comparators=[ast.Attribute(value=ast.Name(id="config")) as listed]
        ):
            if frame.translator.decide(listed, Code(listed, static=True), frame) is False:
                return [ast.UnaryOp(ast.Not(), listed)], False  # nothing is in an empty list
    expr = _source_of(test, frame)
    value = frame.translator.decide(expr, Code(expr, static=True), frame)
    return [expr if value else ast.UnaryOp(ast.Not(), expr)], value


def _made_if(key: str, frame: Frame) -> ast.expr | None:
    """Return the test of a variable's only assignment `key = x if test else None`."""
    stores = [
        item
        for item in frame.out
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == key
    ]
    match [item.value for item in stores]:
        case [ast.IfExp(test=test, body=body, orelse=ast.Constant(value=None))] if not isinstance(
            body, ast.Constant
        ):
            return test
    return None


def _of_several(stop: bool, values: list[ast.expr], frame: Frame) -> tuple[list[ast.expr], bool]:
    """`and` is decided by its first false part, `or` by its first true one, else by all."""
    reasons: list[ast.expr] = []
    for item in values:
        own, value = deciding(item, frame)
        if value is stop:
            return own, stop
        reasons += own
    return reasons, not stop


def written_out(expr: ast.expr, frame: Frame) -> ast.expr:
    """Return an expression with the values of local variables in place of these, as far as each
    has one: in a constructor of all, elsewhere of those that come from the config.
    """
    values, known = local_values(frame), frame.env.values
    if frame.kind != "init":
        values = {key: made for key, made in values.items() if _is_static(known.get(key))}
    return WrittenOut(values).visit(deepcopy(expr))  # type: ignore[no-any-return]


def _is_static(value: Value | None) -> bool:
    return value is not None and value.is_static


def statements_of(frame: Frame) -> list[ast.stmt]:
    """Return what is left of the code so far, that around it first."""
    return [statement for body in (*frame.outer, frame.out) for statement in body]


def local_values(frame: Frame, more: Sequence[ast.stmt] = ()) -> dict[str, ast.expr]:
    """Return the values of the local variables that are assigned once, in what is left of the code
    or in further statements.
    """
    made = assigned(frame, more)
    return {key: each[0] for key, each in made.items() if len(each) == 1 and each[0] is not None}


def assigned(frame: Frame, more: Sequence[ast.stmt] = ()) -> dict[str, list[ast.expr | None]]:
    """Return what each local variable is assigned there, one by one; None is a part of a value, or what
    a turn leaves for the next.
    """
    made: dict[str, list[ast.expr | None]] = {key: [None] for key in _carried(frame)}
    for statement in (*statements_of(frame), *more):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                plain = isinstance(statement, ast.Assign) and statement.targets == [node]
                made.setdefault(node.id, []).append(statement.value if plain else None)  # type: ignore[attr-defined]
    return made


def _carried(frame: Frame) -> set[str]:
    """Return the variables from before a loop around that its body assigns."""
    turns = [(turn.node.body, turn.start) for turn in frame.turns if turn.start is not None]
    return {key for body, start in turns for key in stored_names(body) & start.values.keys()}


class WrittenOut(ast.NodeTransformer):
    """Writes values in the place of variables."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Write its value."""
        value = self.values.get(node.id)
        inner = WrittenOut({k: v for k, v in self.values.items() if k != node.id})
        return node if value is None else inner.visit(deepcopy(value))


def _source_of(expr: ast.expr, frame: Frame) -> ast.expr:
    """Return `config.x` for `self.config.x` and for an attribute `self.y` that `__init__` set to
    it.
    """
    assert frame.cls is not None
    expr = _PlainConfig().visit(deepcopy(written_out(expr, frame)))
    if frame.kind == "init" and frame.translator.specialised and isinstance(expr, ast.Compare):
        return _AsSet(frame.out).visit(expr)  # type: ignore[no-any-return]
    body = frame.out if frame.kind == "init" or frame.cls.init is None else frame.cls.init.body
    for statement in body:
        match statement:
            case ast.Assign(
                targets=[target], value=ast.Attribute(value=ast.Name(id="config")) as value
            ):
                if isinstance(expr, ast.Attribute) and ast.unparse(target) == ast.unparse(expr):
                    return value
    return expr


class _AsSet(ast.NodeTransformer):
    """Writes fields of the config in the place of own attributes that a constructor has set to them
    so far, and may set to something else later.
    """

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.fields: dict[str, ast.expr] = {}
        for statement in statements:
            match statement:
                case ast.Assign(targets=[ast.Attribute() as target], value=value):
                    own = attribute(target.value, target.attr)  # read, not assigned
                    self.fields[ast.unparse(target)] = value if _is_field(value) else own

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Write its value."""
        return deepcopy(self.fields.get(ast.unparse(node), node))


def _is_field(value: ast.expr) -> bool:
    """Whether a value is a field of the config, or what `getattr` finds for one."""
    match value:
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
            return is_of_config(value) and "self" not in ast.unparse(value)
    return isinstance(value, ast.Attribute) and ast.unparse(value).startswith("config.")


def of_config(test: ast.expr, frame: Frame) -> ast.expr:
    """Return a test of a module's attributes as one of the config's fields, where they are
    these.
    """
    changed: ast.expr = _OfConfig(frame).visit(deepcopy(test))
    return changed


class _OfConfig(ast.NodeTransformer):
    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return _source_of(node, self.frame)


class _PlainConfig(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return ast.Name("config", ast.Load()) if ast.unparse(node) == "self.config" else node


def side_here(node: ast.If, test: Value, frame: Frame) -> int:
    """Return which side of a static test this config takes, or else all layers of a small model, whose
    numbers decide it; 0 is the body.

    Raises:
        Untranslatable: neither tells.
    """
    try:
        return 0 if frame.translator.decide(node.test, test, frame) else 1
    except Untranslatable:
        if (index := _of_all_layers(node, frame)) is None:
            raise
        return index


def _of_all_layers(node: ast.If, frame: Frame) -> int | None:
    """Return the side of a condition beside which the constructors of a small model never come to the
    other; None where they come to both, or to neither.
    """
    program = frame.translator
    if frame.kind != "init" or frame.cls is None or not program.specialised:
        return None
    if not all(hasattr(each, "lineno") for each in (node, *node.body[:1], *node.orelse[:1])):
        return None  # it is no code of the repository's
    runs, file = lines_run(program.model, program.config), str(frame.source.path)
    came = [bool(side) and runs[file, side[0].lineno] > 0 for side in (node.body, node.orelse)]
    if not runs[file, node.lineno] or came[0] and (came[1] or not node.orelse):
        return None
    return 0 if came[0] else 1
