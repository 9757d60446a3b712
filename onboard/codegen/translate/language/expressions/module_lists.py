"""Lists of modules, and lists whose items are lists or tables of modules: `nn.ModuleList([attention,
mlp])` for each layer. Iterators over them: `modules = iter(modules)`, and `next(modules)`.
"""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

from torch import nn

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args, plain_call
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import (
    Closure,
    Instance,
    Made,
    Method,
    ModuleList,
    ModuleRows,
    ModuleTable,
    joined_ways,
)
from onboard.codegen.translate.language.trees.list_constructors import items_of_list
from onboard.codegen.translate.language.trees.syntax import Untranslatable, call, name
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Mapping, Value

_MODULE, _IN_ORDER = "_called_module", "_one_after_the_other"
Row = ModuleList | ModuleTable
_Parts = tuple[Instance | ModuleList, ...]


def parts_of(value: Value) -> _Parts | None:
    """Return the stretches of a list of modules; None for anything else, and for an empty one."""
    match value:
        case ModuleList(stretches=parts):
            return parts or (value,)
        case Items(items=items) if items and all(isinstance(item, Instance) for item in items):
            return tuple(item for item in items if isinstance(item, Instance))
    return None


def joined(parts: _Parts) -> ModuleList:
    """Return the list of modules that has these stretches."""
    made = parts[0].made if parts else ()
    for part in parts[1:]:
        made = joined_ways(made, part.made)
    elements = [
        element
        for part in parts
        for element in ([part.expr] if isinstance(part, Instance) else _elements(part.expr))
    ]
    return ModuleList(made, ast.List(elements, ast.Load()), parts)


def _elements(expr: ast.expr) -> list[ast.expr]:
    return expr.elts if isinstance(expr, ast.List) else [ast.Starred(expr, ast.Load())]


def one_of(owner: ModuleList | ModuleRows, index: Value) -> Instance | Row:
    """Return `modules[index]`, of the one class that is there, where that is known; of rows one."""
    place = ast.Subscript(owner.expr, index.code(), ast.Load())
    return owner.item(place) if isinstance(owner, ModuleRows) else _module_at(owner, index)


def _module_at(owner: ModuleList, index: Value) -> Instance:
    expr = ast.Subscript(owner.expr, index.code(), ast.Load())
    match index:
        case Known(value=int() as place):
            ahead = owner.stretches[: place + 1] if place >= 0 else owner.stretches[place:]
            count = place + 1 if place >= 0 else -place
            single = [part for part in ahead if isinstance(part, Instance)]
            if len(single) == len(ahead) == count:
                return Instance(single[-1 if place >= 0 else 0].made, expr)
    return Instance(owner.made, expr)


def module_table(expr: ast.expr, args: Args) -> ModuleTable | None:
    """Return `nn.ModuleDict({"key": module, ...})`; None where something else is in it."""
    match args:
        case Args(positional=[Mapping(items=entries)], keywords={}) if entries and all(
            isinstance(item, Instance | ModuleList | ModuleTable) for item in entries.values()
        ):
            return ModuleTable(entries, plain_call(expr, args).expr)
    return None


def named_in_sequence(expr: ast.expr, args: Args, frame: Frame) -> Instance | None:
    """Return `nn.Sequential(OrderedDict([("key", module), ...]))`, whose modules keep their names; None
    for one of modules without.

    Raises:
        Untranslatable: a module is of a class of the repository's.
    """
    match args.positional:
        case [Mapping(items=parts)] if parts and frame.translator.specialised:
            modules = [part for part in parts.values() if isinstance(part, Instance)]
        case _:
            return None
    own = any(frame.translator.translates(way.cls) for part in modules for way in part.made)
    if own or len(modules) < len(parts):
        raise Untranslatable("an nn.Sequential of a dict of more than modules of PyTorch's")
    frame.translator.remember_global("OrderedDict", OrderedDict, frame.source)
    pairs = [Items((Known(key), part)).code() for key, part in parts.items()]
    return Instance(
        (Made(nn.Sequential),), call(expr, call(name("OrderedDict"), ast.List(pairs, ast.Load())))
    )


def table_method(owner: ModuleTable, attr: str, args: Args, frame: Frame) -> Value | None:
    """Return what `keys`, `values` or `items` of an nn.ModuleDict gives, or `update`, which adds to
    it.
    """
    if attr == "update":
        return NONE if _grown(owner, args, frame) else None
    pairs = [Items((Known(key), owner.entry(key))) for key in owner.entries]
    if attr == "items":
        return Items(tuple(pairs))
    place = {"keys": 0, "values": 1}.get(attr)
    return None if place is None else Items(tuple(pair.items[place] for pair in pairs))


def _grown(owner: ModuleTable, args: Args, frame: Frame) -> bool:
    """Execute `modules.update({"key": module, ...})` of a constructor's nn.ModuleDict; return whether
    it was one.
    """
    more = module_table(owner.expr, args)
    places = [key for key, value in frame.env.values.items() if value is owner]
    if more is None or frame.kind != "init" or len(places) != 1:
        return False
    path = ast.parse(places[0], mode="eval").body
    for key, module in more.entries.items():
        place = ast.Subscript(path, ast.Constant(key), ast.Store())
        frame.emit(ast.Assign([place], module.code()))
    frame.env.values[places[0]] = replace(owner, entries={**owner.entries, **more.entries})
    return True


def module_copy(expr: ast.expr, args: Args, frame: Frame) -> Value | None:
    """Return `copy.deepcopy(module)` in a constructor: another module made in the same way, whose
    weights are its own, or a copy where that needs what is not at hand; None for anything else.
    """
    match args.positional:
        case [Instance(expr=ast.Call()) | ModuleList(expr=ast.Call() | ast.ListComp()) as made]:
            return made
        case [Instance(made=(way,)) as given] if (
            frame.kind == "init" and frame.translator.translates(way.cls)
        ):
            code = [node for value in way.arguments.values() for node in ast.walk(value.code())]
            if {node.id for node in code if isinstance(node, ast.Name)} - frame.env.values.keys():
                return replace(given, expr=plain_call(expr, args).expr)
            return frame.translator.construct(way.cls, Args([], dict(way.arguments), []))
    return None


def slice_modules(owner: ModuleList, part: ast.Slice, frame: Frame) -> Value:
    """`layers[: config.num_hidden_layers]` is `layers` where the list has exactly that many."""
    if part.lower is None and part.step is None and part.upper is not None:
        upper = ast.unparse(part.upper)
        if upper.endswith("config.num_hidden_layers") or _is_length(owner, upper, frame):
            return owner
    bounds = [
        None if item is None else frame.evaluate(item)
        for item in (part.lower, part.upper, part.step)
    ]
    codes = [None if bound is None else bound.code() for bound in bounds]
    expr = ast.Subscript(owner.expr, ast.Slice(*codes), ast.Load())
    left = owner.stretches if bounds[2] is None else ()
    for bound, is_lower in ((bounds[0], True), (bounds[1], False)):
        left = () if bound is not None and not left else _without(left, bound, is_lower)
    return joined_at(left, expr) if left else ModuleList(owner.made, expr)


def joined_at(parts: _Parts, expr: ast.expr) -> ModuleList:
    """Return the list of these stretches that lies at a place."""
    return ModuleList(joined(parts).made, expr, parts)


def one_after_the_other(owner: ModuleList, frame: Frame) -> Closure:
    """Return the function that calling an nn.Sequential is: each module gets what the one before it
    gives.

    Raises:
        Untranslatable: where its single modules and its list of alike ones lie is not known.
    """
    seen: dict[str, Value] = {}
    body: list[ast.stmt] = []
    for number, part in enumerate(_places(owner)):
        key = f"part_{number}"
        seen[key] = part
        if isinstance(part, Instance):
            body += ast.parse(f"hidden_states = {key}(hidden_states)").body
        else:
            body += ast.parse(f"for layer in {key}:\n    hidden_states = layer(hidden_states)").body
    [node] = ast.parse("def run(hidden_states):\n    return hidden_states").body
    assert isinstance(node, ast.FunctionDef)
    node.body = [*body, *node.body]
    return Closure(node, frame.source, seen)


def as_function(module: Instance) -> Closure | None:
    """Return the forward of a module of one class as a function of its other parameters, which may
    take functions as it can be written where it is called; None for one that asks for its base.
    """
    (cls,) = module.classes
    found = find_method(cls, "forward")
    if found is None or (node := _without_itself(found[1])) is None:
        return None
    return Closure(node, module_source(found[0].__module__), {_MODULE: module})


def _without_itself(method: ast.FunctionDef) -> ast.FunctionDef | None:
    """Return a method as a function that knows its module by another name; None for one that asks
    for its base, or takes no module.
    """
    if not method.args.args:
        return None
    node = deepcopy(method)
    own = node.args.args.pop(0).arg
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id == "super":
            return None
        if isinstance(item, ast.Name) and item.id == own:
            item.id = _MODULE
    return node


def is_own_list(cls: type, frame: Frame) -> bool:
    """Whether a class of a repository's code is a list of modules, or of those that run one after the
    other.
    """
    if not frame.translator.specialised or not frame.translator.translates(cls):
        return False
    return issubclass(cls, nn.ModuleList | nn.Sequential)


def items_in(cls: type, args: Args, frame: Frame) -> Args:
    """Return what nn.ModuleList is given for `cls(*args)`, a list of its own class."""
    found = find_method(cls, "__init__")
    if found is None or found[0] in (nn.ModuleList, nn.Sequential):
        apart = issubclass(cls, nn.Sequential) and not args.stars
        return Args([Items(tuple(args.positional))], {}, []) if apart else args
    items = Closure(items_of_list(cls, found[1]), module_source(found[0].__module__), {})
    return Args([frame.translator.call_closure(items, args, frame)], {}, [])


def own_method(owner: ModuleList, attr: str, frame: Frame) -> Closure | None:
    """Return a method of a list of its own class as a function of its other parameters; None for
    one of PyTorch's.
    """
    found = None if owner.own is None else find_method(owner.own, attr)
    if found is None or found[0].__module__.startswith("torch."):
        return None
    method, seen = found[1], dict[str, Value]({_MODULE: owner})
    if issubclass(found[0], nn.Sequential):
        method = _InOrder().visit(deepcopy(method))
        seen[_IN_ORDER] = one_after_the_other(owner, frame)
    node = _without_itself(method)
    if node is None:
        raise Untranslatable(f"{found[0].__name__}.{attr}, which asks for its base")
    return Closure(node, module_source(found[0].__module__), seen)


class _InOrder(ast.NodeTransformer):
    """Puts the function that nn.Sequential is in the place of `super().forward`."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="forward"):
                return ast.copy_location(name(_IN_ORDER), node)
        self.generic_visit(node)
        return node


def attribute_of_list(owner: ModuleList, attr: str) -> Value:
    """Return an attribute of a list of modules: a method, or whether it is trained.

    Raises:
        Untranslatable: it is something that a constructor keeps, which nn.ModuleList does not have.
    """
    if owner.own is not None and attr == "training":
        return Known(False)
    if owner.own is not None and not hasattr(owner.own, attr):
        raise Untranslatable(f"{owner.own.__name__}.{attr}, what a list of modules keeps")
    return Method(owner, attr)


def _places(owner: ModuleList) -> Iterator[Instance | ModuleList]:
    """Yield the stretches of a list of modules by their places in it."""
    parts = parts_of(owner) or ()
    lists = [place for place, part in enumerate(parts) if isinstance(part, ModuleList)]
    if len(lists) > 1:
        raise Untranslatable("a call of modules that run one after the other, of several lists")
    ahead = lists[0] if lists else len(parts)
    yield from (_module_at(owner, Known(place)) for place in range(ahead))
    if lists:
        behind = len(parts) - ahead - 1
        bounds = (ast.Constant(ahead) if ahead else None, _negative(behind) if behind else None)
        among = ast.Subscript(owner.expr, ast.Slice(*bounds), ast.Load())
        yield ModuleList(parts[ahead].made, among if ahead or behind else owner.expr)
        yield from (_module_at(owner, Known(-place)) for place in range(behind, 0, -1))


def _negative(number: int) -> ast.expr:
    return ast.UnaryOp(ast.USub(), ast.Constant(number))


def _without(parts: _Parts, bound: Value | None, is_lower: bool) -> _Parts:
    """Return the stretches behind the first modules, `[n:]`, or before the last ones, `[:-n]`; none
    where that cannot be told.
    """
    match bound:
        case None:
            return parts
        case Known(value=int() as place) if (place >= 0) is is_lower:
            count = abs(place)
            gone = parts[:count] if is_lower else parts[len(parts) - count :]
            if all(isinstance(part, Instance) for part in gone):
                return parts[count:] if is_lower else parts[: len(parts) - count]
    return ()


def _is_length(owner: ModuleList, field: str, frame: Frame) -> bool:
    """Whether a list of `self` is made with one module for each number in `range(field)`."""
    init = frame.cls.init.body if frame.cls is not None and frame.cls.init is not None else []
    for statement in init:
        match statement:
            case ast.Assign(
                targets=[target], value=ast.Call(args=[ast.ListComp(generators=[loop])])
            ):
                made = call(name("range"), ast.parse(field.removeprefix("self."), mode="eval").body)
                if ast.unparse(target) == ast.unparse(owner.expr) and ast.unparse(
                    loop.iter
                ) == ast.unparse(made):
                    return not loop.ifs
    return False


def is_row(value: Value) -> bool:
    """Whether a value is a list or table of single modules, which may be one of many alike."""
    match value:
        case ModuleList(stretches=parts):
            return bool(parts) and all(isinstance(part, Instance) for part in parts)
        case ModuleTable(entries=entries):
            return all(isinstance(entry, Instance) for entry in entries.values())
    return False


def with_row(owner: ModuleList | ModuleRows, row: Row) -> ModuleRows:
    """Return a list to which a row is added; its rows are put together alike.

    Raises:
        Untranslatable: they are not.
    """
    if isinstance(owner, ModuleList):
        if owner.made:
            raise Untranslatable("a list of modules and of lists of modules")
        return ModuleRows(row, owner.expr)
    return ModuleRows(_either(owner.row, row), owner.expr)


def _either(one: Row, other: Row) -> Row:
    """Return a row whose modules are made in the ways of either of two."""
    match one, other:
        case ModuleList(stretches=parts), ModuleList(stretches=others) if len(parts) == len(others):
            stretches = tuple(map(_joined, parts, others))
            return ModuleList(joined_ways(one.made, other.made), one.expr, stretches)
        case ModuleTable(entries=entries), ModuleTable(entries=others) if (
            entries.keys() == others.keys()
        ):
            return replace(
                one, entries={key: _joined(entries[key], others[key]) for key in entries}
            )
    raise Untranslatable("lists of modules in a list, of several lengths")


def _joined(one: Value, other: Value) -> Instance:
    assert isinstance(one, Instance)
    assert isinstance(other, Instance)
    return Instance(joined_ways(one.made, other.made), one.expr, one.optional or other.optional)


def modules_of_row(row: Value | None) -> Items | None:
    """Return the modules of a short list, one by one; None for a list of another length each time,
    and for anything else.
    """
    if not isinstance(row, ModuleList) or not is_row(row):
        return None
    return Items(tuple(_module_at(row, Known(place)) for place in range(len(row.stretches))))


@dataclass(frozen=True, eq=False)
class ModuleIterator(Code):
    """An iterator over modules that are made in the given ways."""

    made: tuple[Made, ...] = ()

    def truth(self) -> bool:
        """Return that an iterator counts as true."""
        return True


def begun(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return `iter(...)`."""
    called = plain_call(expr, args, args.static())
    match args.positional:
        case [ModuleList(made=made)]:
            return ModuleIterator(called.expr, made=made)
    return called


def taken(expr: ast.expr, args: Args, frame: Frame) -> Value:
    """Return `next(...)`: a module, where it is one of an iterator over modules."""
    called = plain_call(expr, args, args.static())
    match args.positional:
        case [ModuleIterator(expr=ast.Name(), made=made)]:
            return Instance(made, called.expr)
        case [ModuleIterator(), *_]:
            raise Untranslatable("next() of modules that may have come to their end")
    return called
