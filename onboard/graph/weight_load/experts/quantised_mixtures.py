"""Mixtures of experts that compute with a checkpoint's codes, in the place of those that would
decode them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from onboard.graph.fx import arguments, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.weight_load.experts.expert_stacks import free
from onboard.graph.weight_load.experts.mixture_stacks import Mixture, Stack, mixtures
from onboard.graph.weight_load.input_scales import InputScales, how_inputs_are_quantised
from onboard.graph.weight_load.parameters import Form, Joined, Part, set_parameter, weight_plan
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.weight import QuantisedWeight

EXPERT_KEYS = ("quantize_fp8_moe_from_config", "quantize_finegrained_fp8_moe_from_config")
"""The transforms that let experts compute with quantised inputs."""
ROWS = "fp8_moe"
BLOCKS = "finegrained_fp8_moe"
_OPS = {("fp8", None): ROWS, ("fp8", (BLOCK, BLOCK)): BLOCKS}
"""The op, without its back end, for weights of a kind, and a block."""


def _op_for(weight: QuantisedWeight) -> str | None:
    return None if "zero" in weight.parts else _OPS.get((weight.kind, weight.block))


@dataclass
class Quantiser:
    """What is done to all mixtures of a graph for one op."""

    gm: GraphModule
    weights: Mapping[str, QuantisedWeight]
    op: str
    scales: InputScales
    differing: int = field(default=0, init=False)
    """How many mixtures have weights for this op, and others."""

    def run(self) -> int:
        """Let mixtures compute with codes; return how many do."""
        if not self.weights:
            return 0
        found = [each for each in mixtures(self.gm) if self._takes(each)]
        for each in found:
            self._replace(each)
        return len(found)

    def facts(self) -> list[str]:
        """Return what is to be known of mixtures that are decoded, and of scales that differ."""
        facts = []
        if self.differing:
            facts.append(f"{self.differing} mixtures are decoded: their weights are not alike")
        if self.scales.differing:
            facts.append(
                f"experts of {self.scales.differing} mixtures have input scales that differ"
            )
        return facts

    def _of(self, stack: Stack) -> list[QuantisedWeight]:
        """Return a stack's weights, as far as they are quantised."""
        parts = weight_plan(self.gm).parts(stack.name)
        return [self.weights[part] for part in parts if part in self.weights]

    def _takes(self, mixture: Mixture) -> bool:
        """Whether all weights of a mixture are for this op, and their inputs are quantised
        alike.
        """
        both = [*self._of(mixture.up), *self._of(mixture.down)]
        if not both:
            return False
        ops = {self._op_of(mixture.up, mixture.parts), self._op_of(mixture.down, 1)}
        alike = len({(each.activations, how_inputs_are_quantised(each)) for each in both}) == 1
        if None in ops or not alike or (len(ops) > 1 and ops != {ROWS, BLOCKS}):
            self.differing += _op_for(both[0]) == self.op
            return False
        # A stack in rows may stand beside one in blocks
        return self.op == (BLOCKS if BLOCKS in ops else ops.pop())

    def _op_of(self, stack: Stack, parts: int) -> str | None:
        """Return the op for a stack, None where its weights are not alike, or one codes' rows are
        not where another's are.
        """
        found, names = self._of(stack), weight_plan(self.gm).parts(stack.name)
        ops = {_op_for(each) for each in found}
        if len(found) != len(names) or len(ops) != 1:
            return None
        if len(names) == 1:
            across = found[0].block and stack.rows // parts % BLOCK and parts > 1
            return None if across or found[0].transposed != stack.transposed else ops.pop()
        return ops.pop()

    def _replace(self, mixture: Mixture) -> None:
        values: dict[str, Any] = dict(arguments(mixture.node))
        how = how_inputs_are_quantised(self._of(mixture.up)[0])
        values |= {"order": mixture.order, "quantize": how}
        stacks = {"w3_w1": mixture.up, "w2": mixture.down}
        if how == "tensor":
            differ = [
                len(set(map(self.scales.read, self._of(each)))) > 1 for each in stacks.values()
            ]
            self.scales.differing += any(differ)
        for (name, stack), bias in zip(stacks.items(), mixture.biases, strict=True):
            block = self._of(stack)[0].block
            values[f"{name}_stacked_bias"] = self._read(mixture, bias)
            values[f"{name}_stacked_weight"] = self._read(mixture, self._plan_codes(stack, block))
            values[f"{name}_weight_scale"] = self._read(mixture, self._plan_scale(stack, block))
            if how == "tensor":
                scale = self._read(mixture, self._plan_input_scale(stack))
                values[f"{name}_input_scale"] = scale
        self._call(mixture, values)

    def _read(self, mixture: Mixture, name: str | None) -> Any:
        return None if name is None else read_parameter(self.gm, mixture.node, name)

    def _call(self, mixture: Mixture, values: Mapping[str, Any]) -> None:
        op, node = getattr(torch.ops.onboard, f"torch_{self.op}").default, mixture.node
        args = [
            values.get(each.name, each.default_value if each.has_default_value() else None)
            for each in op._schema.arguments
        ]
        replace_with(node, insert_call(self.gm, node, op, *args, like=node))
        free(self.gm, mixture.sources)

    def _plan_codes(self, stack: Stack, block: tuple[int, int] | None) -> str:
        """Give a stack's parameter the codes of its weights."""
        for part in weight_plan(self.gm).parts(stack.name):
            self._note(part, Form(part, "codes", block, transposed=stack.transposed))
        shape = (stack.experts, stack.rows, stack.inputs)
        return self._set(stack.name, shape, torch.float8_e4m3fn)

    def _plan_scale(self, stack: Stack, block: tuple[int, int] | None) -> str:
        """Plan where the scales of a stack come from; return their parameter's name."""
        name, plan = f"{stack.name}_scale", weight_plan(self.gm)
        parts = plan.parts(stack.name)
        whole, pieces = len(parts) == 1, max(1, len(parts) // stack.experts)
        rows = stack.rows // pieces
        rows = -(-rows // BLOCK) if block else rows
        columns = [-(-stack.inputs // BLOCK)] if block else []
        for part in parts:
            form = Form(part, "scale", block, transposed=stack.transposed)
            self._note(f"{part}_scale", form)
        if not whole:
            joined = tuple(Part(f"{part}_scale", rows) for part in parts)
            plan.joins[name] = Joined(joined, 0, stacked=True)
        return self._set(name, (stack.experts, rows * pieces, *columns), torch.float32)

    def _plan_input_scale(self, stack: Stack) -> str:
        """Plan the scales of a stack's inputs, [experts]: an expert's are the largest of its
        weights'.
        """
        name, plan = f"{stack.name}_input_scale", weight_plan(self.gm)
        parts = plan.parts(stack.name)
        if len(parts) == 1:
            self._note(name, Form(parts[0], "input_scale"))
            return self._set(name, [stack.experts], torch.float32)
        each = len(parts) // stack.experts
        groups = [parts[start : start + each] for start in range(0, len(parts), each)]
        for first, *rest in groups:
            self._note(f"{first}_input_scale", Form(first, "input_scale", beside=tuple(rest)))
        plan.joins[name] = Joined(tuple(Part(f"{first}_input_scale", 1) for first, *_ in groups), 0)
        return self._set(name, [stack.experts], torch.float32)

    def _note(self, name: str, form: Form) -> None:
        weight_plan(self.gm).forms[name] = form

    def _set(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        tensor = torch.empty(*shape, dtype=dtype, device="meta")
        set_parameter(self.gm, name, nn.Parameter(tensor, requires_grad=False))
        return name
