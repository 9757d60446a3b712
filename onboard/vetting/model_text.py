"""A look at the text of a generated model file: it computes with tensors, and reaches nothing else.

Everything that is not on a list is refused: statements, names, what is had of modules and objects,
imports. So nobody has to think of all that could do harm.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NoReturn

from onboard.errors import OnboardError
from onboard.vetting import allowed_names

MOST = 2**19
"""Bytes of the longest text that is parsed: a parser takes thousands of times as much memory."""
_BINDINGS = (ast.FunctionDef, ast.ClassDef)
_STATEMENTS = (
    *(ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Expr),
    *(ast.Assert, ast.Raise, ast.Pass, ast.Continue, ast.Break, ast.FunctionDef, ast.ClassDef),
)
_EXPRESSIONS = (
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Lambda),
    *(ast.Dict, ast.Set, ast.List, ast.Tuple, ast.ListComp, ast.SetComp, ast.DictComp),
    *(ast.GeneratorExp, ast.comprehension, ast.JoinedStr, ast.FormattedValue, ast.Constant),
    *(ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Name),
    *(ast.arguments, ast.arg, ast.keyword, ast.expr_context, ast.operator, ast.unaryop),
    *(ast.cmpop, ast.boolop),
)


def vet_model_text(text: str) -> None:
    """Raise `OnboardError` unless a model file is made of classes and functions that compute with
    tensors, from names of `onboard.vetting.allowed_names`.
    """
    try:
        _Reader().read(_parse(text))
    except _RefusedError as refused:
        raise OnboardError(
            f"the model file has what is not known to be harmless ({refused})",
            hint="It may reach beyond tensors: do not trust the model before you have read it",
        ) from None


def registered(text: str) -> set[str]:
    """Return the names that a vetted model file registers classes under and as."""
    calls = [node.value for node in ast.parse(text).body if isinstance(node, ast.Expr)]
    given = [arg for call in calls if isinstance(call, ast.Call) for arg in call.args]
    return {str(arg.value) for arg in given if isinstance(arg, ast.Constant)} | {
        arg.id for arg in given if isinstance(arg, ast.Name)
    }


class _RefusedError(Exception):
    """A place that is not on the lists, as one line."""


def _parse(text: str) -> ast.Module:
    if len(text.encode(errors="surrogatepass")) > MOST:
        raise _RefusedError(f"{len(text)} letters")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _RefusedError(f"no Python: {type(error).__name__}") from None


def _refuse(node: ast.AST) -> NoReturn:
    try:
        shown = " ".join(ast.unparse(node).split())[:60]
    except (RecursionError, ValueError, AttributeError):
        shown = type(node).__name__
    raise _RefusedError(f"line {getattr(node, 'lineno', 0)}: {shown}")


class _Reader:
    """One pass over a file."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.imported: set[str] = set()
        self.bound: set[str] = set()
        self.fields: set[ast.AST] = set()

    def read(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for place in ast.walk(tree):
            self._bind(place)
        for node in tree.body:
            self._top_level(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            one = ast.unparse(
                ast.Import([alias])
                if isinstance(node, ast.Import)
                else ast.ImportFrom(node.module, [alias], node.level)
            )
            if one in allowed_names.PLAIN_IMPORTS:
                self._bring_module(alias)
            elif not (isinstance(node, ast.ImportFrom) and _is_listed(node, alias)):
                _refuse(node)
            else:
                self.imported.add(alias.name)

    def _bring_module(self, alias: ast.alias) -> None:
        name = alias.asname or alias.name
        if name != "onboard.ops":
            self.modules[name] = allowed_names.ALIASES.get(name) or allowed_names.MODULES[name]

    def _bind(self, node: ast.AST) -> None:
        """Note a name that the file gives a value: none of a module, an import or a builtin that
        does more than compute.
        """
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                return
        known = allowed_names.BUILTINS | allowed_names.OTHER_BUILTINS
        if (
            name in self.modules.keys() | self.imported
            or (name in vars(builtins) and name not in known)
            or (name.startswith("__") and name != "__init__")
        ):
            _refuse(node)
        self.bound.add(name)

    def _top_level(self, node: ast.stmt) -> None:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                return
            case ast.FunctionDef():
                self._visit(node)
            case ast.ClassDef():
                self._visit(node)
            case ast.Assign(value=value) if _is_literal(value):
                self._visit(node)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call):
                if name not in allowed_names.REGISTRATIONS & self.imported:
                    _refuse(node)
                self._registration(call)
            case _:
                _refuse(node)

    def _registration(self, call: ast.Call) -> None:
        for arg in call.args:
            if not isinstance(arg, ast.Constant | ast.Name):
                _refuse(call)
            self._visit(arg)
        for keyword in call.keywords:
            if not isinstance(keyword.value, ast.Lambda):
                _refuse(call)
            self._visit(keyword.value)

    def _visit(self, node: ast.AST) -> None:
        if not isinstance(node, _STATEMENTS + _EXPRESSIONS):
            _refuse(node)
        special = getattr(self, f"_{type(node).__name__.lower()}", None)
        if special is not None:
            special(node)
        else:
            self._visit_all(ast.iter_child_nodes(node))

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _classdef(self, node: ast.ClassDef) -> None:
        """Bases are classes by name; the body has methods and literals alone."""
        if node.keywords or node.decorator_list:
            _refuse(node)
        self._visit_all(node.bases)
        if self._is_config(node):
            self.fields |= set(_fields(node))
        for item in node.body:
            is_value = isinstance(item, ast.Assign | ast.AnnAssign) and (
                item.value is None or _is_literal(item.value)
            )
            is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if not (is_value or is_text or isinstance(item, ast.FunctionDef | ast.Pass)):
                _refuse(item)
            self._visit(item)

    def _is_config(self, node: ast.ClassDef) -> bool:
        """Whether a class is a config: nothing but fields is had of its objects."""
        match node.bases:
            case [ast.Name(id="PlainConfig")]:
                return "PlainConfig" in self.imported
        return False

    def _functiondef(self, node: ast.FunctionDef) -> None:
        """Decorators are three builtins; nothing is called for the default of a parameter."""
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Name) and decorator.id in allowed_names.DECORATORS):
                _refuse(decorator)
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        for default in defaults:
            if any(isinstance(x, ast.Call) and not _is_literal(x) for x in ast.walk(default)):
                _refuse(default)
        self._visit_all([node.args, *node.body, *([node.returns] if node.returns else [])])

    def _while(self, node: ast.While) -> None:
        """A loop goes on as long as something says that its body changes."""
        names = [
            item for each in node.body for item in ast.walk(each) if isinstance(item, ast.Name)
        ]
        stored = {item.id for item in names if isinstance(item.ctx, ast.Store)}
        if not stored & {item.id for item in ast.walk(node.test) if isinstance(item, ast.Name)}:
            _refuse(node)
        self._visit_all(ast.iter_child_nodes(node))

    def _constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str | int | float | complex | type(None) | type(...)):
            _refuse(node)

    def _name(self, node: ast.Name) -> None:
        """A name is one that the file binds, an import that is no module, or a listed builtin."""
        if (
            isinstance(node.ctx, ast.Del)
            or node.id in allowed_names.TABLES | allowed_names.REGISTRATIONS | self.modules.keys()
        ):
            _refuse(node)
        if node.id not in self.bound | self.imported | allowed_names.BUILTINS or (
            node.id == "__init__" and isinstance(node.ctx, ast.Load)
        ):
            _refuse(node)

    def _subscript(self, node: ast.Subscript) -> None:
        is_table = isinstance(node.value, ast.Name) and node.value.id in self.imported
        if is_table and not isinstance(node.ctx, ast.Load):
            _refuse(node)
        if isinstance(node.ctx, ast.Del):
            _refuse(node)
        self._visit_all([node.slice] if is_table else [node.value, node.slice])

    def _attribute(self, node: ast.Attribute) -> None:
        """Of a module a listed name, and of what that is, as of any object, a listed attribute or
        one that no library object has.
        """
        root, path = _chain(node)
        module = self.modules.get(root.id) if isinstance(root, ast.Name) else None
        if not isinstance(node.ctx, ast.Load):
            self._stored(node, root, path)
        if module is None:
            self._visit(root)
        else:
            path = _behind_listed(f"{module}.{'.'.join(path)}", node)
        if node in self.fields and not _has_config(node.attr):
            return  # only other objects have a method of this name, as tensors have `backward`
        for name in path:
            if not _is_attribute(name) and not (name == "__init__" and _is_super(root)):
                _refuse(node)

    def _stored(self, node: ast.Attribute, root: ast.AST, path: list[str]) -> None:
        """Attributes of objects and of their parts are set, and weights; no method is."""
        is_own = isinstance(root, ast.Name) and root.id in self.bound
        is_weight = isinstance(root, ast.Name) and path[-1] in ("weight", "bias")
        if not (is_own or is_weight) or path[-1] == "forward" or isinstance(node.ctx, ast.Del):
            _refuse(node)

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            self._getattr(node)
            return
        self._visit_all([node.func, *node.args, *node.keywords])

    def _getattr(self, node: ast.Call) -> None:
        """`getattr(x, "name")` is an attribute, and so is f"{kind}_cos" by its ending."""
        match node:
            case ast.Call(args=[_, ast.Constant(value=str(name)), *_], keywords=[]):
                allowed = _is_attribute(name)
            case ast.Call(args=[_, ast.JoinedStr(values=[*_, ast.Constant(value=str(end))])]):
                others = library_names() - allowed_names.ATTRIBUTES
                allowed = "_" in end and not any(name.endswith(end) for name in others)
            case _:
                allowed = False
        if not allowed:
            _refuse(node)
        self._visit_all(node.args)


def _is_listed(node: ast.ImportFrom, alias: ast.alias) -> bool:
    module = node.module or ""
    if node.level or alias.asname:
        return False
    if allowed_names.CONFIG_MODULE.fullmatch(module):
        return allowed_names.FROM_IMPORTS["transformers"].fullmatch(alias.name) is not None
    listed = allowed_names.FROM_IMPORTS.get(module)
    return listed is not None and listed.fullmatch(alias.name) is not None


def _is_literal(node: ast.AST) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            return all(map(_is_literal, items))
        case ast.Dict(keys=keys, values=values):
            return all(key is not None and _is_literal(key) for key in keys) and all(
                map(_is_literal, values)
            )
        case ast.UnaryOp(operand=value) | ast.Call(func=ast.Name(id="float"), args=[value]):
            return isinstance(value, ast.Constant)
    return False


def _is_super(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _chain(node: ast.Attribute) -> tuple[ast.AST, list[str]]:
    """Return what a chain of attributes begins with, and their names in order."""
    path: list[str] = []
    place: ast.AST = node
    while isinstance(place, ast.Attribute):
        path.insert(0, place.attr)
        place = place.value
    return place, path


def _behind_listed(dotted: str, node: ast.AST) -> list[str]:
    """Return the attributes behind the listed name that a dotted one begins with."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in allowed_names.DOTTED:
            return parts[end:]
        if allowed_names.CANONICAL_OP.fullmatch(name) and end == len(parts):
            return []  # an op is called: nothing is had of it
    _refuse(node)


def _is_attribute(name: str) -> bool:
    return not name.startswith("__") and (
        name in allowed_names.ATTRIBUTES or name not in library_names()
    )


def _fields(config: ast.ClassDef) -> Iterator[ast.Attribute]:
    """Yield where the constructor of a config class keeps a value, `self.name = ...`."""
    for method in config.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for node in ast.walk(method):
                match node:
                    case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                        yield node


def _has_config(name: str) -> bool:
    """Whether a config has an attribute of this name without a file's doing, or none may."""
    if name.startswith("_"):
        return True
    from transformers import PretrainedConfig

    from onboard.plain_config import PlainConfig

    return hasattr(PretrainedConfig, name) or hasattr(PlainConfig, name)


@cache
def library_names() -> frozenset[str]:
    """Return the attributes of everything that a model file can lay hands on beside its own."""
    import torch
    from torch import nn
    from transformers import PretrainedConfig

    functions: list[Any] = [library_names, (_ for _ in ())]
    objects: list[Any] = [
        *(torch.empty(0), torch.float32, torch.device("cpu"), torch.Size(), torch.finfo()),
        *(torch.ops.aten.add.Tensor, torch.empty(0).untyped_storage()),
        *(nn.Module(), nn.ModuleList(), nn.ModuleDict(), nn.Parameter(), PretrainedConfig()),
        *("", b"", 0, 0.0, 0j, True, None, (), [], {}, set(), range(0), slice(0), ...),
        *(object, ValueError()),
    ]
    types = [type(item) for item in objects]
    names = {name for item in [*functions, *objects, *types] for name in dir(item)}
    op: Any = torch.ops.aten.add
    overloads = set(op.overloads())  # `out` and others, which canonical ops do not have
    return frozenset(names | set(dir(op)) - overloads)
