"""Attempts at a translation, with straight forwards in the place of those that are refused."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.behaviour.code_numbers import same_sizes
from onboard.analysis.repository_source import is_imported_from_it
from onboard.analysis.source import class_node
from onboard.analysis.tiny.tiny_config import one_line
from onboard.codegen.straight.recorded_classes import doubt
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.codegen.straight.straighten import Recordings
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.program import uses
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    name,
    with_place,
)

Prove = Callable[[str], None]
"""Raises `ProofError` where a model file's text is not proven."""

_MOST = 8
"""Classes that are straightened for one model."""
_OF_TRANSFORMERS = ("transformers.masking_utils",)
"""Whose functions the translation knows as they are."""


def straightened(
    attempt: Callable[[], str],
    translator: Translator,
    config: PretrainedConfig,
    first: Untranslatable,
) -> str:
    """Return the text that an attempt gives once switches that are handed on are constants, or else the
    forwards that are in its way are straight.

    Args:
        attempt: translates with `translator`.
        translator: has failed with `first`, and gets the definitions.
        config: that of the whole model.

    Raises:
        Untranslatable: the first one, which says what came of it.
    """
    if (text := _with_constants(attempt, translator)) is not None:
        return text
    error, said, refused = first, [], set[type]()
    leaves = [*_leaves(translator.findings)]
    positions = "position_ids" in uses.inputs_of(type(translator.model))
    recordings = Recordings(translator.model, config, leaves, positions)
    translator.sizes = [*_taken_for_granted(translator, config)]
    while len(translator.straight) < _MOST:
        cls = next(_in_the_way(translator, error, refused), None)
        if cls is None:
            break
        try:
            made = recordings.straight_forward(cls)
        except Exception as reason:  # of code that runs as its author never ran it
            refused.add(cls)
            known = str(reason) if isinstance(reason, NotStraight) else one_line(reason)
            said.append(f"{cls.__name__} cannot be recorded: {known}")
            continue
        translator.straight[cls] = made
        said += filter(None, [recordings.no_attention.get(cls)])
        try:
            text = _anew(attempt, translator)
        except Untranslatable as next_error:
            error = next_error
        else:
            if (doubted := doubt(text, translator.model)) is None:
                return text
            error = doubted
        same = str(error) == first.args[0]
        said.append(f"with {cls.__name__} as recorded: {'the same' if same else error}")
    translator.straight.clear()
    translator.sizes.clear()
    first.args = ("; ".join([with_place(first, str(first)), *said]),)
    raise first


def trusted(text: str) -> None:
    """Prove nothing: who asks for a text proves it."""


def unproven(error: Exception, model: nn.Module) -> Untranslatable:
    """Return what a text has no translation or no proof for, and the classes whose code led there,
    none if that is the whole model's alone.
    """
    if isinstance(error, Untranslatable):
        return error
    own = {cls.__name__ for cls in map(type, model.modules()) if _is_own(cls)}
    blocks = [name for name in getattr(error, "blocks", ()) if name in own]
    message = getattr(error, "message", str(error))
    failed = Untranslatable(message, tuple(x for x in blocks if x != type(model).__name__))
    failed.__cause__ = error
    return failed


def _with_constants(attempt: Callable[[], str], translator: Translator) -> str | None:
    """Return the text of an attempt to which truth values, texts and None of this config are constants
    where modules and functions are handed them; None where none are, or that leads nowhere.
    """
    if not translator.hands_switches:
        return None
    translator.decides_switches = True
    try:
        text = _anew(attempt, translator)
        return None if doubt(text, translator.model) else text
    except Untranslatable:
        return None
    finally:
        translator.decides_switches = False


def _anew(attempt: Callable[[], str], translator: Translator) -> str:
    translator.argument_facts.clear()
    translator.shared.clear()
    translator.knows_masks, translator.implementation = True, "onboard"
    return attempt()


def _taken_for_granted(translator: Translator, whole: PretrainedConfig) -> Iterator[ast.expr]:
    """Yield what has to hold of a config: a recorded number that follows from a size which no
    recording has otherwise stays that number.
    """
    for key, value in same_sizes(translator.model, translator.config, whole).items():
        yield ast.Compare(attribute(name("config"), key), [ast.Eq()], [ast.Constant(value)])


def _in_the_way(translator: Translator, error: Untranslatable, refused: set[type]) -> Iterator[Any]:
    """Yield the classes of modules whose code led to an error, the innermost first."""
    done = refused | translator.straight.keys()
    classes = list(dict.fromkeys(type(module) for module in translator.model.modules()))
    for block in error.blocks:
        named = [cls for cls in classes if block in (owner.__name__ for owner in cls.__mro__)]
        yield from (cls for cls in named if cls not in done)
        if refused & set(named):
            return  # what calls it is none the better for being recorded
    if error.blocks:
        return
    left = [cls for cls in reversed(classes) if cls not in done and _is_written(translator, cls)]
    yield from sorted(left, key=lambda cls: not _mentions(cls, str(error)))


def _mentions(cls: type, message: str) -> bool:
    """Whether a class's code has the global name that an error is about."""
    found = re.match(r"the global (\w+)", message)
    return bool(found and re.search(rf"\b{found[1]}\b", ast.unparse(class_node(cls))))


def _is_own(cls: type) -> bool:
    return is_imported_from_it(cls.__module__)


def _is_written(translator: Translator, cls: type) -> bool:
    """Whether a class of the repository is translated from its code."""
    known = {*translator.findings.recognised, *translator.findings.mixtures}
    return _is_own(cls) and cls in translator.states and cls.__name__ not in known


def _leaves(findings: Findings) -> Iterator[Any]:
    """Yield the functions that the translation knows by themselves."""
    names = {*findings.ropes, *findings.single_ropes, *findings.masks, *findings.scans}
    for module in filter(is_imported_from_it, list(sys.modules)):
        for key, value in vars(sys.modules[module]).items():
            known = inspect.isfunction(value) and value.__module__.startswith(_OF_TRANSFORMERS)
            if known or (inspect.isfunction(value) and key in names):
                yield value
