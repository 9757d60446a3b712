"""Triton's interpreter without what it does again for every call of a function in a kernel, and the
same each time: half of its work.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Have what does not change from call to call done once."""
    interpreter._patch_lang = _where_needed(interpreter._patch_lang)
    interpreter._patch_builtin = _patch_builtins
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    # Without `debug` it computes whether integers overflow and then asserts nothing.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _where_needed(patch_language: Any) -> Any:
    """Return `patch_language` for functions that find a module of the language not yet interpreted,
    as a kernel does, and seldom what it calls.
    """

    def patched(function: Any) -> Any:
        if any(tl.core.is_builtin(module.load) for module in _languages(function)):
            return patch_language(function)
        return interpreter._LangPatchScope()

    return patched


@cache
def _languages(function: Any) -> list[Any]:
    """Return the modules of the language that a function's own module has."""
    return [each for each in (tl, tl.core) if each in function.__globals__.values()]


def _patch_builtins(holder: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(holder):
        interpreter._patch_attr(holder, name, member, builder, scope)


@cache
def _builtins(holder: Any) -> list[tuple[str, Any]]:
    """Return the functions of the language in a module or a class, which is as it was written
    whenever no kernel runs.
    """
    return [each for each in inspect.getmembers(holder) if tl.core.is_builtin(each[1])]


def _remembered(numpy_dtype: Any) -> Any:
    """Return `numpy_dtype`, which says what holds a type's numbers, asked once for each."""
    known: dict[str, np.dtype[Any]] = {}

    def found(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return found
