"""Linear layers that compute with codes of four bits, or with integers of eight, in the place of
those that would decode them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from onboard.graph.fx import arguments, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.quantise.four_bit_parts import LINEARS as FOUR_BITS
from onboard.graph.quantise.four_bit_parts import zero_dtype
from onboard.graph.quantise.schemes import Schemes, group_of
from onboard.graph.weight_load.parameters import Form, Joined, Part, set_parameter, weight_plan
from onboard.graph.weight_load.quantised_linears import joined_weights, replace_linears
from onboard.graph.weight_load.scales.input_scales import how_inputs_are_quantised, plan_input_scale
from onboard.ops.four_bits.four_bits import RUN, WORDS
from onboard.quantised.weight import QuantisedWeight

_ops, aten = torch.ops.onboard, torch.ops.aten
OPS = {**FOUR_BITS, "int8": "torch_int8_linear"}
"""By what weights are computed as: the op for linear layers."""
_ARGUMENTS = {"words": "weight", "codes": "weight", "scale": "weight_scale"}
"""Arguments of ops that have other names than parts."""
_CODES = ("words", "codes")
"""Parts that are a linear's weight."""
Kinds = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Parts of a weight: their dtype, and their columns, which may be none."""


@dataclass(frozen=True)
class CodedLinears:
    """The linears of a graph that can compute with codes of a kind."""

    gm: GraphModule
    weights: Mapping[str, QuantisedWeight]
    kind: str
    """As `QuantisedWeight.computed_as` has it."""
    schemes: Schemes
    dtype: torch.dtype
    """The run's."""

    def quantise(self) -> int:
        """Let them compute with codes; return how many do."""
        return replace_linears(self.gm, self._alike, self._quantise)

    def _alike(self, name: str) -> list[QuantisedWeight]:
        """Return the weights that a parameter joins, if all are of this kind and one scheme; else
        nothing.
        """
        known = joined_weights(self.gm, name, self.weights)
        if not known or any(weight.computed_as != self.kind for weight in known):
            return []
        found = {self.schemes.of(weight) for weight in known}
        return [] if None in found or len(found) > 1 else known

    def _quantise(self, linear: Node, weights: list[QuantisedWeight]) -> None:
        """Give a linear the codes of its weight, and one more parameter for each further part."""
        values = arguments(linear)
        old, first = values["weight"], weights[0]
        name = str(old.target)
        given: dict[str, Any] = {"bias": values["bias"], "group": group_of(first)}
        for kind, (dtype, columns) in self._kinds(first).items():
            part = self._part(linear, name, kind, weights, dtype, *columns)
            given[_ARGUMENTS.get(kind, kind)] = part
        given["input"] = self._inputs(linear, name, weights)
        given["quantize"] = how = how_inputs_are_quantised(first) if self.kind == "int8" else ""
        if how == "tensor":
            plan = weight_plan(self.gm)
            parts = [plan.weight_of(part) for part in plan.parts(name)]
            scale = plan_input_scale(self.gm, name, parts)
            given["input_scale"] = read_parameter(self.gm, linear, scale)
        replace_with(linear, self._call(linear, given))
        if not old.users:
            self.gm.graph.erase_node(old)

    def _call(self, linear: Node, given: Mapping[str, Any]) -> Node:
        op = getattr(_ops, OPS[self.kind]).default
        values = [
            given.get(each.name, each.default_value if each.has_default_value() else None)
            for each in op._schema.arguments
        ]
        return insert_call(self.gm, linear, op, *values, like=linear)

    def _kinds(self, weight: QuantisedWeight) -> Kinds:
        """Return the parts of a weight that the op takes."""
        inputs = weight.shape[1]
        groups = [-(-inputs // group_of(weight))]
        kinds: dict[str, tuple[torch.dtype, Sequence[int]]] = {
            "scale": (weight.scale_dtype, groups)
        }
        if self.kind == "int8":
            offset = {"offset": (torch.float32, groups)} if weight.has_offset else {}
            return {"codes": (torch.int8, [inputs])} | kinds | offset
        if weight.has_offset:
            kinds["zero"] = (zero_dtype(weight), groups)
        if "whole" in weight.parts:
            kinds["whole"] = (torch.float32, [])
        return {"words": (torch.int32, [-(-inputs // RUN) * WORDS])} | kinds

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
        groups = self.schemes.read(weight, "groups").flatten().long()
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
        plan, is_codes = weight_plan(self.gm), kind in _CODES
        whole = name if is_codes else f"{name}_{kind}"
        old = plan.parts(name) if is_codes else [plan.weight_of(p) for p in plan.parts(name)]
        parts = [part if is_codes else f"{part}_{kind}" for part in old]
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
        empty: Tensor = torch.empty(shape, dtype=dtype, device=device)
        set_parameter(self.gm, name, nn.Parameter(empty, requires_grad=False))
