"""Methods of objects, written where they are called: what they read and change of the object are its
fields.
"""

from __future__ import annotations

import ast
import inspect
from copy import deepcopy

from onboard.analysis.source import find_method, module_source
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import plain_objects
from onboard.codegen.translate.language.handed.by_name import ByName
from onboard.codegen.translate.language.object_values import Global, PlainObject
from onboard.codegen.translate.language.program.closures import run_inside
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Value

_RECEIVER = "this"


def call_object(owner: Value, attr: str, args: Args, frame: Frame) -> Value:
    """Return what a method of an object, or of its class, gives, run where it is called; a constructor
    gives the object.
    """
    if isinstance(owner, PlainObject):
        return plain_objects.call_object(owner, attr, args, frame)
    assert isinstance(owner, ByName | Global)
    cls = owner.obj if isinstance(owner, Global) else owner.cls
    found = None if cls is None else find_method(cls, attr)
    if found is None:
        raise Untranslatable(f"the method {attr} of an object")
    node = deepcopy(found[1])
    source = module_source(found[0].__module__)
    if isinstance(inspect.getattr_static(cls, attr), staticmethod):
        return run_inside(node, source, args, frame)
    receiver = _receive(node, frame)
    frame.env.values[receiver] = owner
    given = run_inside(node, source, args, frame, {receiver: owner})
    now = frame.env.values.pop(receiver)
    if attr in ("__init__", "__post_init__"):
        return now
    return given


def _receive(node: ast.FunctionDef, frame: Frame) -> str:
    """Have a method find its object in a variable of its caller's; return the variable's name."""
    own = node.args.args.pop(0).arg
    taken = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    stem = _RECEIVER
    while (receiver := frame.fresh(stem)) in taken:
        stem += "_"
    node.body = [item for item in node.body if not plain_objects.makes_base(item)]
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and item.id == "super":
            raise Untranslatable(f"super() in {node.name} of an object")
        if isinstance(item, ast.Name) and item.id == own:
            item.id = receiver
    node.body.insert(0, ast.copy_location(ast.Nonlocal([receiver]), node))
    return receiver
