"""Casts to half precision of what flash_attn's functions are given, and assertions that it is that,
and on a GPU: its kernels take nothing else.

What stands in for these functions takes any dtype, and so do model files: without the casts, which a
model in that dtype does not notice, attention has the model's dtype, as all else does. Files are
compiled without either where the package is stood in for; their lines stay where they are.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

_PACKAGE = "flash_attn"
_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_unpadded_func")
_TENSORS = ("q", "k", "v")
_HALVES = ("torch.bfloat16", "torch.float16", "torch.half")


def without_cast(expr: ast.expr) -> ast.expr | None:
    """Return x of `x.to(torch.bfloat16)` and alike; None for anything else."""
    match expr:
        case ast.Call(func=ast.Attribute(value=inner, attr="half" | "bfloat16"), args=[]):
            return inner
        case (
            ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[dtype], keywords=[])
            | ast.Call(
                func=ast.Attribute(value=inner, attr="to"),
                args=[],
                keywords=[ast.keyword(arg="dtype", value=dtype)],
            )
        ) if ast.unparse(dtype) in _HALVES:
            return inner
    return None


def without_kernel_casts(tree: ast.Module) -> int:
    """Take the casts from calls whose queries, keys and values all have one; return how many such
    calls the tree had.
    """
    names = _functions(tree)
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
    ]
    return sum(map(_taken, calls))


def without_kernel_assertions(tree: ast.Module) -> int:
    """Take assertions that tensors are in half precision, or on a GPU, from the tree of a file that
    imports such functions; return how many it had.
    """
    if not _functions(tree):
        return 0
    asked = [n for n in ast.walk(tree) if isinstance(n, ast.Assert) and _asks_for_kernels(n.test)]
    for node in asked:
        node.test, node.msg = ast.copy_location(ast.Constant(True), node.test), None
    return len(asked)


def _functions(tree: ast.Module) -> set[str]:
    """Return the names that a file gives such functions."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE
        for alias in node.names
        if alias.name in _FUNCTIONS
    }


def _asks_for_kernels(test: ast.expr) -> bool:
    """Whether a test asks of tensors no more than that kernels take them."""
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(_asks_for_kernels, values))
        case ast.Call(
            func=ast.Name(id="all"), args=[ast.GeneratorExp(elt=each) | ast.ListComp(elt=each)]
        ):
            return _asks_for_kernels(each)
        case ast.Attribute(attr="is_cuda"):
            return True
        case ast.Compare(
            left=ast.Attribute(attr="dtype"),
            ops=[ast.In()],
            comparators=[ast.List(elts=dtypes) | ast.Tuple(elts=dtypes)],
        ):
            return all(ast.unparse(dtype) in _HALVES for dtype in dtypes)
    return False


def _taken(call: ast.Call) -> bool:
    """Take the casts from a call, where it has three; whether it has."""
    named = {item.arg: item for item in call.keywords}
    given = [*call.args[: len(_TENSORS)], *(named[key].value for key in _TENSORS if key in named)]
    bare = [inner for inner in map(without_cast, given) if inner is not None]
    if len(bare) < len(_TENSORS):
        return False
    for key, inner in zip(_TENSORS[len(call.args) :], bare[len(call.args) :], strict=True):
        named[key].value = inner
    call.args[: len(_TENSORS)] = bare[: len(call.args)]
    return True


class _Loader(SourceFileLoader):
    """Compiles a file without such casts and assertions."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the file's code; nothing is kept of it on the disk."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        without_kernel_casts(tree)
        without_kernel_assertions(tree)
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the files of a repository's code."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a file of the package, with the loader above."""
        found = PathFinder.find_spec(name, path) if name.startswith(f"{self.package}.") else None
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


def leave_out_casts(package: str, name: str, text: str) -> list[str]:
    """Have a package's files compiled without such casts and assertions, where a text has some; return
    what to say of it.
    """
    tree = ast.parse(text)
    facts = []
    if without_kernel_casts(tree):
        facts.append(
            f"{name} casts what {_PACKAGE} is given to half precision, for its kernels; without them"
            " it keeps the model's dtype"
        )
    if without_kernel_assertions(tree):
        facts.append(
            f"{name} asserts what the kernels of {_PACKAGE} take; the code that stands in for them"
            " takes any dtype, on any device"
        )
    if facts and not any(isinstance(item, _Finder) for item in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))
    return facts
