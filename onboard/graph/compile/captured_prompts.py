"""Steps that read prompts, beside sequences that decode or not, as one CUDA graph each.

In pieces (`piecewise.py`) the host launches attention between them, layer by layer, and takes longer
for that than the device for a small model's step. Where what attention launches follows from the
numbers of tokens and sequences alone, the whole step is captured for some of these numbers, and
other steps are padded: one more sequence has the tokens that are missing, on the spare page, and
further ones have none. Whether that takes less time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from onboard.cache.cached_sequence import CachedSequenceInterface, input_names
from onboard.cache.captured_steps import CapturedSteps, StepTimes
from onboard.cache.step_buffer import StepSizes
from onboard.graph.compile.capture import has_room, shortest_time
from onboard.graph.compile.captured_step import CapturedStep, borrowed, captured_graph
from onboard.graph.fx import op_name, placeholders
from onboard.ops.library import declared

NUMBERS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Of tokens: with more the device takes longer than the host, and the library's attention of whole
prompts, which no graph has, gains more than a graph.
"""


def step_sizes(
    wanted: Sequence[int] | None, max_num_tokens: int, max_batch_size: int, max_seq_len: int
) -> list[StepSizes]:
    """Return the sizes to capture, ascending: of the `wanted` numbers of tokens that a step can have
    and one sequence is longer than; None: `NUMBERS`.
    """
    numbers = NUMBERS if wanted is None else wanted
    fitting = sorted({each for each in numbers if each <= max_num_tokens and each < max_seq_len})
    rows = {each: min(max_batch_size + 1, each) for each in fitting}
    return [StepSizes(each, rows[each], rows[each]) for each in fitting if rows[each] > 1]


def obstacle(gm: fx.GraphModule, cache: CachedSequenceInterface) -> str:
    """Return why steps that read prompts cannot be whole CUDA graphs, "" when they can."""
    if cache.ranks.world_size > 1:
        return "several ranks compute them"
    if cache.latest.landed is None:
        return "no kernel chooses their tokens"
    readers = (
        node
        for given in placeholders(gm)
        if str(given.target) == "batch_info_host"
        for node in given.users
        if not declared(node.target).any_lengths
    )
    reader = next(readers, None)
    return (
        ""
        if reader is None
        else f"{op_name(reader) or reader.name} launches what the sequences' lengths ask for"
    )


class CapturedPrompts:
    """The graphs, by size."""

    def __init__(self, cache: CachedSequenceInterface) -> None:
        self.left_out: list[int] = []
        """Numbers of tokens that were not captured for lack of memory."""
        self._cache = cache
        self._graphs: dict[StepSizes, CapturedStep] = {}

    @property
    def sizes(self) -> list[StepSizes]:
        """The captured sizes, ascending."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture(self, gm: nn.Module, otherwise: nn.Module, sizes: Sequence[StepSizes]) -> None:
        """Capture a step of `gm` for each size, the largest first, in one memory pool; time it, and
        beside it the same without its graph, by `otherwise`. Steps are padded to sizes from then on.
        """
        info, pool = self._cache.info, torch.cuda.graph_pool_handle()
        names, steps = input_names(gm), CapturedSteps(info.max_seq_len - 1, {s: {} for s in sizes})
        info.captured = steps
        for size in sorted(sizes, reverse=True):
            info.set_step_example(size, whole=False)
            run = self._run(gm, names)
            if not self._graphs and not has_room(run, info.device):
                self.left_out.append(size.tokens)
                del steps.times[size]
                continue
            described = f"a step of {size.tokens} tokens of {size.sequences} sequences"
            graph, results = captured_graph(run, described, pool)
            # One step runs at a time: the results of all may lie in the same memory
            lent = pytree.tree_map_only(Tensor, borrowed, results)
            self._graphs[size] = CapturedStep(graph, info.inputs, self._cache.caches, *lent)
        for size in self.sizes:
            steps.times[size] = self._times(size, otherwise, names)

    def replay(
        self, inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> CapturedStep | None:
        """Replay what was captured for a step, behind the copy of its numbers; return None for a step
        that was not padded to a captured size.
        """
        sequences = len(inputs["kv_lens"])
        size = StepSizes(inputs["input_ids"].shape[1], sequences, sequences)
        captured = self._graphs.get(size)
        if captured is None or captured.inputs is not inputs:
            return None
        captured.check(caches)
        self._cache.info.buffer.upload()
        captured.graph.replay()
        return captured

    def _run(self, gm: nn.Module, names: Sequence[str]) -> Callable[[], tuple[Tensor, Any]]:
        """Return what runs the step that was written last."""
        args = {**self._cache.args, **self._cache.info.choice}
        return partial(self._cache.latest.run, gm, args, names)

    def _times(
        self, size: StepSizes, otherwise: nn.Module, names: Sequence[str]
    ) -> dict[bool, StepTimes]:
        times, info = {}, self._cache.info
        for whole in (False, True):
            info.set_step_example(size, whole=whole)
            info.buffer.upload()
            captured = shortest_time(self._graphs[size].graph.replay, info.device)
            info.set_step_example(size, whole=whole, padding=False)
            times[whole] = StepTimes(
                captured, shortest_time(self._run(otherwise, names), info.device)
            )
        return times
