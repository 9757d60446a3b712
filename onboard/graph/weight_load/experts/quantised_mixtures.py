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
from onboard.graph.quantise.four_bit_parts import zero_dtype
from onboard.graph.quantise.kernel_forms import has_kernels
from onboard.graph.weight_load.experts.expert_stacks import free
from onboard.graph.weight_load.experts.mixture_stacks import Mixture, Stack, mixtures
from onboard.graph.weight_load.parameters import Form, Joined, Part, set_parameter, weight_plan
from onboard.graph.weight_load.scales.input_scales import InputScales, how_inputs_are_quantised
from onboard.ops.four_bits.four_bits import RUN, WORDS
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.quantised.weight import QuantisedWeight

EXPERT_KEYS = (
    "quantize_fp8_moe_from_config",
    "quantize_finegrained_fp8_moe_from_config",
    "quantize_int8_moe_from_config",
)
"""The transforms that let experts compute with quantised inputs."""
ROWS = "fp8_moe"
BLOCKS = "finegrained_fp8_moe"
_FP8_OPS = {None: ROWS, (BLOCK, BLOCK): BLOCKS}
"""The op, without its back end, for eight-bit weights with a block."""
_EIGHT_BITS = ("fp8", "int8")
"""Codes of weights whose inputs may be quantised, too."""
_CODES = ("codes", "words")
"""Parts that are a stack's parameter."""
_OTHER_PARTS = {"groups", "inputs"}
"""Parts of integers and four-bit weights that mixtures' ops do not take."""


def _op_for(weight: QuantisedWeight, inputs: int) -> str | None:
    """Return the op that computes with a weight of so many inputs."""
    kind = weight.computed_as
    if kind == "fp8":
        return None if "zero" in weight.parts else _FP8_OPS.get(weight.block)
    fits = has_kernels(kind, weight.block, inputs)
    return f"{kind}_moe" if fits and not _OTHER_PARTS & weight.parts.keys() else None


def _group(weight: QuantisedWeight, inputs: int) -> int:
    """Return how many inputs share a scale."""
    return inputs if weight.block is None else weight.block[1]


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
        mixed = len(ops) > 1 and ops != {ROWS, BLOCKS}
        if None in ops or not alike or mixed or self._shared_group(mixture) is None:
            self.differing += _op_for(both[0], mixture.up.inputs) == self.op
            return False
        # A stack in rows may stand beside one in blocks
        return self.op == (BLOCKS if BLOCKS in ops else ops.pop())

    def _op_of(self, stack: Stack, parts: int) -> str | None:
        """Return the op for a stack, None where its weights are not alike, or one codes' rows are
        not where another's are.
        """
        found, names = self._of(stack), weight_plan(self.gm).parts(stack.name)
        ops = {_op_for(each, stack.inputs) for each in found}
        forms = {
            (each.block, each.scale_dtype, each.has_offset, *sorted(each.parts)) for each in found
        }
        if len(found) != len(names) or len(ops) != 1 or len(forms) != 1:
            return None
        if len(names) == 1:
            blocks = found[0].kind == "fp8" and found[0].block
            across = blocks and stack.rows // parts % BLOCK and parts > 1
            lacks = "whole" in found[0].parts  # one for all experts
            differs = found[0].transposed != stack.transposed
            return None if across or lacks or differs else ops.pop()
        return ops.pop()

    def _shared_group(self, mixture: Mixture) -> int | None:
        """Return how many inputs share a scale, in both products; None where they differ."""
        stacks = (mixture.up, mixture.down)
        groups = [_group(self._of(stack)[0], stack.inputs) for stack in stacks]
        whole = all(group >= stack.inputs for group, stack in zip(groups, stacks, strict=True))
        in_groups = self._of(mixture.up)[0].kind != "fp8"
        return max(groups) if whole or groups[0] == groups[1] or not in_groups else None

    def _replace(self, mixture: Mixture) -> None:
        values: dict[str, Any] = dict(arguments(mixture.node))
        first = self._of(mixture.up)[0]
        how = how_inputs_are_quantised(first) if first.computed_as in _EIGHT_BITS else ""
        values |= {"order": mixture.order, "quantize": how, "group": self._shared_group(mixture)}
        stacks = {"w3_w1": mixture.up, "w2": mixture.down}
        if how == "tensor":
            differ = [
                len(set(map(self.scales.read, self._of(each)))) > 1 for each in stacks.values()
            ]
            self.scales.differing += any(differ)
        for (name, stack), bias in zip(stacks.items(), mixture.biases, strict=True):
            values[f"{name}_stacked_bias"] = self._read(mixture, bias)
            for argument, parameter in self._plan(stack, how).items():
                values[f"{name}_{argument}"] = self._read(mixture, parameter)
        self._call(mixture, values)

    def _plan(self, stack: Stack, how: str) -> dict[str, str]:
        """Plan where the parts of a stack come from; return their parameters by argument."""
        first, parts = self._of(stack)[0], weight_plan(self.gm).parts(stack.name)
        weights = [weight_plan(self.gm).weight_of(part) for part in parts]
        found = {}
        for kind, (dtype, rows, columns) in self._kinds(first, stack).items():
            forms = [
                Form(
                    part, kind, first.block, transposed=stack.transposed, encoding=first.computed_as
                )
                for part in weights
            ]
            name = self._plan_part(stack, kind, forms, parts, rows, columns, dtype)
            found["stacked_weight" if kind in _CODES else f"weight_{kind}"] = name
        if how == "tensor":
            found["input_scale"] = self._plan_input_scale(stack, weights)
        return found

    def _kinds(
        self, weight: QuantisedWeight, stack: Stack
    ) -> dict[str, tuple[torch.dtype, int, list[int]]]:
        """Return the parts of a stack: their dtype, how many rows share a row of them, and their
        columns.
        """
        if weight.kind == "fp8":
            size = BLOCK if weight.block else 1
            columns = [-(-stack.inputs // BLOCK)] if weight.block else []
            codes = (torch.float8_e4m3fn, 1, [stack.inputs])
            return {"scale": (torch.float32, size, columns), "codes": codes}
        groups = [-(-stack.inputs // _group(weight, stack.inputs))]
        kinds = {"scale": (weight.scale_dtype, 1, groups)}
        if weight.computed_as == "int8":
            offset = {"offset": (torch.float32, 1, groups)} if weight.has_offset else {}
            return kinds | offset | {"codes": (torch.int8, 1, [stack.inputs])}
        if weight.has_offset:
            kinds["zero"] = (zero_dtype(weight), 1, groups)
        if "whole" in weight.parts:
            kinds["whole"] = (torch.float32, 1, [])
        return kinds | {"words": (torch.int32, 1, [-(-stack.inputs // RUN) * WORDS])}

    def _plan_part(
        self, stack: Stack, kind: str, forms: list[Form], parts: list[str],
        shared: int, columns: list[int], dtype: torch.dtype,
    ) -> str:  # fmt: skip
        """Plan a part of a stack's weights as a parameter; return its name."""
        plan, is_codes = weight_plan(self.gm), kind in _CODES
        name = stack.name if is_codes else f"{stack.name}_{kind}"
        pieces = max(1, len(parts) // stack.experts)
        rows = -(-(stack.rows // pieces) // shared)
        named = parts if is_codes else [f"{part}_{kind}" for part in parts]
        plan.forms.update(zip(named, forms, strict=True))
        if len(parts) > 1 and not is_codes:
            plan.joins[name] = Joined(tuple(Part(part, rows) for part in named), 0, stacked=True)
        return self._set(name, (stack.experts, rows * pieces, *columns), dtype)

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

    def _plan_input_scale(self, stack: Stack, weights: list[str]) -> str:
        """Plan the scales of a stack's inputs, [experts]: an expert's are the largest of its
        weights'.
        """
        name, plan = f"{stack.name}_input_scale", weight_plan(self.gm)
        if len(weights) == 1:
            plan.forms[name] = Form(weights[0], "input_scale")
            return self._set(name, [stack.experts], torch.float32)
        each = len(weights) // stack.experts
        groups = [weights[start : start + each] for start in range(0, len(weights), each)]
        for first, *rest in groups:
            form = Form(first, "input_scale", beside=tuple(rest))
            plan.forms[f"{first}_input_scale"] = form
        plan.joins[name] = Joined(tuple(Part(f"{first}_input_scale", 1) for first, *_ in groups), 0)
        return self._set(name, [stack.experts], torch.float32)

    def _set(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        tensor = torch.empty(*shape, dtype=dtype, device="meta")
        set_parameter(self.gm, name, nn.Parameter(tensor, requires_grad=False))
        return name
