"""Decode steps as CUDA graphs: captured once for some batch sizes, replayed with new numbers in the
same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onboard.cache.cached_sequence import CachedSequenceInterface, input_names
from onboard.cache.next_token import ChoosesTokens
from onboard.errors import OnboardError

_WARM_UP_RUNS = (
    2  # the first compiles and tunes kernels, the second is what a step does from then on
)


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, torch.Tensor]
    """`SequenceInfo.inputs` of every step that it can replay."""
    caches: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    """What was chosen, [sequences]."""
    output: Any


class CapturedDecode(ChoosesTokens):
    """A cached graph that replays captured decode steps and runs everything else as it is.

    Called with the same named inputs as the graph module and returns the same. What is replayed is
    the step that `SequenceInfo` describes, when it is a decode batch of a captured size (which its
    `decode_sizes` pads batches to); other inputs than its own run as they are. One CUDA graph holds
    a step from the copy of its numbers to the device, through input ids some of which only the
    device knows, to the tokens that it chooses (`next_token.py`).
    """

    def __init__(self, gm: nn.Module) -> None:
        super().__init__()
        self.gm = gm
        self.replays = 0
        """Calls that replayed a CUDA graph."""
        self.eager_calls = 0
        """Calls that ran without one: prefill, mixed batches, and decode batches of no captured
        size.
        """
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
        names = input_names(self.gm)
        for size in sorted(sizes, reverse=True):
            # The longest context: what a kernel decides on the host from lengths must hold for
            # every later step.
            cache.info.set_decode_example(size, longest)
            args = {**cache.args, **cache.info.choice}
            graph, (tokens, output) = _capture(
                partial(self._step, cache, args, names, size), size, pool
            )
            self._captured[size] = _Captured(graph, cache.info.inputs, cache.caches, tokens, output)

    def _step(
        self,
        cache: CachedSequenceInterface,
        args: Mapping[str, torch.Tensor],
        names: Sequence[str],
        size: int,
    ) -> tuple[torch.Tensor, Any]:
        cache.info.buffer.fetch(size)
        return cache.latest.run(self.gm, args, names)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        captured = self._captured.get(inputs["input_ids"].shape[1])
        places = {} if captured is None else {**captured.inputs, **captured.caches}
        if captured is None or any(places.get(name) is not each for name, each in inputs.items()):
            self.eager_calls += 1
            return self.gm(**inputs)
        self._replay(captured)
        # The static output is overwritten by the next replay: give away a copy.
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, captured.output)

    def next_tokens(
        self, inputs: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Any] | None:
        """Replay a captured step; what is returned is overwritten by the next replay."""
        captured = self._captured.get(inputs["input_ids"].shape[1])
        if captured is None or captured.inputs is not inputs:
            return None
        if captured.caches is not caches:
            problem = "the caches were allocated again after the decode graphs were captured"
            raise OnboardError(problem, hint="Compile the model last")
        self._replay(captured)
        return captured.tokens, captured.output

    def _replay(self, captured: _Captured) -> None:
        captured.graph.replay()
        self.replays += 1


def _capture(step: Callable[[], Any], size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_RUNS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        problem = f"a decode step of {size} sequences cannot be captured as a CUDA graph: {reason}"
        raise OnboardError(problem, hint="Set compile_backend to torch-simple") from error
    return graph, result
