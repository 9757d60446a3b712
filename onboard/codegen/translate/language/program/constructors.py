"""Constructor calls; constructors that pass what they are given on to their base:
`super().__init__(*args, **kwargs)`.
"""

from __future__ import annotations

import ast
import inspect
from copy import deepcopy
from functools import cache

from torch import nn

from onboard.analysis.blocks.wrapper_classes import class_given
from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args, spread
from onboard.codegen.translate.language.frame import Frame, Program
from onboard.codegen.translate.language.object_values import Global, Instance, Made, ModuleList
from onboard.codegen.translate.language.partial_classes import Partial, class_of
from onboard.codegen.translate.language.program.argument_facts import bind, default_nodes
from onboard.codegen.translate.language.trees.skips import returns, without_returns
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Items, Value

_Found = tuple[type, ast.FunctionDef]


def constructor_of(cls: type, specialised: bool) -> _Found | None:
    """Return the class whose constructor a class has, and its definition, which returns at its end
    alone; in code of repositories with the base's parameters by name, where it takes any for the
    base.
    """
    return _spelled_out(cls) if specialised else _to_its_end(cls)


@cache
def _spelled_out(cls: type) -> _Found | None:
    found = _to_its_end(cls)
    if found is None or (made := _with_parameters_of_base(cls, *found)) is None:
        return found
    return found[0], made


@cache
def _to_its_end(cls: type) -> _Found | None:
    found = find_method(cls, "__init__")
    if found is None or not any(map(returns, found[1].body)):
        return found
    owner, node = found[0], deepcopy(found[1])
    node.body = without_returns(node.body)
    return owner, node


def _with_parameters_of_base(
    cls: type, owner: type, node: ast.FunctionDef
) -> ast.FunctionDef | None:
    node = deepcopy(node)
    others = [item.arg for item in (node.args.vararg, node.args.kwarg) if item is not None]
    calls = [item for item in ast.walk(node) if _passes_on(item, set(others))]
    read = [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id in others]
    rest = cls.__mro__[cls.__mro__.index(owner) + 1 :]
    base = next(each for each in rest if "__init__" in vars(each))
    if not others or len(calls) != 1 or len(read) != len(others) or not _has_parameters(base):
        return None
    (made,) = calls
    assert isinstance(made, ast.Call)
    given = [item for item in made.args if not isinstance(item, ast.Starred)]
    named = [item for item in made.keywords if item.arg is not None]
    parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
    left = parameters[len(given) :] if node.args.vararg else parameters
    left = [item for item in left if item.name not in {each.arg for each in named}]
    own = {item.arg for item in (*node.args.args, *node.args.kwonlyargs)}
    if own & {item.name for item in left} or (len(given) != 0 and node.args.vararg is None):
        return None
    made.args = given
    made.keywords = named + [
        ast.keyword(item.name, ast.Name(item.name, ast.Load())) for item in left
    ]
    by_place = node.args.vararg is not None and not node.args.defaults
    node.args.vararg = node.args.kwarg = None
    for item in left:
        defaults = [] if item.default is item.empty else [ast.Constant(item.default)]
        if defaults and not by_place:
            node.args.kwonlyargs.append(ast.arg(item.name))
            node.args.kw_defaults += defaults
        else:
            node.args.args.append(ast.arg(item.name))
            node.args.defaults += defaults
    return ast.fix_missing_locations(node)


def _passes_on(node: ast.AST, others: set[str]) -> bool:
    """Whether a node is `super().__init__(...)` with `*args` and `**kwargs` of these names."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"),
            args=args,
            keywords=keywords,
        ):
            stars = [item.value for item in args if isinstance(item, ast.Starred)]
            stars += [item.value for item in keywords if item.arg is None]
            return {ast.unparse(item) for item in stars} == others
    return False


def _has_parameters(base: type) -> bool:
    """Whether a class is a module whose constructor says what it takes, plain values by default."""
    if not issubclass(base, nn.Module) or base is nn.Module:
        return False
    items = list(inspect.signature(base.__init__).parameters.values())[1:]
    return all(
        item.kind is item.POSITIONAL_OR_KEYWORD
        and (
            item.default is item.empty or isinstance(item.default, bool | int | float | str | None)
        )
        for item in items
    )


def construct(translator: Program, cls: type, args: Args) -> Instance:
    """Return the module that `cls(*args)` makes."""
    found = constructor_of(cls, translator.specialised)
    if found is None or args.stars:
        raise Untranslatable(f"the constructor of {cls.__name__}")
    owner, node = found
    bound, rest = bind(node, args, method=True)
    vararg = node.args.vararg
    if vararg is not None and not bound.pop(vararg.arg).equals(Items(())):
        raise Untranslatable(f"a constructor of {cls.__name__} with *{vararg.arg}")
    if translator.specialised:
        source = module_source(owner.__module__)
        bound = _default_classes(node, Frame(translator, source, "function")) | bound
        _refuse_clash(node, bound)
    return _module_made(cls, bound, rest)


def _module_made(cls: type, bound: dict[str, Value], rest: dict[str, Value]) -> Instance:
    """Return the module that a class makes of arguments, those for `**kwargs` apart; a wrapper is
    of the class that it has with what it is given.
    """

    def is_given(parameter: str, part: type) -> bool:
        match bound.get(parameter):
            case Instance(classes=classes):
                return classes == (part,)
            case Global() | Partial() as handed:
                return class_of(handed) is part
            case ModuleList():
                return issubclass(part, nn.ModuleList | nn.Sequential)
        return False

    cls = class_given(cls, is_given)
    given = bound | {key: value for key, value in rest.items() if value.is_static}
    keywords = [ast.keyword(key, value.code()) for key, value in spread(given).items()]
    return Instance((Made(cls, bound | rest),), ast.Call(name(cls.__name__), [], keywords))


def _default_classes(node: ast.FunctionDef, frame: Frame) -> dict[str, Value]:
    """Return the classes of modules that are defaults of a constructor, by parameter."""
    made = {
        key: _value_of_default(item, frame)
        for key, item in default_nodes(node).items()
        if isinstance(item, ast.Name | ast.Attribute | ast.Call)
    }
    return {key: value for key, value in made.items() if value and class_of(value) is not None}


def _value_of_default(node: ast.expr, frame: Frame) -> Value | None:
    """Return a default; None for one that is no class of modules, since it has no translation."""
    try:
        return frame.evaluate(node)
    except Untranslatable:
        return None


def _refuse_clash(node: ast.FunctionDef, bound: dict[str, Value]) -> None:
    """Raise `Untranslatable` where a constructor has a name already that an argument of a partial
    class gets.
    """
    named = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
    named |= {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    if clash := named & (spread(bound).keys() - bound.keys()):
        raise Untranslatable(f"a constructor with {min(clash)} besides a partial class")
