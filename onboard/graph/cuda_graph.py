"""Decode steps as CUDA graphs: captured once for some batch sizes, replayed with new inputs at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onboard.errors import OnboardError
from onboard.graph.capture import pad_decode
from onboard.graph.next_token import ChoosesTokens
from onboard.graph.sequence import CachedSequenceInterface, input_names
from onboard.graph.step_buffer import CHOICE_NAMES

_CHOICE_INPUTS = (*CHOICE_NAMES, "input_ids", "kv_lens", "state_slots")
"""What the choice of tokens reads beside the graph's own inputs."""
_WARM_UP_RUNS = 2  # the first compiles and tunes kernels, the second is what a step does from then on


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    """Where a replay reads its inputs, caches included."""
    caches: frozenset[str]
    """Those inputs that cannot be copied into place."""
    tokens: torch.Tensor
    """What was chosen, [sequences]."""
    output: Any


class CapturedDecode(ChoosesTokens):
    """A cached graph that replays captured decode steps and runs everything else as it is.

    Called with the same named inputs as the graph module and returns the same. A batch whose every query is one token
    is replayed when a size at least as large was captured (exactly as large, without `padding`); inputs that do not
    already lie where the capture read them are copied there. One CUDA graph holds a step from its input ids, some of
    which only the device knows, to the tokens that it chooses (`next_token.py`).
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
        names = input_names(self.gm)
        for size in sorted(sizes, reverse=True):
            # The longest context: what a kernel decides on the host from lengths must hold for every later step.
            cache.info.set_decode_example(size, longest)
            args = {**cache.args, **cache.info.choice}
            inputs = {name: args[name] for name in dict.fromkeys((*names, *_CHOICE_INPUTS))}
            graph, (tokens, output) = _capture(partial(cache.latest.run, self.gm, inputs, names), size, pool)
            self._captured[size] = _Captured(graph, inputs, frozenset(cache.caches), tokens, output)

    def forward(self, **inputs: torch.Tensor) -> Any:
        """Run one step; inputs as the graph module's placeholders."""
        size = self._size_for(inputs)
        if size is None:
            self.eager_calls += 1
            return self.gm(**inputs)
        output, sequences = self._replay(inputs, size).output, inputs["input_ids"].shape[1]
        # The static output is overwritten by the next replay: give away a copy.
        return pytree.tree_map_only(torch.Tensor, lambda logits: logits[:, :sequences].clone(), output)

    def next_tokens(self, args: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any] | None:
        """Replay a captured step; what is returned may have rows of padding, and is overwritten by the next replay."""
        if (size := self._size_for(args)) is None:
            return None
        captured = self._replay(args, size)
        return captured.tokens, captured.output

    def _size_for(self, inputs: Mapping[str, torch.Tensor]) -> int | None:
        """Return the captured batch size that serves this step, None when it has to run eagerly."""
        sequences, _, longest_query, *_ = inputs["batch_info_host"].tolist()
        wanted = inputs.get("logits_gather_indices")
        if longest_query != 1 or (wanted is not None and len(wanted) != sequences):
            return None
        fitting = (size for size in self.sizes if size == sequences or (self.padding and size > sequences))
        return next(fitting, None)

    def _replay(self, inputs: Mapping[str, torch.Tensor], size: int) -> _Captured:
        captured = self._captured[size]
        elsewhere = {
            name: inputs[name]
            for name, place in captured.inputs.items()
            if name in inputs and not _same_place(inputs[name], place)
        }
        if moved := captured.caches & elsewhere.keys():
            problem = f"{min(moved)} was allocated again after the decode graphs were captured"
            raise OnboardError(problem, hint="Compile the model last")
        for name, tensor in pad_decode(elsewhere, size).items():
            captured.inputs[name].copy_(tensor)
        captured.graph.replay()
        self.replays += 1
        return captured


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


def _same_place(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor is other or tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape
