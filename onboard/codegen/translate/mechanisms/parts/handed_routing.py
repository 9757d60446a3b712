"""What a function makes of the choices of tokens' experts, and hands to a mixture: in a model file it
hands on the tensors of which it makes that.
"""

from __future__ import annotations

import ast

from onboard.analysis.blocks.spec_mixtures import Handed
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code, Items, Value


def hands(handed: Handed, statement: ast.stmt, frame: Frame) -> bool:
    """Whether a statement is the first of those that make what a function hands to a mixture."""
    if frame.source.path.name != handed.file:
        return False
    methods = (node for each in frame.source.classes.values() for node in each.body)
    nodes = (
        node
        for node in (*frame.source.functions.values(), *methods)
        if isinstance(node, ast.FunctionDef) and node.name == handed.function
    )
    return any(
        node.lineno == handed.line and same_place(node.body[handed.begin], statement)
        for node in nodes
    )


def handed_on(handed: Handed, last: ast.stmt) -> ast.stmt:
    """Return the end of a function that hands on the tensors of which it makes something else."""
    assert isinstance(last, ast.Return)
    value: ast.expr = ast.Tuple([name(each) for each in handed.tensors], ast.Load())
    if handed.place >= 0:
        assert isinstance(last.value, ast.Tuple)
        parts = [*last.value.elts]
        parts[handed.place] = value
        value = ast.Tuple(parts, ast.Load())
    end = ast.copy_location(ast.Return(value), last)
    end.col_offset = -1  # it is not replaced again
    return end


def take(handed: Handed, frame: Frame) -> None:
    """Name the tensors that a mixture is handed."""
    value = frame.settle(frame.evaluate(name(handed.variable)))
    for place, each in enumerate(handed.tensors):
        item: Value = Code(ast.Subscript(value.code(), ast.Constant(place), ast.Load()))
        item = value.items[place] if isinstance(value, Items) else item
        frame.bind(handed.name_of(each), item)


def same_place(one: ast.stmt, other: ast.stmt) -> bool:
    """Whether two statements stand at one place of a file."""
    places = [(getattr(x, "lineno", 0), getattr(x, "col_offset", 0)) for x in (one, other)]
    return places[0] == places[1]
