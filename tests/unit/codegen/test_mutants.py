"""A test of the tests: no change of what a transformers model computes goes unnoticed.

A mistake is put into a copy of a modeling file. Where it changes the model's logits, either the
tool refuses the copy, or the file generated from the copy computes what the copy computes; then it
must fail against the original, as the file generated from the original must fail against the copy.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import counts_positions
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.testing import fresh_seed
from onboard.testing.models import randomize_
from onboard.verify.blocks import _registered, _same_weights, prove
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME
from tests.support.mutation.mutants import (
    BRANCH,
    OPERATORS,
    PACKAGE,
    Mutator,
    importable,
    installed,
)

SEED = int(os.environ.get("ONBOARD_MUTATION_SEED", "20"))
"""Of the mutations; the prompts and weights on which functions are compared are fresh ones."""
MUTATIONS = int(os.environ.get("ONBOARD_MUTATIONS", "8"))
"""In every run; those that are exhaustive try as many as there are families, at least."""
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma2": {},
    "qwen3_moe": {"norm_topk_prob": True, "num_key_value_heads": 4},
    "mamba2": {},
    "cohere": {"use_qk_norm": True},
    "deepseek_v3": {},
    "qwen3_next": {},
    "llama": {"num_key_value_heads": 8},
    "phi3": {"sliding_window": 2047},
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "gpt_oss": {},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16},
    "gpt_neox": {},
    "olmo2": {},
}
"""Family -> fields that differ from the defaults. One of each kind is first: counted positions,
sandwich layers, experts, recurrent mixers, parallel layers, latent attention, mixers of two kinds,
dense layers."""


class Original(NamedTuple):
    """A family as transformers has it, and the file generated from that."""

    config: PretrainedConfig
    spec: ModelSpec
    text: str
    model: nn.Module


class NotCounted(Exception):
    """A mutant that says nothing: it cannot run, or computes what the original does."""


class Unnoticed(Exception):
    """A mutant that computes something else, and nobody saw it."""


def _config(family: str) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES[family]}


@cache
def _original(family: str) -> Original:
    spec = analyze(_config(family), model=f"test/{family}")
    config = load_config(spec.config)
    return Original(config, spec, generate_model_file(spec), build_tiny(config))


@cache
def _mutator(family: str) -> Mutator:
    original = _original(family)
    module = importlib.import_module(original.spec.hf_module)
    classes = {cls.__name__ for item in original.model.modules() for cls in type(item).__mro__}
    functions = {name for name, item in vars(module).items() if inspect.isfunction(item)}
    return Mutator(
        original.spec.hf_module,
        classes | functions - {"load_balancing_loss_func"},
        f"{SEED} {family}",
    )


def _probes(model: nn.Module, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return prompts of several lengths that begin at several positions; of a model that counts, as
    it counts.
    """
    generator = torch.Generator().manual_seed(seed)
    counted = counts_positions(model)
    out = []
    for batch, length, start in ((2, 29, 0), (3, 90, 3), (1, 7, 150), (1, 1, 20)):
        ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
        rows = (0 if counted else start) + torch.arange(length).expand(batch, -1)
        out.append({"input_ids": ids, "position_ids": rows.contiguous()})
    return out


def _difference(
    actual: nn.Module, expected: nn.Module, probes: list[dict[str, torch.Tensor]]
) -> float:
    """Return the largest error ratio of logits over the prompts on which the expected ones are
    numbers.

    Raises `NotCounted` when there is no such prompt: some mistakes make a state grow without
        bounds.
    """
    errors = []
    with torch.no_grad():
        for inputs in probes:
            target = expected(**inputs).logits
            if target.isfinite().all():
                errors.append(rmse_ratio(actual(**inputs).logits, target))
    if not errors:
        raise NotCounted("whose logits are not finite")
    return max(errors, key=lambda error: (error != error, error))  # not a number is the worst


def _logits_change(mutant: nn.Module, original: nn.Module, seed: int) -> bool:
    """Whether a mutant, which may lack or add weights, computes something else than the original
    with the same ones.
    """
    shapes = [
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (mutant, original)
    ]
    probes = _probes(original, seed)
    if shapes[0] != shapes[1]:
        _difference(mutant, mutant, probes)  # it runs
        return True
    mutant.load_state_dict(original.state_dict())
    return not _difference(original, mutant, probes) <= SAME


def _follow(family: str, seed: int, *, export: bool) -> str:
    """Return the file generated from the installed mutant, once it is found to be the mutant.

    Raises:
        OnboardError: the tool refuses the mutant.
        Unnoticed: it does not, and should have.
    """
    spec = analyze(_config(family), model=f"test/{family}")
    text = generate_model_file(spec)
    prove(text, spec, export=export)
    mutant = build_tiny(load_config(spec.config))
    randomize_(mutant, seed)  # other weights than those that the tool probes with
    with _registered(text, spec) as model_class:
        error = _difference(_same_weights(model_class, mutant, []), mutant, _probes(mutant, seed))
    if not error <= SAME:
        raise Unnoticed(
            f"the generated file is proven, and is not the mutant (rmse ratio {error:.1e})"
        )
    if _passes(_original(family).text, spec):
        raise Unnoticed("the original's file passes against the mutant")
    return text


def _passes(text: str, spec: ModelSpec) -> bool:
    try:
        prove(text, spec, export=False)
    except OnboardError:
        return False
    return True


def _examine(
    family: str, text: str, name: str, folder: Path, seed: int, *, export: bool = False
) -> str:
    """Return how a mutant is noticed; raise `NotCounted` or `Unnoticed`."""
    original = _original(family)
    try:
        mutant_class = importable(text, name, folder, original.spec.architecture)
        with installed(type(original.config), mutant_class):
            changes = _logits_change(build_tiny(original.config), original.model, seed)
    except NotCounted:
        raise
    except Exception as error:  # whatever a mistake leads to
        raise NotCounted("that do not run") from error
    if not changes:
        raise NotCounted("without effect on the logits")
    with installed(type(original.config), mutant_class):
        try:
            own = _follow(family, seed, export=export)
        except OnboardError as error:
            return f"refused: {error.message}"
    if _passes(own, original.spec):
        raise Unnoticed("the mutant's file passes against the original")
    return "followed, and the file fails against the original"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that mutated modules can be imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "count",
    [MUTATIONS, pytest.param(max(MUTATIONS, len(FAMILIES)), marks=pytest.mark.exhaustive)],
)
def test_no_mutation_goes_unnoticed(count: int, folder: Path) -> None:
    seed, passed_over, outcomes, unnoticed = fresh_seed(), Counter[str](), Counter[str](), []
    print(f"ONBOARD_MUTATION_SEED={SEED}")
    families, operators = list(FAMILIES), list(OPERATORS)
    for draw in range(40 * count):
        family, operator = (
            families[outcomes.total() % len(families)],
            operators[draw % len(operators)],
        )
        drawn = _mutator(family).draw(operator)
        if drawn is None:
            continue
        mutation, text = drawn
        try:
            outcome = _examine(
                family,
                text,
                f"modeling_{draw}",
                folder,
                seed + draw,
                export=operator.startswith(BRANCH),
            )
        except NotCounted as reason:
            passed_over[str(reason)] += 1
            continue
        except Unnoticed as error:
            outcome = f"UNNOTICED: {error}"
            unnoticed.append(f"{family}: {mutation}: {error}")
        print(f"{family}: {mutation}\n    {outcome}")
        outcomes[outcome.split()[0].rstrip(":,")] += 1
        if outcomes.total() == count:
            break
    print(f"{dict(outcomes)}; drawn again: {dict(passed_over)}")
    assert unnoticed == []
    assert outcomes.total() == count
    assert outcomes["followed"] > count / 3, (
        "a tool that refuses everything notices everything, too"
    )


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name.startswith(BRANCH)])
def test_branches_on_sizes_are_refused(operator: str, folder: Path) -> None:
    """However they are drawn: a graph has no branches, so none of them can be followed."""
    for draw in range(9):
        drawn = _mutator("llama").draw(operator)
        assert drawn is not None, "no branch changes the logits"
        name = f"modeling_{operator.replace(' ', '_')}_{draw}"
        with suppress(NotCounted):  # before a norm, say, where half is as much as the whole
            assert _examine("llama", drawn[1], name, folder, fresh_seed(), export=True).startswith(
                "refused"
            )
            break


def test_a_copy_without_mutation_is_the_original(folder: Path) -> None:
    original = _original("llama")
    copy = importable(
        _mutator("llama").unchanged(), "modeling_same", folder, original.spec.architecture
    )
    with installed(type(original.config), copy):
        spec = analyze(_config("llama"), model="test/llama")
        assert not _logits_change(build_tiny(original.config), original.model, fresh_seed())
        prove(original.text, spec, export=False)
    prove(generate_model_file(spec), original.spec, export=False)
