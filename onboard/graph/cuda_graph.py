"""Decode steps as CUDA graphs: captured once for some batch sizes, replayed with new inputs at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onboard.errors import OnboardError
from onboard.graph.capture import pad_decode
from onboard.graph.sequence import CachedSequenceInterface, input_names

_WARM_UP_RUNS = 2  # the first compiles and tunes kernels, the second is what a step does from then on


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    """Where a replay reads its inputs, caches included."""
    caches: frozenset[str]
    """Those inputs that cannot be copied into place."""
    output: Any


class CapturedDecode(nn.Module):
    """A cached graph that replays captured decode steps and runs everything else as it is.

    Called with the same named inputs as the graph module and returns the same. A batch whose every query is one token
    is replayed when a size at least as large was captured (exactly as large, without `padding`); inputs that do not
    already lie where the capture read them are copied there.
    """

    def __init__(self, gm: nn.Module, *, padding: bool = True) -> None:
        super().__init__()
        self.gm = gm
        self.padding = padding
        self.replays = 0
        """Calls that replayed a CUDA graph."""
        self.eager_calls = 0
        """Calls that ran without one: prefill, mixed batches, and decode batches of no captured size."""
        self._captured: dict[int, _Captured] = {}

    @property
    def graph(self) -> torch.fx.Graph:
        """The FX graph inside, for whoever asks for its inputs."""
        return self.gm.graph  # type: ignore[return-value]

    @property
    def sizes(self) -> list[int]:
        """The captured batch sizes, ascending."""
        return sorted(self._captured)

    @torch.inference_mode()
    def capture(self, cache: CachedSequenceInterface, sizes: Sequence[int]) -> None:
        """Capture a decode step of each size, the largest first, in one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        longest = min(cache.info.max_seq_len, (cache.num_pages - 1) * cache.info.page_size)
        for size in sorted(sizes, reverse=True):
            # The longest context: what a kernel decides on the host from lengths must hold for every later step.
            cache.info.set_decode_example(size, longest)
            inputs = {name: cache.args[name] for name in input_names(self.gm)}
            graph, output = _capture(self.gm, inputs, pool)
            self._captured[size] = _Captured(graph, inputs, frozenset(cache.caches), output)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        size = self._size_for(inputs)
        if size is None:
            self.eager_calls += 1
            return self.gm(**inputs)
        self.replays += 1
        return self._replay(self._captured[size], inputs, size)

    def _size_for(self, inputs: dict[str, torch.Tensor]) -> int | None:
        """Return the captured batch size that serves this step, None when it has to run eagerly."""
        sequences, _, longest_query, _ = inputs["batch_info_host"].tolist()
        wanted = inputs.get("logits_gather_indices")
        if longest_query != 1 or (wanted is not None and len(wanted) != sequences):
            return None
        fitting = (size for size in self.sizes if size == sequences or (self.padding and size > sequences))
        return next(fitting, None)

    def _replay(self, captured: _Captured, inputs: dict[str, torch.Tensor], size: int) -> Any:
        sequences = inputs["input_ids"].shape[1]
        elsewhere = {name: tensor for name, tensor in inputs.items() if not _same_place(tensor, captured.inputs[name])}
        if moved := captured.caches & elsewhere.keys():
            problem = f"{min(moved)} was allocated again after the decode graphs were captured"
            raise OnboardError(problem, hint="Compile the model last")
        for name, tensor in pad_decode(elsewhere, size).items():
            captured.inputs[name].copy_(tensor)
        captured.graph.replay()
        # The static output is overwritten by the next replay: give away a copy.
        return pytree.tree_map_only(torch.Tensor, lambda logits: logits[:, :sequences].clone(), captured.output)


def _capture(gm: nn.Module, inputs: dict[str, torch.Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_RUNS):
            gm(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            output = gm(**inputs)
    except RuntimeError as error:
        size, reason = inputs["input_ids"].shape[1], str(error).splitlines()[0]
        problem = f"a decode step of {size} sequences cannot be captured as a CUDA graph: {reason}"
        raise OnboardError(problem, hint="Set compile_backend to torch-simple") from error
    return graph, output


def _same_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor is other or tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
