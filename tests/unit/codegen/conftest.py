"""Small modules written in the tests, translated."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onboard.analysis.blocks.spec_mixtures import MixtureParameters
from onboard.analysis.spec_blocks import LoopParameters, ScanParameters
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program import unused_modules
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState, Restart
from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code, Value
from onboard.codegen.translate.mechanisms.order import MECHANISMS
from onboard.codegen.translate.output.printer import print_block
from onboard.codegen.translate.output.prune import prune

HEAD = """
import math
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast


"""
_COUNT = itertools.count()


@dataclass(eq=False)
class ToyState(ClassState):
    """The class, and what it was translated with."""

    translator: Translator = field(kw_only=True)


Translate = Callable[..., tuple[ToyState, str, str]]


@pytest.fixture
def translate(tmp_path: Path) -> Translate:
    """Return a function that translates class `Toy` of a text: its state, what is left of __init__
    and of forward.

    `scans` are its helper functions that are canonical ops; code of repositories is `specialised`.
    """

    def run(
        text: str,
        config: dict[str, Any] | None = None,
        scans: dict[str, str] | None = None,
        specialised: bool = False,
        counts_positions: bool = False,
        mixtures: dict[str, MixtureParameters] | None = None,
        masks: dict[str, list[str]] | None = None,
        loops: dict[str, list[LoopParameters]] | None = None,
        **given: Value,
    ) -> tuple[ToyState, str, str]:
        module_name = f"toy_module_{next(_COUNT)}"
        path = tmp_path / f"{module_name}.py"
        path.write_text(HEAD + text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        made = getattr(module, "Config", SimpleNamespace)
        values = made(attribute_map={}, **(config or {}))
        model = module.Toy(values)
        model.config = made(attribute_map={}, **(config or {}))  # which the model may have changed
        translator = Translator(
            model,
            Findings(
                scans={key: ScanParameters(op=op) for key, op in (scans or {}).items()},
                mixtures=mixtures or {},
                masks=masks or {},
                loops=loops or {},
            ),
            MECHANISMS,
            specialised=specialised,
        )
        translator.counts_positions = counts_positions
        state = _translated(translator, module.Toy, {"x": Code(name("x")), **given})
        prune(translator)
        assert state.init is not None
        toy = ToyState(**vars(state), translator=translator)
        return toy, print_block(state.init.body), print_block(state.methods["forward"].body)

    return run


def _translated(translator: Translator, cls: type, arguments: dict[str, Value]) -> ClassState:
    for _ in range(5):
        translator.reset()
        try:
            (state,) = translator.reached(
                translator.construct(cls, Args([Config(name("config"), translator.config)], {}, []))
            )
            translator._method(state, "forward", Args([], dict(arguments), []))
        except Restart:
            continue
        unused_modules.reach(translator)
        return state
    raise AssertionError("the facts still grow")
