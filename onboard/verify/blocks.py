"""Prove a generated model file against transformers: identical random weights, block by block, then
the logits.

Every submodule of the generated model runs on exactly the inputs that its counterpart had in
transformers, because each output is replaced by the counterpart's before it goes on; so the first
block that differs is the one that is wrong.
"""

from __future__ import annotations

import ast
import copy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim

from onboard import modeling
from onboard.analysis.behaviour.thresholds import (
    build_roomy,
    crossing_prompts,
    exact_prompts,
    positions,
)
from onboard.analysis.counterparts import counterparts, is_choice, without_later
from onboard.analysis.multimodal import is_under
from onboard.analysis.recognise.recorder import ModuleCall, first_tensor, modules_recorded
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.tiny_model import (
    from_zero,
    load_config,
    one_line,
    prompt,
    prompts,
    randomize,
    vocabulary,
)
from onboard.codegen.translate.mechanisms.attention import chosen, compressed
from onboard.errors import OnboardError
from onboard.graph.export.guards import broken_guards
from onboard.hf.expert_weights import separate_experts
from onboard.ops.rope.rope import complex_freqs
from onboard.ops.sparse.sparse import chosen_keys
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.limits import SAME

_REMEMBERS = -1.5
_TRIED = 2048
"""The most tokens with which another path of the code is tried."""


@dataclass(frozen=True)
class BlockProof:
    """How far a block's output is from transformers', in the worst of all prompts."""

    path: str
    class_name: str
    error: float


def prove(source_text: str, spec: ModelSpec, *, export: bool = True) -> list[BlockProof]:
    """Compare a generated file with transformers on a tiny model of the spec's config.

    Returns:
        One proof for each submodule, the logits ("") last.

    Raises:
        OnboardError: the file does not load, names other parameters, or a block differs: the first
            one is named, with both values; or `torch.export` fails with dynamic batch and sequence.
    """
    reference = build_roomy(load_config(spec.config))
    fresh = copy.deepcopy(reference)  # a forward may change a model for good
    _stands_alone(source_text, spec)
    probed = copy.deepcopy(reference)
    crossing, shapes = crossing_prompts(probed), _shapes(probed)
    with _registered(source_text, spec) as model_class:
        model = _same_weights(model_class, reference, spec.eager, _config(spec, reference))
        proofs: dict[str, BlockProof] = {}
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
            raise OnboardError(
                f"the generated {spec.architecture} does not run: {one_line(error)}"
            ) from error
        if export:
            _check_export(model, reference, spec, shapes)
    return list(proofs.values())


def _shapes(reference: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts of one row, of one token if the model takes that, and of sizes that code may
    ask for.
    """
    rows = [
        from_zero(prompt(0, length=9, batch=batch, seed=7, tokens=vocabulary(reference)))
        for batch in (1, 2)
    ]
    tokens = [{name: tensor[:, :1] for name, tensor in each.items()} for each in rows]
    rows += exact_prompts(reference)
    try:
        with torch.no_grad():
            reference(**tokens[0], use_cache=False)
    except Exception:
        return rows
    return [*rows, *tokens]


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
    for theirs in (load_config(spec.config), config):
        ours = plain.from_dict(theirs.to_dict())
        own = [
            key for key in vars(theirs) if not key.startswith("_") and key != "transformers_version"
        ]
        names = [*own, *theirs.attribute_map, "rope_scaling"]
        if different := [key for key in names if getattr(ours, key, None) != getattr(theirs, key)]:
            raise OnboardError(
                f"the generated {type(ours).__name__} has another {different[0]} than the repository's"
            )
    return ours


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
        raise OnboardError(
            f"the generated {name} cannot be made for its own config: {one_line(error)}"
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
    model.load_state_dict(theirs)
    return model


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
    finally:
        for handle in handles:
            handle.remove()


def _paths(model: nn.Module, spec: ModelSpec, kinds: set[str]) -> list[str]:
    """Return the paths of blocks that are called in another way than transformers', or whose parts
    are.

    An indexer's keys are made for each query apart. Those of blocks lie with the tokens, not one
    after the other: what they are shows in what attends to them.
    """
    names = {block.class_name for block in spec.blocks if block.kind in kinds}
    return [path for path, module in model.named_modules() if type(module).__name__ in names]


def _forcing_hook(path: str, calls: list[ModuleCall], proofs: dict[str, BlockProof]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        expected = calls.pop(_counterpart(args, calls)).output
        forced, error = _compare(path, type(module).__name__, output, expected)
        _note(proofs, path, type(module).__name__, error)
        return forced

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


def _compare(path: str, class_name: str, output: Any, expected: Any) -> tuple[Any, float]:
    """Return the expected output in the generated block's form, and the error."""
    if isinstance(output, tuple):
        expected = list(expected.values()) if isinstance(expected, dict) else expected
        pairs = zip(output, counterparts(output, expected), strict=True)
        parts = [_compare(path, class_name, ours, theirs) for ours, theirs in pairs]
        return tuple(part for part, _ in parts), worst(error for _, error in parts)
    if output is None and expected is None:
        return None, 0.0
    if isinstance(output, list) and all(
        type(item) is int for item in output
    ):  # sizes that a block reads off its data
        if output != expected:
            raise OnboardError(f"{path} ({class_name}) gives {output}, not {expected}")
        return output, 0.0
    target = _counterpart_of(output, expected)
    assert target is not None
    if output.is_complex() and isinstance(expected, tuple):
        target = complex_freqs(*expected)
    if is_choice(output, target):  # positions here, a mask there
        _, error = _compare(
            path, class_name, chosen_keys(output, target.shape[-1]).float(), target.float()
        )
        return output, error
    if (
        output.shape != target.shape
        and target.dim() == 4
        and output.shape == target.transpose(1, 2).shape
    ):
        target = target.transpose(
            1, 2
        )  # a norm of heads, which generated attention applies before it swaps dimensions
    if target.shape in (output.shape[1:], (1, *output.shape[1:])):
        target = target.expand_as(
            output
        )  # one row of positions, which transformers counted for the whole batch
    if output.shape != target.shape:
        raise OnboardError(
            f"{path} ({class_name}) gives shape {list(output.shape)}, not {list(target.shape)}"
        )
    # Whether other ids that are hidden here made a difference, the logits tell, where nothing is
    # replaced.
    error = rmse_ratio(without_later(output), without_later(target))
    if not error <= SAME:
        raise OnboardError(_difference(path, class_name, output, target, error))
    return target, error


def _counterpart_of(output: torch.Tensor, expected: Any) -> torch.Tensor | None:
    """Return the tensor that a block's only one stands for, where transformers' may return others,
    too.
    """
    items = expected if isinstance(expected, tuple | list) else ()
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if not tensors or any(isinstance(item, tuple | list | dict) for item in items):
        return first_tensor(expected)
    found: torch.Tensor = counterparts([output], tensors)[0]
    return found


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
    _, error = _compare(f"logits {_sizes(inputs)}", name, actual, expected)
    proofs.pop("", None) if error >= (proofs[""].error if "" in proofs else 0.0) else None
    _note(proofs, "", name, error)


def _note(proofs: dict[str, BlockProof], path: str, class_name: str, error: float) -> None:
    if path not in proofs or error > proofs[path].error:
        proofs[path] = BlockProof(path, class_name, error)


def _difference(
    path: str, class_name: str, actual: torch.Tensor, expected: torch.Tensor, error: float
) -> str:
    worst = int((actual - expected).abs().flatten().nan_to_num(torch.inf).argmax())
    ours, theirs = actual.flatten()[worst].item(), expected.flatten()[worst].item()
    return (
        f"{path} ({class_name}) differs from transformers: rmse ratio {error:.1e}, "
        f"largest difference {ours:.6g} where transformers has {theirs:.6g}"
    )


def _check_export(
    model: nn.Module, reference: Any, spec: ModelSpec, shapes: list[dict[str, torch.Tensor]]
) -> None:
    """Export with dynamic batch and sequence: the graph has to be right for every size."""
    tokens = vocabulary(reference)
    inputs = prompt(2, length=11, batch=3, tokens=tokens)
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    name = type(model).__name__
    try:
        program = torch.export.export(
            model, (), inputs, dynamic_shapes={key: dims for key in inputs}, strict=False
        )
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise OnboardError(f"torch.export fails on the generated {name}: {text}") from error
    graph = program.module(check_guards=False)  # these are looked at all at once
    assert isinstance(graph, fx.GraphModule)
    # and export's bounds of sizes with them: what the graph computes is compared
    graph._forward_pre_hooks.clear()
    _check_guards(graph, model, positions(reference.config), spec)
    for other in (prompt(4, length=17, batch=2, tokens=tokens), *shapes):
        _compare_graph(graph, model, other)


def _compare_graph(
    graph: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor]
) -> None:
    with torch.no_grad():
        actual, expected = graph(**inputs).logits, model(**inputs).logits
    _compare(f"exported logits {_sizes(inputs)}", type(model).__name__, actual, expected)


def _check_guards(graph: fx.GraphModule, model: nn.Module, small: int, spec: ModelSpec) -> None:
    """Refuse code that takes another path for texts that the checkpoint has positions for.

    Another path may compute the same: that is tried. What lies just behind the `small` number of
    positions of the tiny model is the end of its tables, and an assertion is one of what
    transformers itself takes.
    """
    full = positions(load_config(spec.config))
    for broken in broken_guards(graph, full, shortest=1):
        is_end = broken.code.startswith("assert ") or (broken.length == small + 1 and small != full)
        is_tried = broken.length * broken.batch <= _TRIED
        inputs = (
            from_zero(prompt(0, length=broken.length, batch=broken.batch)) if is_tried else None
        )
        if not (is_end or (inputs is not None and _is_same_path(graph, model, inputs))):
            raise OnboardError(
                f"the code of {spec.architecture} takes another path {broken}",
                hint="No graph can follow that; report this architecture",
            )


def _is_same_path(graph: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether a graph computes what the model does, or the model has no such length."""
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception:
        return True
    try:
        _compare_graph(graph, model, inputs)
    except (
        OnboardError,
        RuntimeError,
        IndexError,
    ):  # it computes something else, or its shapes do not fit
        return False
    return True


def _sizes(inputs: dict[str, torch.Tensor]) -> list[int]:
    return list(inputs["input_ids"].shape)
