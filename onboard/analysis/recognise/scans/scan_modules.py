"""Recognise modules without weights that are a canonical op of recurrent mixers, with one setting
from the config.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from onboard.analysis.recognise import REFUSED
from onboard.analysis.recognise.mixers import scan_error, wide_errors
from onboard.analysis.recognise.probe import Finding
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.ops.library import op_sources
from onboard.ops.written_forms import CallForm
from onboard.verify.error import worst
from onboard.verify.tolerances import SAME

SETTING = "eps"
"""The parameter of an op that is a module's setting."""
_COARSE = 0.37


def module_forms() -> dict[str, CallForm]:
    """Return how the modules are called that compute an op, by op."""
    found = {op: source.called_as_module for op, source in op_sources().items()}
    return {op: form for op, form in found.items() if form is not None}


def probe_scan_module(module: nn.Module, calls: Sequence[ModuleCall]) -> Finding | None:
    """Recognise a module that is one of `module_forms`, whatever other number its config has in the
    setting's place.
    """
    if module.state_dict() or not calls or not hasattr(module, "config"):
        return None
    bound = [bound_arguments(module, call) for call in calls]
    for op, form in module_forms().items():
        wanted = form.parameters - {SETTING}
        if not all(
            wanted <= item.keys() and all(item[key] is None for key in item.keys() - wanted)
            for item in bound
        ):
            continue
        for field, variants in _variants(module):
            errors = [
                scan_error(form, variant, {**item, SETTING: number}, ignored={SETTING})
                for variant, number in variants
                for item in bound
            ]
            errors += [
                error
                for item in bound
                for error in wide_errors(
                    form,
                    module,
                    {**item, SETTING: getattr(module.config, field)},
                    errors,
                    ignored={SETTING},
                )
            ]
            if worst(errors) < SAME:
                evidence = f"probe: {op} fits with rmse ratio {worst(errors):.1e}"
                return Finding("scan_module", {"op": op, "eps": field}, [evidence])
    return None


def bound_arguments(module: nn.Module, call: ModuleCall) -> dict[str, Any]:
    """Return the arguments of a call by the names of forward's parameters, defaults too."""
    arguments = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)


def _variants(module: nn.Module) -> Iterator[tuple[str, list[tuple[nn.Module, float]]]]:
    """Yield each number of the config with modules that are made with it: as it is, and coarse."""
    config: Any = module.config
    make: Any = type(module)
    for field, value in vars(config).items():
        if type(value) is not float:
            continue
        other = copy.deepcopy(config)
        setattr(other, field, _COARSE)
        try:
            yield field, [(module, value), (make(other).eval(), _COARSE)]
        except REFUSED:
            continue  # made of more than its config
