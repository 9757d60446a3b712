"""The inputs and outputs of a model's blocks, recorded while the whole model runs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onboard.analysis.behaviour.left_at_classes import BETWEEN_LAYERS, left_at_classes
from onboard.analysis.counterparts import counterparts, is_choice, weights_of, without_later
from onboard.analysis.cut_tables import cut_tables, rows_for_each_text
from onboard.analysis.recognise.recorder import keeps_fields
from onboard.ops.rope.rope import complex_freqs
from onboard.ops.sparse.sparse import chosen_keys
from onboard.testing.steady import Again, copied, steady_tokens

_HALF = (torch.bfloat16, torch.float16)


@dataclass
class Call:
    """One call of a Hugging Face block: its arguments by name, in the order of its signature, and
    what it returned.
    """

    arguments: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)
    """The tensors of the returned value, in order."""
    held: list[torch.Tensor] = field(default_factory=list)
    """The tensors in objects, lists and dicts that it was given, once it has returned."""
    left: dict[str, torch.Tensor] = field(default_factory=dict)
    """What earlier layers had left at classes."""
    again: Again | None = None
    """The same call once more, on hidden states that differ a little."""

    def note_positions(self, position_ids: torch.Tensor) -> None:
        """Keep the prompt's positions where Hugging Face gave the block none: it counted them
        itself.
        """
        if self.arguments.get("position_ids") is None:
            self.arguments["position_ids"] = position_ids

    def replay(self, block: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Call the generated `block` with these arguments, by name; return pairs of its tensors and
        Hugging Face's.

        A generated block takes fewer arguments than its original (no masks, no caches), never
        others; only its first one may have another name. It may also return less: attention gives
        no weights. And where cos and sin are one complex number in the generated model, they are
        made one here.

        In half precision pairs lack the tokens that transformers' own block moves far when its
        input is rounded otherwise; how many is printed.
        """
        with torch.no_grad():
            given = {key: copied(value) for key, value in self._arguments_for(block).items()}
            actual = tensors(block(**given))
        expected = self._expected(len(actual))
        if [tensor.is_complex() for tensor in actual] == [True] and len(expected) == 2:
            expected = [complex_freqs(*expected)]
        if len(expected) == 1 and (weights := weights_of(actual, expected[0])) is not None:
            actual = [weights]
        assert 0 < len(actual) <= len(expected), (
            f"{type(block).__name__} returns {len(actual)} tensors, Hugging Face {len(expected)}"
        )
        matched = zip(actual, counterparts(actual, expected), strict=True)
        pairs = [(cut_tables(block, ours, theirs), theirs) for ours, theirs in matched]
        return self._steady(
            [_comparable(ours, _for_each_row(theirs, ours)) for ours, theirs in pairs]
        )

    def _expected(self, count: int) -> list[torch.Tensor]:
        """Return what so many tensors of a generated block are compared with: it returns what it
        changes in its arguments beside its result, or where the original returns nothing.
        """
        beside = self.held if count > 1 or not self.outputs else []
        return [*self.outputs, *beside]

    def _steady(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of tensors by token [batch, sequence, ...] without the tokens that no
        rounding can tell of.
        """
        if self.again is None or not self.outputs:
            return pairs
        first = self.outputs[0]
        if first.dtype not in _HALF or first.dim() != 3:
            return pairs
        steady = steady_tokens(self.again, first)
        if (left_out := int((~steady).sum())) == 0:
            return pairs
        print(
            f"{left_out} of {steady.numel()} tokens are left out: transformers itself moves them far by rounding"
        )
        by_token = [
            ours.shape[:2] == steady.shape and theirs.shape[:2] == steady.shape
            for ours, theirs in pairs
        ]
        return [
            (ours[steady.to(ours.device)], theirs[steady]) if fits else (ours, theirs)
            for fits, (ours, theirs) in zip(by_token, pairs, strict=True)
        ]

    def _arguments_for(self, block: nn.Module) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        parameters = inspect.signature(block.forward).parameters
        looked_up = "position_ids" in parameters  # by the block itself
        for position, (name, parameter) in enumerate(parameters.items()):
            if name in self.arguments and parameter.annotation == "AlibiSlopes":
                arguments[name] = alibi_slopes(self.arguments[name])
            elif name in self.arguments and parameter.annotation == "FoldedHeads":
                arguments[name] = _heads_apart(
                    self.arguments[name], len(self.arguments["position_ids"])
                )
            elif name in self.arguments:
                value = self.arguments[name]
                if position and not looked_up:
                    value = pytree.tree_map(self._for_each_text, value)
                arguments[name] = _in_form_of(parameter, value)
            elif name == BETWEEN_LAYERS:
                arguments[name] = dict(self.left)
            elif position == 0:
                arguments[name] = next(iter(self.arguments.values()))
            else:
                assert parameter.default is not inspect.Parameter.empty, (
                    f"{type(block).__name__} wants {name!r}, Hugging Face gives {sorted(self.arguments)}"
                )
        return arguments

    def _for_each_text(self, value: Any) -> Any:
        """Return rows of a table [sequence, size], or of pairs [sequence, size, 2], which Hugging
        Face's code cuts off for all texts alike, for each text: [batch, sequence, ...], as they are
        looked up by position.
        """
        hidden = next(iter(self.arguments.values()))
        both = isinstance(value, torch.Tensor) and isinstance(hidden, torch.Tensor)
        if not both or not _is_of_numbers(value) or hidden.dim() != 3:
            return value
        if value.dim() != 2 and not (value.dim() == 3 and value.shape[-1] == 2):
            return value
        batch, length = hidden.shape[:2]
        return value.expand(batch, *value.shape) if value.shape[0] == length else value


def _is_of_numbers(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def alibi_slopes(bias: torch.Tensor) -> torch.Tensor:
    """Return the slopes [heads] of a bias [(batch *) heads, ..., keys] that is linear in the key's
    position; later keys may be masked in it, of which the last query has none.
    """
    last = bias[..., -1, :]
    steps = ((last[..., -1] - last[..., 0]) / (bias.shape[-1] - 1)).flatten()
    lengths = (n for n in range(1, len(steps) + 1) if len(steps) % n == 0)
    heads = next(n for n in lengths if (steps.view(-1, n) == steps[:n]).all())
    return steps[:heads]


def _heads_apart(folded: torch.Tensor, batch: int) -> torch.Tensor:
    """Return [batch, sequence, heads, dim] of [batch * heads, sequence, dim]."""
    return folded.view(batch, -1, *folded.shape[1:]).transpose(1, 2)


def _comparable(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as they are, but of chosen keys those that count; both as masks where one of them
    is a mask.
    """
    if not is_choice(actual, expected):
        return without_later(actual), without_later(expected)
    return chosen_keys(actual, expected.shape[-1]).float(), expected.float()


def _for_each_row(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Repeat what Hugging Face made for the whole batch at once: positions [sequence, hidden] that
    it counts itself.

    Given one row of positions without a batch, [sequence], its block may add a batch of one, which
    ours does not.
    """
    if expected.dim() == 3 and actual.dim() == 4 and len(expected) == len(actual) * actual.shape[2]:
        return _heads_apart(expected, len(actual))
    if expected.dim() == 3 and expected.shape == (1, *actual.shape):
        return expected[0]
    if actual.dim() == 3 and expected.shape == (1, *actual.shape[1:]):
        return expected.expand_as(actual)
    return rows_for_each_text(expected, actual)


def _in_form_of(parameter: inspect.Parameter, value: Any) -> Any:
    """Return an argument as the generated block's parameter is declared.

    That may be one complex tensor for cos and sin, or one number for a vector that has it for each
    text.
    """
    if parameter.annotation in (int, "int") and isinstance(value, torch.Tensor):
        (number,) = set(value.flatten().tolist())
        return int(number)
    pair = isinstance(value, tuple) and [type(item) for item in value] == [
        torch.Tensor,
        torch.Tensor,
    ]
    return (
        complex_freqs(*value)
        if pair and parameter.annotation in (torch.Tensor, "torch.Tensor")
        else value
    )


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a returned value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def record_calls(
    model: nn.Module, paths: Iterable[str], prompts: Iterable[dict[str, torch.Tensor]]
) -> dict[str, list[Call]]:
    """Run `model` on each of `prompts`; return the calls of the submodule at each path, in the
    order they came in.

    The path "" is the whole model. It also gets a mask of ones, because without one Hugging Face
    takes a gap in the positions for the start of another packed sequence.
    """
    calls: dict[str, list[Call]] = {path: [] for path in paths}
    handles = []
    for path, found in calls.items():
        block = model.get_submodule(path)
        before, after = _hooks(block, found)
        handles += [
            # What it was called with
            block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            block.register_forward_hook(after, with_kwargs=True),
        ]
    with torch.no_grad():
        for prompt in prompts:
            model(**prompt, attention_mask=torch.ones_like(prompt["input_ids"]), use_cache=False)
            for call in itertools.chain.from_iterable(calls.values()):
                call.note_positions(prompt["position_ids"])
    for handle in handles:
        handle.remove()
    unused = [path for path, found in calls.items() if not found]
    assert not unused, f"the model never called {unused}"
    return calls


def hand_own_modules(
    calls: dict[str, list[Call]], theirs: nn.Module, ours: nn.Module
) -> dict[str, list[Call]]:
    """Return calls in which a module of `theirs` that a block was called with is the one of `ours` at
    its place: it takes what generated code gives it.
    """
    own = dict(ours.named_modules())
    places = {id(part): own[path] for path, part in theirs.named_modules() if path in own}

    def counterpart(value: Any) -> Any:
        return places.get(id(value), value) if isinstance(value, nn.Module) else value

    for call in itertools.chain.from_iterable(calls.values()):
        call.arguments = {k: pytree.tree_map(counterpart, v) for k, v in call.arguments.items()}
    return calls


def _hooks(block: nn.Module, found: list[Call]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks that add the block's calls to `found`; copies, since a model may work in
    place.
    """
    signature = inspect.signature(block.forward)
    takes_any = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # What the code of a repository has no parameter for is left out when it is called
        known = {key: kwargs[key] for key in kwargs if takes_any or key in signature.parameters}
        bound = signature.bind(*args, **known)
        left = left_at_classes(block)
        again = None if left else _again(block, bound)  # which finds there what the last text left
        found.append(Call(_flatten(bound, copied), left=left, again=again))

    def after(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        found[-1].outputs = [tensor.clone() for tensor in tensors(output)]
        given = (item for item in (*args, *kwargs.values()) if _may_be_filled(item))
        found[-1].held = [tensor.clone() for item in given for tensor in _tensors_in(item)]

    return before, after


def _again(block: nn.Module, bound: inspect.BoundArguments) -> Again | None:
    """Return a call that can be made again in half precision: of hidden states, or of a whole
    model.
    """
    first = next(iter(bound.arguments.values()), None)
    weights = next((weight.dtype for weight in block.parameters()), None)
    if not isinstance(first, torch.Tensor) or weights not in _HALF:
        return None
    if not (first.dtype in _HALF and first.dim() == 3) and not hasattr(
        block, "get_input_embeddings"
    ):
        return None
    arguments = pytree.tree_map(copied, dict(bound.arguments))
    return Again(block, inspect.BoundArguments(bound.signature, arguments))


def _flatten(bound: inspect.BoundArguments, copy: Callable[[Any], Any]) -> dict[str, Any]:
    """Name the arguments: `**kwargs` by their own names; cos and sin of `position_embeddings` also
    singly.
    """
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        keyword = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if keyword else {name: value}
    for name, value in [*named.items()]:
        named |= {key: part for key, part in _apart(name, value).items() if key not in named}
    named = {name: pytree.tree_map(copy, value) for name, value in named.items()}
    if isinstance(pair := named.get("position_embeddings"), tuple) and len(pair) == 2:
        named |= dict(zip(("cos", "sin"), pair, strict=True))
    return named


def _may_be_filled(value: Any) -> bool:
    """Whether a block may put something into what it is given."""
    return isinstance(value, list | dict) or keeps_fields(value)


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of an object, a named tuple, a list, a tuple or a dict by name or place."""
    if keeps_fields(value):
        return dict(vars(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return (
        dict(enumerate(value))
        if isinstance(value, list | tuple)
        else (dict(value) if isinstance(value, dict) else {})
    )


def _apart(name: str, value: Any) -> dict[str, Any]:
    """Return the parts of an argument under the names that a generated block has for them: `given_cos`
    of `given.cos`.
    """
    named: dict[str, Any] = {}
    for key, part in _parts(value).items():
        named |= {f"{name}_{key}": part, **_apart(f"{name}_{key}", part)}
    return named


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in _parts(value).values() for tensor in _tensors_in(part)]
