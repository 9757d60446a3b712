"""Elementwise operators that belong together as one generated kernel each."""

from __future__ import annotations

from pydantic import Field
from torch import fx

import onboard.experiments.elementwise.pointwise_op
from onboard.experiments.elementwise import has_xdsl
from onboard.experiments.elementwise.regions import Region, find_regions, sort_graph
from onboard.graph.backends import triton_runs_on
from onboard.graph.context import TransformContext
from onboard.graph.post_load_fusion.dtype_casts import remove_identity_casts
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.ops import has_triton

if has_triton():
    import onboard.experiments.elementwise.triton_pointwise  # noqa: F401  (registers)


class MLIRElementwiseFusionConfig(TransformConfig):
    """What is fused, and how exactly it is computed."""

    bypass_ops: list[str] = Field(default_factory=list)
    """Names of operators that stay as they are ("gelu")."""
    exact: bool = True
    """Round every operation to its dtype, as the operators do; else only what leaves a kernel."""
    min_ops: int = Field(default=2, ge=2)
    """How many operators a kernel replaces at least."""
    max_ops: int = Field(default=64, ge=2)


@register_transform("mlir_elementwise_fusion")
class MLIRElementwiseFusion(GraphTransform[MLIRElementwiseFusionConfig]):
    """Find maximal regions of elementwise operators, write each as MLIR, simplify it, and put in
    its kernel.
    """

    config_class = MLIRElementwiseFusionConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each kernel; without xdsl, triton or a GPU the graph stays as it is,
        which is a fact.
        """
        if obstacle := _obstacle(context):
            context.facts.append(f"{self.key} was skipped: {obstacle}")
            return skipped(obstacle)
        from onboard.experiments.elementwise.fused_regions import fuse_region

        casts = remove_identity_casts(gm)
        regions = self._regions(gm)
        operators = sum(len(region.nodes) for region in regions)
        kernels = sum(fuse_region(gm, region, exact=self.config.exact) for region in regions)
        sort_graph(gm.graph)
        return TransformInfo(
            num_matches=kernels,
            is_clean=not (regions or casts),
            # kernels write contiguous tensors, whatever the strides of the operators'
            has_valid_shapes=not regions,
            summary=f"{operators} operators in {kernels} kernels",
        )

    def _regions(self, gm: fx.GraphModule) -> list[Region]:
        from onboard.experiments.elementwise.added_norms import split_added_norms
        from onboard.experiments.elementwise.pointwise_programs import (
            is_fusible,
            is_fusible_reduction,
            operator_name,
        )

        bypassed = set(self.config.bypass_ops)

        def pointwise(node: fx.Node) -> bool:
            return is_fusible(node) and operator_name(node) not in bypassed

        def reduction(node: fx.Node) -> bool:
            return is_fusible_reduction(node) and operator_name(node) not in bypassed

        split_added_norms(gm, lambda node: pointwise(node) or reduction(node))
        found = find_regions(gm.graph, pointwise, reduction, self.config.max_ops)
        return [region for region in found if len(region.nodes) >= self.config.min_ops]


def _obstacle(context: TransformContext) -> str:
    """Return why there can be no kernels, "" when there can."""
    if not has_xdsl():
        return "it needs the package xdsl. Install it with pip install 'onboard[mlir]'"
    if not triton_runs_on(context.device):
        return f"its kernels need triton and a GPU, and the run is on {context.device.type}"
    return ""
