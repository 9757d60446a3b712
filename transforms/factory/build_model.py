"""Build the model: parameters without storage, buffers with their values."""

from __future__ import annotations

from pydantic import Field
from torch import nn

from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)


class BuildModelConfig(TransformConfig):
    """Where the parameters are made; "meta" takes no memory."""

    device: str = Field(default="meta", pattern=r"^(meta|cpu|cuda(:\d+)?)$")


@register_transform("build_model")
class BuildModel(BaseTransform[BuildModelConfig]):
    """Let the factory build the model; whatever module came before is dropped."""

    config_class = BuildModelConfig
    needed = True

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Return the factory's model."""
        model = context.factory.build_model(self.config.device)
        return model, TransformInfo(num_matches=1, is_clean=True, has_valid_shapes=True)
