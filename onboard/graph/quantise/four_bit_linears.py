"""Linear layers that compute with codes of four bits, in the place of those that would decode
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from onboard.graph.fx import arguments, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.quantise.four_bit_parts import LINEARS, fits_kernels
from onboard.graph.weight_load.parameters import Form, Joined, Part, set_parameter, weight_plan
from onboard.graph.weight_load.quantised_linears import joined_weights, replace_linears
from onboard.ops.linear.four_bits import RUN, WORDS
from onboard.quantised.weight import QuantisedWeight

_ops, aten = torch.ops.onboard, torch.ops.aten
_OF_INPUTS = ("groups", "inputs")
"""Parts that say something of a weight's inputs: joined weights have the same."""
Read = Callable[[QuantisedWeight, str], Tensor]
"""Returns a part of a weight as the checkpoint has it, by its role."""


@dataclass(frozen=True)
class FourBitLinears:
    """The linears of a graph that can compute with codes of a kind."""

    gm: GraphModule
    weights: Mapping[str, QuantisedWeight]
    kind: str
    """ "int4", "mxfp4" or "nvfp4"."""
    read: Read
    dtype: torch.dtype
    """The run's."""

    def quantise(self) -> int:
        """Let them compute with codes; return how many do."""
        return replace_linears(self.gm, self._alike, self._quantise)

    def _alike(self, name: str) -> list[QuantisedWeight]:
        """Return the weights that a parameter joins, if all are of this kind and have the same
        groups of the same inputs; else nothing.
        """
        known = joined_weights(self.gm, name, self.weights)
        if not known or not all(map(self._fits, known)) or len(set(map(_scheme, known))) > 1:
            return []
        return known if all(self._shares(known, role) for role in _OF_INPUTS) else []

    def _fits(self, weight: QuantisedWeight) -> bool:
        """Tell whether kernels read a weight: groups of inputs in any order have to be of one
        size.
        """
        if weight.kind != self.kind or len(weight.shape) != 2 or weight.transposed:
            return False
        if not fits_kernels(_group(weight), weight.shape[1]):
            return False
        if "groups" not in weight.parts:
            return True
        sizes = torch.bincount(self.read(weight, "groups").flatten().long())
        return bool((sizes[:-1] == _group(weight)).all() and sizes[-1] <= _group(weight))

    def _shares(self, weights: list[QuantisedWeight], role: str) -> bool:
        if role not in weights[0].parts or len(weights) == 1:
            return True
        first, *others = (self.read(weight, role) for weight in weights)
        return all(torch.equal(first, other) for other in others)

    def _quantise(self, linear: Node, weights: list[QuantisedWeight]) -> None:
        """Give a linear the words of its weight, and one more parameter for each further part."""
        values = arguments(linear)
        old = values["weight"]
        name, first = str(old.target), weights[0]
        outputs, inputs = self.gm.get_parameter(name).shape
        runs, groups = -(-inputs // RUN), -(-inputs // _group(first))
        words = self._part(linear, name, "words", weights, torch.int32, runs * WORDS)
        scale = self._part(linear, name, "scale", weights, first.scale_dtype, groups)
        zero = whole = None
        if "zero" in first.parts:
            zero = self._part(linear, name, "zero", weights, torch.uint8, groups)
        if "whole" in first.parts:
            whole = self._part(linear, name, "whole", weights, torch.float32)
        x = self._inputs(linear, name, weights)
        op = getattr(_ops, LINEARS[self.kind]).default
        levels = op._schema.arguments[6].default_value
        tensors = (x, words, values["bias"], scale, zero, whole)
        new = insert_call(self.gm, linear, op, *tensors, levels, _group(first), like=linear)
        replace_with(linear, new)
        if not old.users:
            self.gm.graph.erase_node(old)

    def _inputs(self, linear: Node, name: str, weights: list[QuantisedWeight]) -> Node:
        """Return a linear's input as its codes take it: times factors, in the order of groups."""
        x: Node = arguments(linear)["input"]
        size = weights[0].shape[1]
        if "inputs" in weights[0].parts:
            factors = self._of_inputs(linear, name, "inputs", weights, self.dtype, size)
            x = insert_call(self.gm, linear, aten.mul.Tensor, x, factors, like=x)
        if "groups" in weights[0].parts and not self._in_order(weights[0]):
            order = self._of_inputs(linear, name, "order", weights, torch.int64, size)
            x = insert_call(self.gm, linear, aten.index_select.default, x, -1, order, like=x)
        return x

    def _in_order(self, weight: QuantisedWeight) -> bool:
        groups = self.read(weight, "groups").flatten().long()
        return torch.equal(groups, groups.sort().values)

    def _part(
        self,
        linear: Node,
        name: str,
        kind: str,
        weights: list[QuantisedWeight],
        dtype: torch.dtype,
        *columns: int,
    ) -> Node:
        """Plan a part of joined weights as a parameter [outputs, columns]; return what reads it."""
        plan, whole = weight_plan(self.gm), name if kind == "words" else f"{name}_{kind}"
        old = plan.parts(name) if kind == "words" else [plan.weight_of(p) for p in plan.parts(name)]
        parts = [part if kind == "words" else f"{part}_{kind}" for part in old]
        self._set(whole, sum(weight.shape[0] for weight in weights), *columns, dtype=dtype)
        for part, weight in zip(parts, old, strict=True):
            plan.forms[part] = self._form(weight, kind, weights[0])
        if parts != [whole]:
            sizes = (weight.shape[0] for weight in weights)
            plan.joins[whole] = Joined(tuple(map(Part, parts, sizes)), 0)
        return read_parameter(self.gm, linear, whole)

    def _of_inputs(
        self, linear: Node, name: str, kind: str, weights: list[QuantisedWeight], dtype: torch.dtype, size: int,
    ) -> Node:  # fmt: skip
        """Plan what joined weights have in common for their inputs, [inputs]; return what reads
        it.
        """
        plan, whole = weight_plan(self.gm), f"{name}_{kind}"
        self._set(whole, size, dtype=dtype)
        first = plan.weight_of(plan.parts(name)[0])
        plan.forms[whole] = self._form(first, kind, weights[0])
        return read_parameter(self.gm, linear, whole)

    def _form(self, part: str, kind: str, weight: QuantisedWeight) -> Form:
        return Form(part, kind, weight.block, encoding=self.kind)

    def _set(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        device = next(self.gm.parameters()).device
        empty = torch.empty(shape, dtype=dtype, device=device)
        set_parameter(self.gm, name, nn.Parameter(empty, requires_grad=False))


def _group(weight: QuantisedWeight) -> int:
    return weight.shape[1] if weight.block is None else weight.block[1]


def _scheme(weight: QuantisedWeight) -> tuple[object, ...]:
    """Return in what weights that are joined are alike."""
    roles = {role for role in weight.parts if role != "codes"}
    return weight.block, weight.scale_dtype, frozenset(roles)
