"""Linear layers with NVFP4 weights whose checkpoint quantises inputs, too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.graph.context import TransformContext
from onboard.graph.fx import Target, arguments, is_op, replace_with
from onboard.graph.new_nodes import insert_call, read_parameter
from onboard.graph.weight_load.parameters import mark_loaded, weight_plan
from onboard.graph.weight_load.quantised_folder import quantised_checkpoint
from onboard.graph.weight_load.quantised_linears import names_in_checkpoint
from onboard.graph.weight_load.scales.input_scales import plan_input_scale
from onboard.ops.codes.nvfp4_codes import GROUP

_ops = torch.ops.onboard


class NVFP4Readers:
    """What reads a producer of a graph, and the scales that the checkpoint has for that."""

    def __init__(self, gm: fx.GraphModule, context: TransformContext) -> None:
        self.gm, self.checkpoint = gm, None
        if context.factory.mode == "graph" and not context.runtime.skip_loading_weights:
            self.checkpoint = quantised_checkpoint(context.factory.checkpoint)
        if self.checkpoint is not None:
            self.names = names_in_checkpoint(gm, context, self.checkpoint)

    def quantise(self, producer: fx.Node, op: Target, values: Sequence[Any]) -> bool:
        """Let `op`, of some values and the scale, take a producer's place if all that reads it is
        linear layers with one scale for their inputs; return whether it did.
        """
        readers, value = list(producer.users), producer.meta.get("val")
        if not all(is_op(each, _ops.torch_nvfp4_linear) for each in readers) or value is None:
            return False
        parts = [part for each in readers for part in self._parts(each)]
        if value.shape[-1] % GROUP or not (scale := self._scale(parts)):
            return False
        name = str(arguments(readers[0])["weight"].target)
        given = self._read(producer, plan_input_scale(self.gm, name, parts), scale)
        both = insert_call(self.gm, producer, op, *values, given, like=producer)
        codes, scales = (
            insert_call(self.gm, producer, operator.getitem, both, index, like=producer)
            for index in (0, 1)
        )
        for reader in readers:
            self._read_codes(reader, codes, scales, given, value.dtype)
        self.gm.graph.erase_node(producer)
        return True

    def _parts(self, linear: fx.Node) -> list[str]:
        plan = weight_plan(self.gm)
        return [
            plan.weight_of(part) for part in plan.parts(str(arguments(linear)["weight"].target))
        ]

    def _scale(self, parts: Sequence[str]) -> float:
        """Return the one scale of the inputs of weights, 0 where they have none, or several."""
        if self.checkpoint is None or not parts:
            return 0.0
        found = [self.checkpoint.weights.get(self.names.get(part, "")) for part in parts]
        known = [weight for weight in found if weight is not None and weight.input_scale]
        scales = {self.checkpoint.input_scale(weight) for weight in known}
        return scales.pop() if len(known) == len(parts) and len(scales) == 1 else 0.0

    def _read(self, before: fx.Node, name: str, scale: float) -> fx.Node:
        parameter = self.gm.get_parameter(name)
        parameter.data.fill_(scale)
        mark_loaded(parameter)
        return read_parameter(self.gm, before, name)

    def _read_codes(
        self, linear: fx.Node, codes: fx.Node, scales: fx.Node, given: fx.Node, dtype: torch.dtype
    ) -> None:
        values = arguments(linear)
        of_weight = (values[name] for name in ("weight", "bias", "weight_scale", "whole"))
        op = _ops.torch_nvfp4_codes_linear.default
        new = insert_call(self.gm, linear, op, codes, scales, given, *of_weight, dtype, like=linear)
        replace_with(linear, new)
