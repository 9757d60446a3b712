"""What a block gives beside its counterpart of transformers: the error, and where it is largest."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache

from onboard.analysis.counterparts import (
    counterparts,
    distance,
    is_choice,
    weights_of,
    without_later,
)
from onboard.analysis.cut_tables import rows_for_each_text
from onboard.analysis.recognise.recorder import ModuleCall, first_tensor
from onboard.errors import ProofError
from onboard.modeling import LOADED
from onboard.ops.rope.rope import complex_freqs
from onboard.ops.sparse.sparse import chosen_keys
from onboard.verify.error import rmse_ratio, worst
from onboard.verify.tolerances import SAME


@dataclass(frozen=True)
class BlockProof:
    """How far a block's output is from transformers', in the worst of all prompts."""

    path: str
    class_name: str
    error: float


NOTHING = -math.inf
"""The error of a block whose results were zeros: less than any other."""


def both_zero(output: Any, expected: Any) -> bool:
    """Whether a result is zeros as transformers' is, as of what the first token has of the one
    before it: no error can be relative to that.
    """
    if not isinstance(output, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    return output.shape == expected.shape and not output.any() and not expected.any()


def expected_of(output: Any, call: ModuleCall) -> Any:
    """Return what a block's output is compared with: what its counterpart gives, and what that has left
    in its arguments, which the block may return beside it, or instead of nothing.
    """
    alone = not isinstance(output, tuple) and first_tensor(call.output) is not None
    if alone or not call.left:
        return call.output
    if isinstance(output, list | dict):
        alike = [item for item in call.left if type(item) is type(output)]
        return min(alike, key=partial(distance, output), default=call.output)
    return (call.output, *call.left)


def compare_outputs(path: str, class_name: str, output: Any, expected: Any) -> tuple[Any, float]:
    """Return the expected output in the generated block's form, and the error."""
    if isinstance(output, tuple | list | dict) and not output and not expected:
        return output, 0.0
    if isinstance(output, tuple) and (weights := weights_of(output, expected)) is not None:
        return output, compare_outputs(path, class_name, weights, expected)[1]
    if isinstance(output, tuple):
        expected = list(expected.values()) if isinstance(expected, dict) else expected
        pairs = zip(output, counterparts(output, expected), strict=True)
        parts = [compare_outputs(path, class_name, ours, theirs) for ours, theirs in pairs]
        return tuple(part for part, _ in parts), worst(error for _, error in parts)
    if output is None and (expected is None or isinstance(expected, Cache)):
        return None, 0.0  # caches are not the model file's
    # Sizes that a block reads off its data, and fields of objects that are numbers.
    sized = isinstance(output, list) and all(type(item) is int for item in output)
    if sized or isinstance(output, bool | int | float):
        if output != expected:
            raise ProofError(
                f"{path} ({class_name}) gives {output}, not {expected}", blocks=(class_name,)
            )
        return output, 0.0
    if isinstance(output, list):  # of what each step of a loop gives
        both = zip(output, expected, strict=True)
        steps = [compare_outputs(path, class_name, ours, theirs) for ours, theirs in both]
        return [step for step, _ in steps], worst(error for _, error in steps)
    if isinstance(output, dict):  # which the block was given, and has filled
        entries = {
            key: compare_outputs(path, class_name, output[key], expected[key]) for key in output
        }
        return {key: part for key, (part, _) in entries.items()}, worst(
            e for _, e in entries.values()
        )
    target = _counterpart_of(output, expected)
    assert target is not None
    if output.is_complex() and isinstance(expected, tuple):
        target = complex_freqs(*expected)
    if is_choice(output, target):  # positions here, a mask there
        _, error = compare_outputs(
            path, class_name, chosen_keys(output, target.shape[-1]).float(), target.float()
        )
        return output, error
    if output.shape == target.shape and output.numel() == 0:  # of an expert without tokens
        return target, 0.0
    target = _laid_out_as(output, target)
    if output.shape != target.shape:
        raise ProofError(
            f"{path} ({class_name}) gives shape {list(output.shape)}, not {list(target.shape)}",
            blocks=(class_name,),
        )
    # Whether other ids that are hidden here made a difference, the logits tell, where nothing is
    # replaced.
    error = rmse_ratio(without_later(output), without_later(target))
    if not error <= SAME:
        said = _difference(path, class_name, output, target, error)
        raise ProofError(said, blocks=(class_name,))
    return target, error


def _laid_out_as(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return transformers' tensor as the generated block lays it out, where that is known."""
    if output.shape == target.shape:
        return target
    # A norm of heads: generated attention applies it before it swaps dimensions.
    if target.dim() == 4 and output.shape == target.transpose(1, 2).shape:
        return target.transpose(1, 2)
    # Batch and heads, which old attention has as one dimension.
    if target.dim() == 3 and output.dim() == 4:
        batch, sequence, heads, size = output.shape
        if target.shape == (batch * heads, sequence, size):
            return target.view(batch, heads, sequence, size).transpose(1, 2)
    # One row of positions, which transformers counted for the whole batch.
    if target.shape == (1, *output.shape[1:]):
        return target.expand_as(output)
    return rows_for_each_text(target, output)


def rows_of_theirs(args: Any, output: Any, call: ModuleCall) -> tuple[Any, torch.Tensor] | None:
    """Return the rows of a module's output that its counterpart computes, too, and that one's output;
    None where both compute as many rows, or a row of the counterpart's is none of the module's.

    Args:
        args: what the module is given: tokens [..., size] first.
        output: [..., width], of as many tokens.
        call: of the counterpart: fewer rows [some, size], which gave [some, width].
    """
    ours, theirs = first_tensor(args), first_tensor((*call.args, *call.kwargs.values()))
    expected = first_tensor(call.output)
    if ours is None or theirs is None or expected is None:
        return None
    if not _are_rows(ours, output) or not _are_rows(theirs, expected):
        return None
    mine, them = ours.flatten(0, -2), theirs.flatten(0, -2)
    if mine.shape[-1] != them.shape[-1] or len(them) >= len(mine):
        return None
    if len(them) == 0:
        return output.flatten(0, -2)[:0], expected.flatten(0, -2)
    distance, place = torch.cdist(them.double(), mine.double()).min(dim=-1)
    if bool((distance > SAME * mine.double().norm(dim=-1).max()).any()):
        return None
    return output.flatten(0, -2)[place], expected.flatten(0, -2)


def _are_rows(given: torch.Tensor, made: Any) -> bool:
    """Whether something is made of each row that is given."""
    return (
        isinstance(made, torch.Tensor)
        and given.dim() > 1
        and given.is_floating_point()
        and made.shape[:-1] == given.shape[:-1]
    )


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


def note(proofs: dict[str, BlockProof], path: str, class_name: str, error: float) -> None:
    """Keep a block's worst error."""
    if path not in proofs or error > proofs[path].error:
        proofs[path] = BlockProof(path, class_name, error)


def running(error: Exception) -> tuple[str, ...]:
    """Return the classes of a model file whose code led to an error, the innermost first."""
    owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    classes = [type(owner) for owner in owners if isinstance(owner, nn.Module)]
    names = [cls.__name__ for cls in classes if cls.__module__.startswith(LOADED)]
    return tuple(dict.fromkeys(reversed(names)))


def _difference(
    path: str, class_name: str, actual: torch.Tensor, expected: torch.Tensor, error: float
) -> str:
    worst = int((actual - expected).abs().flatten().nan_to_num(torch.inf).argmax())
    ours, theirs = actual.flatten()[worst].item(), expected.flatten()[worst].item()
    return (
        f"{path} ({class_name}) differs from transformers: rmse ratio {error:.1e}, "
        f"largest difference {ours:.6g} where transformers has {theirs:.6g}"
    )


def sizes(inputs: dict[str, torch.Tensor]) -> list[int]:
    """Return batch and sequence length of a prompt."""
    return list(inputs["input_ids"].shape)
