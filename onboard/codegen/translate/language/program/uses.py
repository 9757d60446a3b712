"""Calls of modules: what the model is given, what several classes share, what is not translated."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from onboard.analysis.source import find_method
from onboard.codegen.translate.language.args import Args, plain_call, spread
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Instance
from onboard.codegen.translate.language.program.argument_facts import all_bound, bind, default_nodes
from onboard.codegen.translate.language.program.results import same_code_of
from onboard.codegen.translate.language.program.supers import looked_up
from onboard.codegen.translate.language.state import ClassState, Restart, Routine
from onboard.codegen.translate.language.statements.by_class import Differing
from onboard.codegen.translate.language.trees.syntax import Untranslatable, call, name
from onboard.codegen.translate.language.values import Code, Known, Value
from onboard.hf.given_inputs import counts_itself, keeps

OF_ONE = {nn.Identity, nn.Linear}
"""Modules of PyTorch's that make one tensor of one, and may stand where others do so."""


@dataclass(frozen=True, eq=False)
class Ones(Value):
    """A mask of the padding where there is none: [batch, keys], of a shape that code gives it."""

    def same_as(self, other: Ones) -> bool:
        """Whether both hide nothing."""
        return True

    def fact(self) -> Value:
        """Return itself."""
        return self


def inputs_of(cls: type) -> list[str]:
    """Return what a model's forward is given; one without `position_ids` counts them."""
    arguments = _forward_of(cls).args
    named = {item.arg for item in (*arguments.args, *arguments.kwonlyargs)}
    takes_any = arguments.kwarg is not None
    known = ("input_ids",) if counts_itself(cls) else ("input_ids", "position_ids")
    return [key for key in known if takes_any or key in named]


def given_to(cls: type, form: str | None = None) -> dict[str, Value]:
    """Return what the forward of the whole model knows: its inputs, positions of a form, the mask of a
    text without padding where it has no default, and that it is to keep something where it runs so
    alone.
    """
    node = _forward_of(cls)
    named = {item.arg for item in (*node.args.args, *node.args.kwonlyargs)}
    needed = {"attention_mask"} & named - default_nodes(node).keys()
    told: dict[str, Value] = {"use_cache": Known(True)} if keeps(cls) else {}
    forms = {"position_ids": form}
    inputs = {key: Code(name(key), form=forms.get(key)) for key in inputs_of(cls)}
    return inputs | {key: Ones() for key in needed} | told


def _forward_of(cls: type) -> ast.FunctionDef:
    found = find_method(cls, "forward")
    assert found is not None
    return found[1]


def share_parameters(
    shared: dict[tuple[type, str], set[str]],
    states: list[ClassState],
    attr: str,
    routines: list[Routine],
    args: Args,
) -> None:
    """What one class of a module that may be of several needs of a call, the others take, too,
    where they can.
    """
    given = [set(spread(all_bound(routine.node, args))) for routine in routines]
    needed = {
        key
        for routine, own in zip(routines, given, strict=True)
        for key in routine.parameters
        if key in own
    }
    if not all(own.issuperset(needed) for own in given):
        return
    lacking = {
        state.cls: needed.difference(r.parameters)
        for state, r in zip(states, routines, strict=True)
    }
    for cls, keys in lacking.items():
        shared.setdefault((cls, attr), set()).update(keys)
    if any(lacking.values()):
        raise Restart


def callable_so(
    states: list[ClassState], module: Instance, attr: str, args: Args, frame: Frame
) -> list[ClassState]:
    """Return those of a module's classes whose method takes these arguments, in a branch that layers
    of the others do not get to, or where these are of no module here: the constructor asserts that.
    """
    taking = [state for state in states if _takes(state.cls, attr, args)]
    if taking and frame.layers is not None:
        return taking
    only = len(taking) == 1 < len(states) and _is_only(taking[0].cls, module, frame)
    return taking if only else states


def of_different_classes(
    results: Sequence[Value], states: list[ClassState], module: Instance, frame: Frame
) -> Value:
    """Return what a module gives whose classes give different things: that of the only class that
    modules here have, which the constructor asserts, or what code behind it tells apart.

    Raises:
        Differing: the code behind has to be written once for each class.
    """
    if (plain := same_code_of(results)) is not None:
        return plain
    for state, result in zip(states, results, strict=True):
        if _is_only(state.cls, module, frame):
            return result
    raise Differing(module)


def _is_only(cls: type, module: Instance, frame: Frame) -> bool:
    """Whether all modules at a place of the small model are of one class; the constructor asserts
    it then.
    """
    match module.expr:
        case ast.Attribute(value=ast.Name(id="self"), attr=key) if (
            frame.cls is not None and frame.layers is None
        ):
            here = [getattr(item, key, None) for item in frame.translator.modules_of(frame.cls.cls)]
            if here and all(type(item) is cls for item in here):
                known = call(name("isinstance"), module.expr, name(cls.__name__))
                frame.translator.guard(known, frame)
                return True
    return False


def _takes(cls: type, attr: str, args: Args) -> bool:
    """Whether a class's method can be called with such arguments."""
    found = find_method(cls, attr)
    if found is None or args.stars:
        return True
    try:
        bind(found[1], args, method=True)
    except Untranslatable:
        return False
    return True


def call_torch_module(module: Instance, args: Args) -> Value:
    """Return the result of calling a module of PyTorch's own; of a softmax that is made where it is
    called, that of the function.
    """
    match module.expr, args.positional:
        case ast.Call(args=[], keywords=[ast.keyword(arg="dim", value=dim)]), [x] if (
            module.classes == (nn.Softmax,)
        ):
            over = replace(args, positional=[x, Code(dim)])
            return plain_call(ast.parse("nn.functional.softmax", mode="eval").body, over)
    result = plain_call(module.expr, args)
    is_embedding = all(issubclass(cls, nn.Embedding) for cls in module.classes)
    return looked_up(result, args) if is_embedding else result


def keeps_order(findings: Findings, module: Instance, args: Args) -> bool:
    """Whether a module works on the last dimension alone and its only argument is
    transposed.
    """
    kinds = [findings.recognised.get(cls.__name__) for cls in module.classes]
    values = (*args.positional, *args.keywords.values())
    pointwise = all(kind is not None and kind.last_dimension_only for kind in kinds)
    return pointwise and len(values) == 1 and isinstance(values[0], Code) and values[0].transposed
