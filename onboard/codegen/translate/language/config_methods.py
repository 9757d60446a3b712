"""Methods of configs. Of those that a repository's class has of its own a model file's class has
none: what they give is written where they are called.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.config_values import all_fields
from onboard.codegen.translate.language.expressions import multimodal_configs
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.statements.probed_records import made_by_method
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import NONE, Value

_RECEIVER = "config_of_method"
"""What a method's first parameter is called here: `self` is the module."""


def call_config(owner: Config, attr: str, args: Args, frame: Frame) -> Value | None:
    """Return what `config.method(...)` gives; None where that is not known."""
    if attr == "to_dict" and frame.translator.specialised:
        return all_fields(owner.expr, owner.obj)
    if attr == "get_text_config":
        return multimodal_configs.text_config(owner)
    config_class: Any = type(owner.obj)
    found = _as_function(config_class, attr) if frame.translator.specialised else None
    package = type(frame.translator.model).__module__.split(".")[0]
    if found is None or found[0].__module__.split(".")[0] != package:
        return None
    if _only_checks(owner.obj, attr, args):
        return NONE
    cls, function = found
    given = replace(args, positional=[owner, *args.positional])
    try:
        return frame.translator.call_source(function, module_source(cls.__module__), given, frame)
    except Untranslatable:
        if (made := made_by_method(owner, attr, args, frame)) is None:
            raise
        return made


def _only_checks(config: Any, attr: str, args: Args) -> bool:
    """Whether a method gives nothing and leaves the config as it is: a check that it passes."""
    if args.stars or not args.known():
        return False
    copy, values = deepcopy(config), [each.value for each in args.positional]  # type: ignore[attr-defined]
    try:
        given = getattr(copy, attr)(*values, **{k: v.value for k, v in args.keywords.items()})  # type: ignore[attr-defined]
    except Exception:
        return False
    before, after = (
        each.to_dict() if hasattr(each, "to_dict") else vars(each) for each in (config, copy)
    )
    return given is None and bool(after == before)


@cache
def _as_function(cls: Any, attr: str) -> tuple[type, ast.FunctionDef] | None:
    """Return the class that has a method, and the method as a function of a config."""
    found = find_method(cls, attr)
    if found is None or found[1].decorator_list or not found[1].args.args:
        return None
    function = deepcopy(found[1])
    own = function.args.args[0]
    read = [item for item in ast.walk(function) if isinstance(item, ast.Name)]
    for item in read:
        item.id = _RECEIVER if item.id == own.arg else item.id
    own.arg = _RECEIVER
    return found[0], function
