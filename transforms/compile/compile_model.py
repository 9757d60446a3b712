"""The last step before the model runs: torch.compile, CUDA graphs of decode steps, both, or
neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import fx, nn

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.cache.cached_sequence import input_names
from onboard.cache.examples import draft_examples, prompt_examples
from onboard.cache.step_buffer import StepSizes
from onboard.errors import UsageError
from onboard.graph.compile.capture import capture_sizes
from onboard.graph.compile.captured_prompts import (
    MOST_DRAFTED,
    CapturedPrompts,
    draft_sizes,
    obstacle,
    step_sizes,
)
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.graph.compile.pieces import CannotSplitError
from onboard.graph.compile.piecewise import PiecewiseGraph, token_buckets
from onboard.graph.compile.streams import in_one_stream
from onboard.graph.context import TransformContext
from onboard.graph.draft_heads.add_heads import draft_length
from onboard.graph.draft_heads.captured_heads import captured_head, head_sizes
from onboard.graph.fx import graph_modules
from onboard.graph.lora.without_adapters import without_adapters
from onboard.graph.transform import (
    BaseTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.ops.library import declared

PositiveInt = Annotated[int, Field(ge=1)]
Backend = Literal[
    "auto", "torch-simple", "torch-compile", "torch-cudagraph", "torch-opt", "torch-tensorrt"
]
_OF_ONE_GRAPH = ("torch-simple", "torch-compile", "torch-tensorrt")
_TENSORRT = "torch_tensorrt"
"""A package, and the back end of torch.compile that it brings."""
_OF_PIECES = ("piecewise_enabled", "piecewise_num_tokens", "step_num_tokens")


class CompileModelConfig(TransformConfig):
    """How the model is compiled."""

    backend: Backend
    """auto: the run's `compile_backend`, which is torch-cudagraph on a GPU and torch-simple
    elsewhere by default.
    """
    cuda_graph_batch_sizes: list[PositiveInt] | None = None
    """Decode batch sizes to capture; None: the run's `cuda_graph_config`."""
    num_batched_inputs: int | None = Field(default=None, ge=1)
    """Inputs that change from step to step, which are all but the caches; another number is an
    error.
    """
    piecewise_enabled: bool | None = None
    """CUDA graphs for prefill and mixed batches, cut at the attention ops; None: with
    torch-cudagraph, if possible.
    """
    piecewise_num_tokens: list[PositiveInt] | None = None
    """Token counts to capture piecewise; None: powers of two from 64 up to the run's
    `max_num_tokens`.
    """
    step_num_tokens: list[PositiveInt] | None = None
    """Token counts of steps that read prompts to capture whole, attention included, with
    torch-cudagraph and where the graph's operators allow it; None: eight from 64 to 1024. Steps that
    check drafts are captured beside them.
    """

    @model_validator(mode="after")
    def validate_piecewise_backend(self) -> CompileModelConfig:
        """Refuse piecewise fields that the back end would ignore."""
        if self.piecewise_enabled and self.backend in _OF_ONE_GRAPH:
            raise UsageError(
                f"compile_model has piecewise_enabled with backend {self.backend!r}",
                hint="Piecewise CUDA graphs need backend torch-cudagraph or torch-opt",
            )
        never = self.piecewise_enabled is False or self.backend in _OF_ONE_GRAPH
        if self.piecewise_num_tokens is not None and never:
            raise UsageError(
                "compile_model has piecewise_num_tokens without piecewise_enabled", hint="Enable it"
            )
        return self


class _Steps(NamedTuple):
    """The sizes of steps that are captured whole."""

    prompts: Sequence[StepSizes] = ()
    drafts: Sequence[StepSizes] = ()


@register_transform("compile_model")
class CompileModel(BaseTransform[CompileModelConfig]):
    """Compile the graph and capture decode steps, as the back end's name says."""

    acts = True
    config_class = CompileModelConfig

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Count one match for the compiled graph and one for each captured batch size."""
        backend, matches = self._backend(gm, context), 0
        whole = gm
        self._check_inputs(gm, context)
        if backend in ("torch-compile", "torch-opt", "torch-tensorrt"):
            compiler = _TENSORRT if backend == "torch-tensorrt" else "inductor"
            whole = self._compiled(gm, context, compiler)
            matches += 1
        if backend not in ("torch-cudagraph", "torch-opt"):
            self._note_ignored(("cuda_graph_batch_sizes", *_OF_PIECES), context, backend)
        else:
            pieces = self._pieces(gm, whole)
            if pieces is None:
                self._note_ignored(_OF_PIECES, context, backend)
            # Ranks that follow do not know whose adapters a step has.
            alone = whole is gm and context.cache.ranks.world_size == 1
            plain = without_adapters(gm) if alone else None
            steps = _Steps()
            if pieces is not None and whole is gm:
                steps = self._steps(pieces.gm, context)
            whole = captured = self._captured(pieces or whole, context, plain)
            # With adapters and drafts there are steps of few tokens that no whole graph serves.
            few = plain is not None or context.runtime.speculative.draft
            served = [] if few else steps.prompts
            matches += len(captured.sizes) + self._capture_pieces(pieces, served, context)
            if any(steps) and pieces is not None and pieces.sizes:
                captured.prompts = prompts = CapturedPrompts(context.cache)
                matches += self._capture_steps(prompts, plain or gm, pieces, steps, context)
            self._capture_heads(captured.sizes, context)
        return whole, TransformInfo(num_matches=matches, is_clean=True, has_valid_shapes=True)

    def _compiled(self, gm: nn.Module, context: TransformContext, compiler: str) -> nn.Module:
        branches = sum(in_one_stream(graph) for _, graph in graph_modules(gm))
        if branches:
            fact = f"{self.key}: {branches} branches run in the main stream, torch.compile knows no other"
            context.facts.append(fact)
        return torch.compile(gm, dynamic=True, backend=compiler)  # type: ignore[return-value]

    def _note_ignored(self, fields: Sequence[str], context: TransformContext, backend: str) -> None:
        """Record which of `fields` ask for something that does not come."""
        given = [name for name in fields if getattr(self.config, name)]
        if given:
            context.facts.append(
                f"{self.key}: back end {backend} makes nothing of {' and '.join(given)}"
            )

    def _check_inputs(self, gm: nn.Module, context: TransformContext) -> None:
        """Compare the number of batched inputs with what the graph takes beside its caches, if it
        was given.
        """
        wanted = self.config.num_batched_inputs
        if wanted is None:
            return
        caches = () if context.cache is None else context.cache.caches
        found = [name for name in input_names(gm) if name not in caches]
        if wanted != len(found):
            problem = (
                f"compile_model has num_batched_inputs {wanted}, and the graph takes {len(found)}"
            )
            raise UsageError(
                f"{problem}: {', '.join(found)}", hint="Leave it out: the graph's inputs tell"
            )

    def _pieces(self, gm: nn.Module, whole: nn.Module) -> PiecewiseGraph | None:
        """Return the graph that is to run in pieces, None when none were asked for, or there is no
        graph.
        """
        wanted = self.config.piecewise_enabled
        wanted = whole is gm if wanted is None else wanted
        return (
            PiecewiseGraph(gm, whole, compiled=whole is not gm)
            if wanted and isinstance(gm, fx.GraphModule)
            else None
        )

    def _backend(self, gm: nn.Module, context: TransformContext) -> str:
        backend = (
            context.runtime.compile_backend
            if self.config.backend == "auto"
            else self.config.backend
        )
        if backend == "torch-tensorrt":
            _import_tensorrt(context)
            return backend
        obstacle = _obstacle_to_capture(gm, context)
        if backend == "auto":
            if obstacle and context.device.type == "cuda":
                context.facts.append(f"{self.key}: CUDA graphs are not used, {obstacle}")
            return "torch-simple" if obstacle else "torch-cudagraph"
        if backend in ("torch-cudagraph", "torch-opt") and obstacle:
            raise UsageError(
                f"compile back end {backend} cannot be used: {obstacle}", hint="Use torch-simple"
            )
        return backend

    def _captured(
        self, gm: nn.Module, context: TransformContext, plain: nn.Module | None
    ) -> CapturedDecode:
        settings = context.runtime.cuda_graph_config
        own = self.config.cuda_graph_batch_sizes
        wanted = own if own is not None else settings.batch_sizes
        sizes = capture_sizes(wanted, context.runtime.max_batch_size)
        if larger := sorted(set(wanted or ()) - set(sizes)):
            context.facts.append(
                f"{self.key}: no CUDA graphs for {larger}, larger than max_batch_size"
            )
        captured = CapturedDecode(gm, plain)
        captured.capture(context.cache, sizes)
        if plain is not None:
            context.facts.append(
                f"{self.key}: steps without adapters have CUDA graphs of their own, without their kernels"
            )
        if settings.enable_padding:
            context.cache.info.decode_sizes = sizes
        return captured

    def _capture_pieces(
        self, pieces: PiecewiseGraph | None, served: Sequence[StepSizes], context: TransformContext
    ) -> int:
        """Capture prefill in pieces; return for how many numbers of tokens. Where nobody asks for
        some, those are left out that whole graphs have `served`.
        """
        if pieces is None:
            return 0
        wanted, most = self.config.piecewise_num_tokens, context.cache.info.limits.most_tokens
        sizes = token_buckets(wanted, most)
        if wanted is None and served:
            sizes = [size for size in sizes if size > served[-1].tokens] or sizes[-1:]
        if larger := sorted(set(wanted or ()) - set(sizes)):
            context.facts.append(
                f"{self.key}: no pieces for {larger} tokens, more than a step can have"
            )
        try:
            pieces.capture(context.cache, sizes)
        except CannotSplitError as error:
            context.facts.append(f"{self.key}: prefill is not captured in pieces: {error}")
        if pieces.left_out:
            context.facts.append(
                f"{self.key}: no pieces for {pieces.left_out} tokens, their memory is not free"
            )
        return len(pieces.sizes)

    def _steps(self, gm: fx.GraphModule, context: TransformContext) -> _Steps:
        """Return the sizes of the steps that read prompts or drafts to capture whole."""
        info, wanted = context.cache.info, context.runtime.speculative
        if reason := obstacle(gm, context.cache):
            read = "prompts or drafts" if wanted.draft else "prompts"
            fact = f"{self.key}: steps that read {read} are not captured whole: {reason}"
            context.facts.append(fact)
            return _Steps()
        limits = info.limits.most_tokens, info.max_batch_size, info.max_seq_len
        prompts = step_sizes(self.config.step_num_tokens, *limits)
        most = draft_length(wanted.num_tokens, len(context.draft_heads))
        return _Steps(prompts, draft_sizes(most, *limits) if wanted.draft else ())

    def _capture_heads(self, batches: Sequence[int], context: TransformContext) -> None:
        """Capture the steps of the checkpoint's heads that draft."""
        heads, info = context.draft_heads, context.cache.info
        most = draft_length(context.runtime.speculative.num_tokens, len(heads))
        sizes = head_sizes(most, info.limits.most_tokens, info.max_batch_size, info.max_seq_len)
        few = [each for each in batches if each <= MOST_DRAFTED]
        for at, head in enumerate(heads):
            if reason := _obstacle_to_capture(head.gm, context):
                context.facts.append(f"{self.key}: heads that draft are not captured: {reason}")
                continue
            assert isinstance(head.gm, fx.GraphModule)
            if reason := obstacle(head.gm, context.cache):
                fact = f"steps in which heads read several tokens are not captured whole: {reason}"
                context.facts.append(f"{self.key}: {fact}")
            wanted = [] if reason else sizes
            heads[at] = captured_head(head, context.cache, few, wanted, context.facts)

    def _capture_steps(
        self,
        prompts: CapturedPrompts,
        gm: nn.Module,
        pieces: PiecewiseGraph,
        steps: _Steps,
        context: TransformContext,
    ) -> int:
        """Capture steps that read prompts or drafts; return for how many sizes."""
        info = context.cache.info
        info.captured = prompts.capture(gm, pieces, steps.prompts, prompt_examples(info))
        if steps.drafts:
            drafts = prompts.capture(gm, pieces, steps.drafts, draft_examples(info))
            info.captured_drafts = drafts
        if prompts.left_out:
            fact = f"no steps of {prompts.left_out} tokens are captured whole, their memory is not free"
            context.facts.append(f"{self.key}: {fact}")
        return len(prompts.sizes)


def _import_tensorrt(context: TransformContext) -> None:
    """Import the package, which makes its back end known to torch.compile; raise `UsageError` where
    it cannot be.
    """
    if context.device.type != "cuda":
        raise UsageError(
            "compile back end torch-tensorrt cannot be used: it compiles for NVIDIA GPUs, and the "
            f"run is on the {context.device.type}",
            hint="Use torch-compile",
        )
    try:
        import_module(_TENSORRT)
    except (ImportError, OSError) as error:  # its libraries may be of another CUDA
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UsageError(
            f"compile back end torch-tensorrt cannot be used: {_TENSORRT} is not installed ({reason})",
            hint="Run: pip install torch-tensorrt (the version of your torch), or use torch-compile",
        ) from None


def _obstacle_to_capture(gm: nn.Module, context: TransformContext) -> str:
    """Return why decode steps cannot become CUDA graphs, "" when they can; a failed capture spoils
    the process.
    """
    if context.device.type != "cuda":
        return f"they need a GPU, not {context.device}"
    nodes = (node for _, graph in graph_modules(gm) for node in graph.graph.nodes)
    if obstacle := next((text for node in nodes if (text := declared(node.target).no_capture)), ""):
        return obstacle
    return "" if context.cache is not None else "the graph has no cache"
