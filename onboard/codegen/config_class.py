"""The config class of a repository, written anew: its defaults and its arithmetic, and nothing else
of its code.
"""

from __future__ import annotations

import ast
import textwrap
from typing import Any

from transformers import PretrainedConfig

from onboard.analysis.source import class_node, find_method, module_source
from onboard.codegen.config_checks import leaves_something
from onboard.codegen.config_constructors import (
    constructor_of,
    defaults_beside,
    without_positional,
)
from onboard.codegen.config_helpers import body_with, written_out
from onboard.codegen.config_parts import OF_ATTENTION, is_part, parts_made, unread_fields
from onboard.errors import OnboardError
from onboard.hf.old.config_arguments import ByPosition, given_by_position, is_of_base
from onboard.hf.old.own_configs import LENT, is_of_transformers, is_own_of_transformers
from onboard.plain_config import OldFields

_FUNCTIONS = {
    "len",
    "int",
    "float",
    "bool",
    "str",
    "min",
    "max",
    "range",
    "list",
    "dict",
    "tuple",
    "isinstance",
    "abs",
    "enumerate",
    "zip",
    "sum",
    "any",
    "all",
    "sorted",
    "round",
}
_SAYING = ("logger.", "warnings.", "rope_config_validation", "layer_type_validation", "print")
"""Calls that check or say something, and leave nothing."""
_METHODS = {"get", "pop", "copy", "items", "keys", "values", "lower", "setdefault"}
_METHODS |= {"append", "extend"}
_EXPRESSIONS = (
    *(
        ast.Constant,
        ast.Name,
        ast.Attribute,
        ast.BinOp,
        ast.UnaryOp,
        ast.BoolOp,
        ast.Compare,
        ast.IfExp,
        ast.Dict,
    ),
    *(
        ast.List,
        ast.Tuple,
        ast.Set,
        ast.Subscript,
        ast.Slice,
        ast.ListComp,
        ast.GeneratorExp,
        ast.comprehension,
        ast.Starred,
    ),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context, ast.keyword),
)
_INHERITED: Any = ast.parse("def __init__(self, **kwargs): super().__init__(**kwargs)").body[0]
_CLASS_VALUES = ("model_type", "attribute_map", "keys_to_ignore_at_inference")


def plain_config_class(config_class: type[PretrainedConfig]) -> str:
    """Return the text of a class of the same name that makes the same values of the same arguments,
    behind those of configs of its own that it makes.

    Raises:
        OnboardError: the constructor does something else than assign values computed from its
            arguments.
    """
    base = _base(config_class)
    above = [] if is_of_transformers(base) else [plain_config_class(base)]
    if is_own_of_transformers(config_class.__name__):
        whose, methods = f"transformers' {base.__name__}", []
        values = _class_values(config_class, set(_CLASS_VALUES[:1]))
    else:
        whose, methods = f"the repository's {config_class.__name__}", _methods(config_class)
        values = _class_values(config_class, _named_in(config_class))
        beside = defaults_beside(class_node(config_class))
        values |= {key: vars(config_class).get(key, value) for key, value in beside.items()}
        values |= vars(config_class).get(LENT, {})
    body = [f'"""What config.json says, with the defaults of {whose}."""', ""]
    body += [f"{key} = {value!r}" for key, value in values.items()]
    body += [line for method in methods for line in ("", *method.splitlines())]
    bases = "PlainConfig" if base is PretrainedConfig else f"OldFields, {base.__name__}"
    bases = base.__name__ if above else bases
    text = "\n".join(
        [
            f"class {config_class.__name__}({bases}):",
            *("    " + line if line else "" for line in body),
        ]
    )
    inside = [plain_config_class(each) for each in parts_made(config_class, text)]
    return "\n\n\n".join([*inside, *above, text])


def base_of_transformers(config_class: type[PretrainedConfig]) -> type[PretrainedConfig]:
    """Return the config class of transformers that a class is made of, maybe by way of others of
    its own: `PretrainedConfig`, or a model's.

    Raises:
        OnboardError: a class has no config class, or another class besides, as its base.
    """
    base = _base(config_class)
    return base if is_of_transformers(base) else base_of_transformers(base)


def _base(config_class: type[PretrainedConfig]) -> type[PretrainedConfig]:
    bases = [
        base for base in config_class.__bases__ if not issubclass(base, OldFields | ByPosition)
    ]
    if len(bases) != 1 or not issubclass(bases[0], PretrainedConfig):
        raise _refusal(config_class, "it has other bases than one config class")
    return bases[0]


def _methods(config_class: type[PretrainedConfig]) -> list[str]:
    """Return the text of the constructor, if there is one, and of the properties that compute a
    value.
    """
    writer = _Writer(config_class)
    source = module_source(config_class.__module__)
    own = constructor_of(class_node(config_class))
    if own is None and "__init__" not in vars(config_class):  # transformers would make it one
        own = _INHERITED
    written = None if own is None else written_out(own, source.functions, source.namespace)
    made = [] if written is None else [writer.constructor(written)]
    return [*(ast.unparse(ast.fix_missing_locations(node)) for node in made), *writer.properties()]


def _named_in(config_class: type) -> set[str]:
    return {
        target.id
        for node in class_node(config_class).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _class_values(config_class: type[PretrainedConfig], named: set[str]) -> dict[str, Any]:
    """Return the class attributes that matter, those that are literals."""
    values = {
        key: getattr(config_class, key)
        for key in _CLASS_VALUES
        if key in named or key in vars(config_class)
    }
    if vars(config_class).get("tie_word_embeddings") is True:
        values["tie_word_embeddings"] = True
    return values


def _refusal(config_class: type, reason: str) -> OnboardError:
    return OnboardError(
        f"the config class {config_class.__name__} cannot be written anew: {reason}"
    )


class _Writer:
    """Keeps of a constructor what assigns values; checks and messages go."""

    def __init__(self, config_class: type[PretrainedConfig]) -> None:
        self.config_class = config_class
        self.unread = unread_fields(config_class)
        self.taken: set[str] = set()
        self.bound: set[str] = set()

    def constructor(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Return the constructor without annotations, checks and messages."""
        node = without_positional(node)
        if node.args.vararg is not None or node.decorator_list:
            raise self._refuse(node)
        defaults = [self._literal(item) for item in node.args.defaults]
        kw_defaults = [
            None if item is None else self._literal(item) for item in node.args.kw_defaults
        ]
        for default in (*defaults, *kw_defaults):
            if default is not None:
                self._check(default)
        plain = [ast.arg(item.arg) for item in node.args.args]
        keywords = [ast.arg(item.arg) for item in node.args.kwonlyargs]
        self.taken = {item.arg for item in (*plain, *keywords)}
        self.bound = _names_set(node.body)
        rest = ast.arg(node.args.kwarg.arg) if node.args.kwarg else None
        arguments = ast.arguments([], plain, None, keywords, kw_defaults, rest, defaults)
        return ast.FunctionDef(
            "__init__", arguments, self._block(node.body), [], ast.Constant(None), None
        )

    def _literal(self, default: ast.expr) -> ast.expr:
        """Return a default, a constant of the module written out."""
        if not isinstance(default, ast.Name):
            return default
        values = [
            item.value
            for item in module_source(self.config_class.__module__).tree.body
            if isinstance(item, ast.Assign | ast.AnnAssign)
            and item.value is not None
            and ast.unparse(item.targets[-1] if isinstance(item, ast.Assign) else item.target)
            == default.id
        ]
        return values[-1] if values else default

    def properties(self) -> list[str]:
        """Return the text of the properties that compute a value; others nothing can read."""
        found = [
            node
            for node in class_node(self.config_class).body
            if isinstance(node, ast.FunctionDef)
            and [ast.unparse(item) for item in node.decorator_list] == ["property"]
            and node.name != OF_ATTENTION
        ]
        return [text for node in found if (text := self._property(node)) is not None]

    def _property(self, node: ast.FunctionDef) -> str | None:
        match [item for item in node.body if not _is_text(item)]:
            case [*before, ast.Return(value=ast.expr() as value) as end]:
                try:
                    self._check(value)
                    body = [*self._block(before), end]
                except OnboardError:
                    return None
                lines = (ast.unparse(ast.fix_missing_locations(item)) for item in body)
                inside = textwrap.indent("\n".join(lines), "    ")
                return f"@property\ndef {node.name}(self):\n{inside}"
        return None

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return [kept for item in statements for kept in self._statement(item)]

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case (
                ast.Expr(value=ast.Constant())
                | ast.Assert()
                | ast.Pass()
                | ast.Raise()
                | ast.Import()
                | ast.ImportFrom()
            ):
                return []
            case ast.Expr(value=ast.Call() as called):
                return self._call_statement(node, called)
            case ast.Assign(targets=[target]) if ast.unparse(target) in self.unread:
                return []
            case ast.Assign(targets=targets, value=value):
                return self._assigned(targets, self._with_defaults(value))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._check(value, target)
                return [ast.Assign([target], value)]
            case ast.AugAssign(target=target, value=value):
                self._check(value, target)
                return [node]
            case ast.For(target=target, iter=items, body=body, orelse=[]):
                self._check(items, target)
                return [ast.For(target, items, kept, [])] if (kept := self._block(body)) else []
            case ast.Try(body=body, orelse=[], finalbody=[]) if not self._block(body):
                return [kept for item in node.handlers for kept in self._block(item.body)]
            case ast.Delete(targets=[ast.Name()]):
                return []
            case ast.Delete(targets=[ast.Subscript(value=ast.Name()) as item]):
                self._check(item)
                return [
                    ast.Expr(
                        ast.Call(ast.Attribute(item.value, "pop", ast.Load()), [item.slice], [])
                    )
                ]
            case ast.For(
                target=ast.Name() as target, iter=ast.List() as over, body=body, orelse=[]
            ):
                kept = self._block(body)
                self._check(over)
                return [ast.For(target, over, kept, [])] if kept else []
            case ast.If(test=test, body=body, orelse=orelse):
                return self._if(test, self._branch(body), self._branch(orelse))
        raise self._refuse(node)

    def _branch(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Keep what a condition decides; where it cannot be written, refuse the configs that it is
        decided so for.
        """
        try:
            return self._block(statements)
        except OnboardError as error:
            return ast.parse(f"raise ValueError({str(error)!r})").body

    def _if(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> list[ast.stmt]:
        if not body and not orelse:
            return []
        self._check(test)
        return [ast.If(test, body or [ast.Pass()], orelse)]

    def _call_statement(self, node: ast.Expr, called: ast.Call) -> list[ast.stmt]:
        """Keep the call of the base class and what methods of the class's own leave; checks and
        messages leave nothing.
        """
        text = ast.unparse(called.func)
        if is_of_base(called):
            names = given_by_position(called, self.config_class)
            named = [
                ast.keyword(name, value) for name, value in zip(names, called.args, strict=False)
            ]
            called.args, called.keywords = called.args[len(named) :], [*named, *called.keywords]
            self._check(*called.args, *(item.value for item in called.keywords))
            called.func = ast.parse("super().__init__", mode="eval").body
            return [*self._given_up(called), node]
        if text.startswith(_SAYING):
            return []
        if isinstance(called.func, ast.Attribute) and called.func.attr in _METHODS:
            self._check(called)
            return [node]
        match called.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return self._own_method(node, called, attr)
        raise self._refuse(node)

    def _given_up(self, called: ast.Call) -> list[ast.stmt]:
        """Drop from the other arguments what the base class is told in another way: a config that
        is saved has it, too.
        """
        others = [ast.unparse(item.value) for item in called.keywords if item.arg is None]
        told = [item.arg for item in called.keywords if item.arg and item.arg not in self.taken]
        return [ast.parse(f"{rest}.pop({key!r}, None)").body[0] for rest in others for key in told]

    def _own_method(self, node: ast.Expr, called: ast.Call, name: str) -> list[ast.stmt]:
        """Return what a method leaves in attributes: nothing, if it only checks."""
        found = find_method(self.config_class, name)
        if found is None:
            raise self._refuse(node)
        owner, method = found
        checks = name.startswith("validate") and is_of_transformers(owner)
        if checks or not leaves_something(self.config_class, method, frozenset({name})):
            return []
        source = module_source(self.config_class.__module__)
        body = body_with(written_out(method, source.functions, source.namespace), called)
        if owner is not self.config_class or body is None:
            raise self._refuse(node)
        return self._block(body)

    def _assigned(self, targets: list[ast.expr], value: ast.expr) -> list[ast.stmt]:
        """Keep an assignment of a value; where a method of the class's own returns it, behind what
        that does.
        """
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attr)):
                found = find_method(self.config_class, attr)
                body = body_with(found[1], value) if found is not None else None
            case _:
                body = None
        match body:
            case [*before, ast.Return(value=ast.expr() as last)] if not _names_set(before) & (
                self.taken | self.bound
            ):
                return [*self._block(before), *self._assigned(targets, last)]
        self._check(value, *targets)
        return [ast.Assign(targets, value)]

    def _with_defaults(self, value: ast.expr) -> ast.expr:
        """Return `{**defaults, **given}` for a method that adds the items of one dict to another,
        known by what it makes of two.
        """
        match value:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=attr),
                args=[given, ast.Name() as defaults],
                keywords=[],
            ) if _adds_items(getattr(self.config_class, attr, None)):
                return ast.Dict([None, None], [self._literal(defaults), given])
        return value

    def _check(self, *roots: ast.expr) -> None:
        """Refuse an expression that could do more than compute a value."""
        for node in (item for root in roots for item in ast.walk(root)):
            match node:
                case ast.Call(func=ast.Name(id=function)) if function in _FUNCTIONS:
                    continue
                case ast.Call(func=ast.Name(id=function)) if is_part(self.config_class, function):
                    continue
                case ast.Call(func=ast.Attribute(attr=method)) if method in _METHODS:
                    continue
                case ast.Call(func=ast.Attribute(value=ast.Name(id="math"))):
                    continue
                case ast.Call(
                    func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str() as key), *_]
                ) if _is_plain(key):
                    continue
                case ast.Name(id=key) | ast.Attribute(attr=key) if not _is_plain(key):
                    raise self._refuse(node)
                case _ if not isinstance(node, _EXPRESSIONS):
                    raise self._refuse(node)

    def _refuse(self, node: ast.AST) -> OnboardError:
        return _refusal(
            self.config_class, f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)[:60]!r}"
        )


def _names_set(statements: list[ast.stmt]) -> set[str]:
    """Return the variables that statements set."""
    names = (node for item in statements for node in ast.walk(item) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _adds_items(method: Any) -> bool:
    """Whether a method, which needs no object, adds those items to a dict that it lacks."""
    try:
        return bool(
            method(None, {"a": 1, "b": None}, {"b": 2, "c": 3}) == {"a": 1, "b": None, "c": 3}
        )
    except Exception:  # whatever a method of another kind raises
        return False


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_plain(name: str) -> bool:
    return not name.startswith("__")
