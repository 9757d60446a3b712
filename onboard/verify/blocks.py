"""Prove a generated model file against transformers: identical random weights, block by block, then
the logits.

Every submodule of the generated model runs on exactly the inputs that its counterpart had in
transformers, because each output is replaced by the counterpart's before it goes on; so the first
block that differs is the one that is wrong.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PretrainedConfig

from onboard import modeling
from onboard.analysis.behaviour.thresholds import (
    build_roomy,
    crossing_prompts,
    exact_prompts,
)
from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.cut_tables import cut_tables
from onboard.analysis.multimodal import is_under
from onboard.analysis.recognise.mixture_roles import ANY
from onboard.analysis.recognise.recorder import ModuleCall, modules_recorded
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.random_weights import randomize
from onboard.analysis.tiny.tiny_config import arguments_of, one_line
from onboard.analysis.tiny.tiny_model import made_with
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, prompts, runs, vocabulary
from onboard.codegen.config_checks import fields
from onboard.codegen.model_file import generate_model_file
from onboard.codegen.translate.language.trees.syntax import TOO_LONG
from onboard.codegen.translate.mechanisms.attention import chosen, compressed
from onboard.errors import OnboardError, ProofError
from onboard.hf.copied_model import copied
from onboard.hf.expert_weights import separate_experts
from onboard.verify.block_outputs import (
    NOTHING,
    BlockProof,
    both_zero,
    compare_outputs,
    expected_of,
    note,
    rows_of_theirs,
    running,
    sizes,
)
from onboard.verify.error import rmse_ratio
from onboard.verify.exported import check_export
from onboard.verify.rounding.of_texts import rounds_alike
from onboard.verify.special.special_tokens import (
    special_texts,
    special_tokens,
    with_vocabulary,
    words_of,
)
from onboard.verify.tolerances import MOST_ROUNDING

_REMEMBERS = -1.5


def proven_model_file(spec: ModelSpec) -> tuple[str, float]:
    """Return the text of a spec's model file, and the largest error of a block. Where a repository's
    code is translated to what is not proven, it is what its forwards do.

    Raises:
        OnboardError: the architecture has no translation, or none that is proven.
    """
    errors: dict[str, float] = {}

    def proven(text: str) -> None:
        errors[text] = max(proof.error for proof in prove(text, spec))

    text = generate_model_file(spec, proven)
    return text, errors[text]


def prove(source_text: str, spec: ModelSpec, *, export: bool = True) -> list[BlockProof]:
    """Compare a generated file with transformers on a tiny model of the spec's config.

    Returns:
        One proof for each submodule, the logits ("") last.

    Raises:
        OnboardError: the file does not load, or names other parameters.
        ProofError: a block differs: the first one is named, with both values; the model does not
            run; or `torch.export` fails with dynamic batch and sequence.
    """
    reference = build_roomy(load_config(spec.config))
    fresh = copied(reference)  # a forward may change a model for good
    _stands_alone(source_text, spec)
    probed = copied(reference)
    crossing, shapes = crossing_prompts(probed), _shapes(probed)
    with _registered(source_text, spec) as model_class:
        model = _same_weights(model_class, reference, spec.eager, _config(spec, reference))
        proofs: dict[str, BlockProof] = {}
        crossing, shapes = (_covered(model, texts) for texts in (crossing, shapes))
        try:
            for theirs in _states(reference, fresh, model, spec.eager):
                for inputs in (*prompts(theirs), *crossing):
                    _compare_blocks(theirs, model, inputs, proofs, spec)
                    _compare_logits(theirs, model, inputs, proofs)
                for inputs in shapes if theirs is reference else ():
                    _compare_logits(theirs, model, inputs, proofs)
        except OnboardError:
            raise
        except Exception as error:
            raise ProofError(
                f"the generated {spec.architecture} does not run: {one_line(error)}",
                blocks=running(error),
            ) from error
        if spec.repository is not None:
            _check_special_tokens(model_class, spec)
        if export:
            check_export(model, reference, spec, shapes)
    for proof in proofs.values():
        if proof.error == NOTHING:
            raise OnboardError(f"{proof.path} gives zeros for every prompt, which prove nothing")
    return list(proofs.values())


def _check_special_tokens(model_class: type[nn.Module], spec: ModelSpec) -> None:
    """Refuse a file that does not treat some tokens by themselves as the repository's code does; a text
    that this code does not take says nothing.
    """
    reference = with_vocabulary(load_config(spec.config))
    if reference is None:
        return
    tokens = special_tokens(reference, size := words_of(reference))
    texts = [x for x in special_texts(reference, tokens, size) if runs(copied(reference), x)]
    if not texts:
        return
    model = _same_weights(model_class, reference, spec.eager, _config(spec, reference))
    try:
        for text in texts:
            _compare_logits(reference, model, text, {})
    except ProofError as error:
        raise ProofError(
            f"the code of {spec.architecture} treats some tokens by themselves (of {_few(tokens)}), and "
            "the generated file does not"
        ) from error


def _few(tokens: Sequence[int]) -> str:
    return f"{', '.join(map(str, tokens[:6]))}{', ...' if len(tokens) > 6 else ''}"


def _covered(
    model: nn.Module, texts: Sequence[dict[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Return the texts that a generated file does not refuse as longer than it covers; runs are
    kept to these by the same assertion.
    """
    return [inputs for inputs in texts if not _is_too_long(model, inputs)]


def _is_too_long(model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    try:
        model(**inputs)
    except AssertionError as error:
        return str(error).startswith(TOO_LONG)
    except Exception:
        return False  # the comparison will say what it is
    return False


def _shapes(reference: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts of one row, of sizes that code may ask for, and of one token those that the
    model takes.
    """
    rows = [
        from_zero(prompt(0, length=9, batch=batch, seed=7, tokens=vocabulary(reference)))
        for batch in (1, 2)
    ]
    rows += exact_prompts(reference)
    tokens = [{name: tensor[:, :1] for name, tensor in each.items()} for each in rows[:2]]
    _runs(reference, rows[-1])  # code of one token may read what the text before has left
    return [*rows, *(each for each in tokens if _runs(reference, each))]


def _runs(reference: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether a model takes a text: code may lose a dimension of one token, in a batch say."""
    try:
        with torch.no_grad():
            reference(**inputs, use_cache=False)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def _stands_alone(source_text: str, spec: ModelSpec) -> None:
    """Refuse a file that imports what it is to be compared with, which would prove nothing."""
    try:
        tree = ast.parse(source_text)
    except SyntaxError as error:
        raise OnboardError(f"the model file does not load: {one_line(error)}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == spec.hf_module:
            raise OnboardError(
                f"the generated file imports {node.module}, which it is compared with"
            )


@contextmanager
def _registered(source_text: str, spec: ModelSpec) -> Iterator[type[nn.Module]]:
    """Load the text as a module of its own; the table of registered models stays as it was."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(modeling._MODELS),
        mock.patch.dict(modeling._CONFIGS),
    ):
        path = Path(folder) / f"modeling_{Path(folder).name}.py"
        path.write_text(source_text, encoding="utf-8")
        loaded = set(sys.modules)
        try:
            modeling.load_model_file(path)
        except Exception as error:
            raise OnboardError(f"the model file does not load: {one_line(error)}") from error
        try:
            yield modeling.registered_model(spec.config_class)
        finally:
            for name in set(sys.modules) - loaded:
                if path.stem in name:
                    del sys.modules[name]


def _config(spec: ModelSpec, reference: nn.Module) -> Any:
    """Return the config for the generated model: transformers' own, or what the file's own config
    class makes.
    """
    config: Any = reference.config
    if spec.repository is None:
        return config
    plain = modeling.registered_config(config.model_type)
    for made in (load_config(spec.config), made_with(reference)):
        values = arguments_of(made)
        theirs: Any = type(made).from_dict(values)  # what it makes of its own values may differ
        ours = plain.from_dict(values)
        own = [
            key for key in vars(theirs) if not key.startswith("_") and key != "transformers_version"
        ]
        names = [*own, *theirs.attribute_map, "rope_scaling"]
        if different := [key for key in names if not _same(ours, theirs, key)]:
            raise OnboardError(
                f"the generated {type(ours).__name__} has another {different[0]} than the repository's"
            )
    return ours


def _same(ours: Any, theirs: Any, key: str) -> bool:
    """Whether two configs have the same field, or parts with the same fields."""
    one, other = getattr(ours, key, None), getattr(theirs, key)
    parts = all(isinstance(item, PretrainedConfig) for item in (one, other))
    return bool(fields(one) == fields(other) if parts else one == other)


def _same_weights(
    model_class: type[nn.Module], reference: nn.Module, eager: Sequence[str], config: Any = None
) -> nn.Module:
    try:
        model = model_class(config or reference.config).eval().requires_grad_(False)
    except AssertionError as error:
        text = str(error).removeprefix("not covered: ")
        raise OnboardError(
            f"the generated file does not cover this config: {text}", hint="Generate it anew"
        ) from error
    except Exception as error:
        name = model_class.__name__
        raise ProofError(
            f"the generated {name} cannot be made for its own config: {one_line(error)}",
            blocks=running(error),
        ) from error
    ours, theirs = model.state_dict(), _weights(reference, eager)
    if missing := sorted(theirs.keys() ^ ours.keys()):
        side = "lacks" if missing[0] in theirs else "adds"
        raise OnboardError(f"the generated {model_class.__name__} {side} the weight {missing[0]}")
    for name, tensor in theirs.items():
        if ours[name].shape != tensor.shape:
            raise OnboardError(
                f"{name} is {list(ours[name].shape)} in the generated model, not {list(tensor.shape)}"
            )
    check_shared(model, reference, theirs.keys())
    model.load_state_dict(theirs)
    return model


def check_shared(model: nn.Module, reference: nn.Module, names: Collection[str]) -> None:
    """Refuse a generated model that has several parameters where transformers' has one."""
    ours = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        one = first.setdefault(id(parameter), name) if name in names else name
        if one != name and {one, name} <= ours.keys() and ours[one] is not ours[name]:
            raise OnboardError(
                f"{name} is {one} in {type(reference).__name__}, and a weight of its own in the generated model"
            )


def _weights(reference: nn.Module, eager: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the weights that a generated model has: transformers' without those of the towers."""
    return {
        name: tensor
        for name, tensor in separate_experts(reference).items()
        if not is_under(name, eager)
    }


def _states(
    reference: nn.Module, fresh: nn.Module, model: nn.Module, eager: Sequence[str]
) -> Iterator[nn.Module]:
    """Yield transformers' models; the second has other weights, with which recurrent mixers
    remember past chunks.
    """
    yield reference
    randomize(fresh, seed=1, center=_REMEMBERS)
    model.load_state_dict(_weights(fresh, eager))
    yield fresh


def _compare_blocks(
    reference: nn.Module,
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    proofs: dict[str, BlockProof],
    spec: ModelSpec,
) -> None:
    calls: dict[str, list[ModuleCall]] = {}
    wholes, own = _paths(model, spec, {chosen.KIND}), _paths(model, spec, {compressed.COMPRESSOR})
    own += _of_all_tokens(model, spec)
    with modules_recorded(reference, calls), torch.no_grad():
        reference(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False)
    handles = []
    for path, module in model.named_modules():
        if (
            path in calls
            and path
            and not is_under(path.rpartition(".")[0], wholes)
            and not is_under(path, own)
        ):
            handles.append(
                module.register_forward_hook(_forcing_hook(path, list(calls[path]), proofs))
            )
    try:
        with torch.no_grad():
            model(**inputs)
    except ProofError as error:  # a block differs, or is given something else
        error.blocks = running(error) or error.blocks
        raise
    finally:
        for handle in handles:
            handle.remove()


def _paths(model: nn.Module, spec: ModelSpec, kinds: set[str]) -> list[str]:
    """Return the paths of blocks that are called in another way than transformers', or whose parts
    are.

    An indexer's keys are made for each query apart. Those of blocks lie with the tokens, not one
    after the other: what they are shows in what attends to them.
    """
    return _paths_of(model, {block.class_name for block in spec.blocks if block.kind in kinds})


def _paths_of(model: nn.Module, names: set[str]) -> list[str]:
    return [path for path, module in model.named_modules() if type(module).__name__ in names]


def _of_all_tokens(model: nn.Module, spec: ModelSpec) -> list[str]:
    """Return the paths of experts that compute all tokens, not those that come to them, and of what
    gives a mixture the choices as they are: what they are shows in what their mixture gives.
    """
    out = []
    for block in (block for block in spec.blocks if isinstance(block, Mixture)):
        found = block.parameters
        parts = [found.experts] if found.layout == ANY else []
        parts += found.handed.through if found.handed is not None else []
        paths = _paths_of(model, {block.class_name})
        out += [f"{path}.{part}" for path in paths for part in parts]
    return out


def _forcing_hook(path: str, calls: list[ModuleCall], proofs: dict[str, BlockProof]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        call = calls.pop(_counterpart(args, calls))
        if (some := rows_of_theirs(args, output, call)) is not None:
            nothing = len(some[1]) > 0 and both_zero(*some)
            error = NOTHING if nothing else compare_outputs(path, type(module).__name__, *some)[1]
            note(proofs, path, type(module).__name__, error)
            return output  # what it gives of the others shows in what is made of them
        expected = expected_of(output, call)
        if both_zero(output, expected):
            note(proofs, path, type(module).__name__, NOTHING)
            return output
        rows = cut_tables(module, output, expected)
        forced, error = compare_outputs(path, type(module).__name__, rows, expected)
        note(proofs, path, type(module).__name__, error)
        return forced if rows is output else output  # which has the rows of all positions

    return hook


def _counterpart(args: tuple[Any, ...], calls: list[ModuleCall]) -> int:
    """Return which call of transformers this one stands for: the first with the same strings (a
    layer type).
    """
    strings = [item for item in args if isinstance(item, str)]
    for index, call in enumerate(calls):
        if [
            item for item in (*call.args, *call.kwargs.values()) if isinstance(item, str)
        ] == strings:
            return index
    return 0


def _compare_logits(
    reference: nn.Module,
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    proofs: dict[str, BlockProof],
) -> None:
    with torch.no_grad():
        expected = reference(
            **inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False
        ).logits
        actual = model(**inputs).logits
    name = type(model).__name__
    try:
        _, error = compare_outputs(f"logits {sizes(inputs)}", name, actual, expected)
    except ProofError:
        error = rmse_ratio(actual, expected)
        words = vocabulary(reference)
        if not error <= MOST_ROUNDING or not rounds_alike(reference, model, inputs, words):
            raise
    proofs.pop("", None) if error >= (proofs[""].error if "" in proofs else 0.0) else None
    note(proofs, "", name, error)
