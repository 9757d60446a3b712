"""The last step before the model runs: torch.compile, CUDA graphs of decode steps, both, or neither."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from onboard.errors import OnboardError, UsageError
from onboard.graph.capture import capture_sizes
from onboard.graph.context import TransformContext
from onboard.graph.cuda_graph import CapturedDecode
from onboard.graph.transform import BaseTransform, TransformConfig, TransformInfo, register_transform

PositiveInt = Annotated[int, Field(ge=1)]
Backend = Literal["auto", "torch-simple", "torch-compile", "torch-cudagraph", "torch-opt"]


class CompileModelConfig(TransformConfig):
    """How the model is compiled."""

    backend: Backend
    """auto: the run's `compile_backend`, which is torch-cudagraph on a GPU and torch-simple elsewhere by default."""
    cuda_graph_batch_sizes: list[PositiveInt] | None = None
    """Decode batch sizes to capture; None: the run's `cuda_graph_config`."""
    num_batched_inputs: int | None = Field(default=None, ge=1)
    """Accepted for compatibility: the batched inputs are those that are not caches."""
    piecewise_enabled: bool = False
    """CUDA graphs for prefill and mixed batches, cut at the attention ops."""
    piecewise_num_tokens: list[PositiveInt] | None = None
    """Token counts to capture piecewise; None: powers of two from 64 up to the run's `max_num_tokens`."""

    @model_validator(mode="after")
    def validate_piecewise_backend(self) -> CompileModelConfig:
        """Refuse piecewise fields that the back end would ignore."""
        if self.piecewise_enabled and self.backend not in ("torch-cudagraph", "torch-opt"):
            raise UsageError(
                f"compile_model has piecewise_enabled with backend {self.backend!r}",
                hint="Piecewise CUDA graphs need backend torch-cudagraph or torch-opt",
            )
        if self.piecewise_num_tokens is not None and not self.piecewise_enabled:
            raise UsageError("compile_model has piecewise_num_tokens without piecewise_enabled", hint="Enable it")
        return self


@register_transform("compile_model")
class CompileModel(BaseTransform[CompileModelConfig]):
    """Compile the graph and capture decode steps, as the back end's name says."""

    config_class = CompileModelConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for the compiled graph and one for each captured batch size."""
        if self.config.piecewise_enabled:
            raise OnboardError("piecewise CUDA graphs are not available yet", hint="Set piecewise_enabled: false")
        backend = self._backend(context)
        if self.config.num_batched_inputs is not None:
            context.facts.append("compile_model: num_batched_inputs has no effect, the graph's inputs tell")
        matches = 0
        if backend in ("torch-compile", "torch-opt"):
            gm = torch.compile(gm, dynamic=True)  # type: ignore[assignment]
            matches += 1
        if backend in ("torch-cudagraph", "torch-opt"):
            gm = self._captured(gm, context)
            matches += len(gm.sizes)
        return gm, TransformInfo(num_matches=matches, is_clean=True, has_valid_shapes=True)

    def _backend(self, context: TransformContext) -> str:
        backend = context.runtime.compile_backend if self.config.backend == "auto" else self.config.backend
        on_gpu = context.device.type == "cuda"
        if backend == "auto":
            return "torch-cudagraph" if on_gpu else "torch-simple"
        if backend in ("torch-cudagraph", "torch-opt") and not on_gpu:
            raise UsageError(f"compile back end {backend} needs a GPU, not {context.device}", hint="Use torch-simple")
        return backend

    def _captured(self, gm: nn.Module, context: TransformContext) -> CapturedDecode:
        settings = context.runtime.cuda_graph_config
        wanted = self.config.cuda_graph_batch_sizes or settings.batch_sizes
        sizes = capture_sizes(wanted, context.runtime.max_batch_size)
        captured = CapturedDecode(gm, padding=settings.enable_padding)
        captured.capture(context.cache, sizes)
        if settings.enable_padding:
            context.cache.info.decode_sizes = sizes
        return captured
