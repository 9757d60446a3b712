"""Steps that read prompts, beside sequences that decode or not, as one CUDA graph each, and steps that
check drafts, which are read like prompts and have a row of logits for each token.

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
from onboard.cache.examples import Example
from onboard.cache.step_buffer import MOST_ROWS, StepSizes
from onboard.graph.compile.capture import capture_sizes, has_room, shortest_time
from onboard.graph.compile.captured_step import CapturedStep, borrowed, captured_graph
from onboard.graph.compile.direct_calls import directly
from onboard.graph.fx import op_name, placeholders
from onboard.ops.library import declared

NUMBERS = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Of tokens: with more the device takes longer than the host, and the library's attention of whole
prompts, which no graph has, gains more than a graph.
"""
MOST_DRAFTED = 16
"""Sequences of a captured step that checks drafts: with more the device takes longer than the host."""


def step_sizes(
    wanted: Sequence[int] | None, max_num_tokens: int, max_batch_size: int, max_seq_len: int
) -> list[StepSizes]:
    """Return the sizes to capture, ascending: of the `wanted` numbers of tokens that a step can have
    and one sequence is longer than; None: `NUMBERS`.
    """
    numbers = NUMBERS if wanted is None else wanted
    fitting = sorted({each for each in numbers if each <= max_num_tokens and each < max_seq_len})
    # Fewer sequences than tokens: as many would be a decode step
    rows = {each: min(max_batch_size + 1, each - 1) for each in fitting}
    return [StepSizes(each, rows[each], rows[each]) for each in fitting if rows[each] > 1]


def draft_sizes(
    num_drafts: int, max_num_tokens: int, max_batch_size: int, max_seq_len: int
) -> list[StepSizes]:
    """Return the sizes of steps that check `num_drafts` in each of some sequences, which are longer,
    ascending; one sequence more is padding.
    """
    batches = capture_sizes(None, min(max_batch_size, MOST_DRAFTED))
    tokens = {each: each * (1 + num_drafts) for each in batches}
    most = min(max_num_tokens, MOST_ROWS) if 1 + num_drafts < max_seq_len else 0
    return [
        StepSizes(tokens[each], each + 1, tokens[each]) for each in batches if tokens[each] <= most
    ]


def obstacle(gm: fx.GraphModule, cache: CachedSequenceInterface) -> str:
    """Return why steps that read prompts or drafts cannot be whole CUDA graphs, "" when they can."""
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
    """The graphs, by size; no step with drafts has the size of one without."""

    def __init__(self, cache: CachedSequenceInterface) -> None:
        self.left_out: list[int] = []
        """Numbers of tokens that were not captured for lack of memory."""
        self._cache = cache
        self._graphs: dict[StepSizes, CapturedStep] = {}
        self._pool: Any = None

    @property
    def sizes(self) -> list[StepSizes]:
        """The captured sizes, ascending."""
        return sorted(self._graphs)

    @torch.inference_mode()
    def capture(
        self,
        gm: nn.Module,
        otherwise: nn.Module,
        sizes: Sequence[StepSizes],
        examples: Mapping[bool, Example],
    ) -> CapturedSteps:
        """Capture a step of `gm` for each size, the largest first, in one memory pool; time it, and
        beside it the same without its graph, by `otherwise`. Return what was captured.

        `examples` write steps of a size, by whether all sequences begin; what is captured is one in
        which some go on.
        """
        info, names, gm = self._cache.info, input_names(gm), directly(gm)
        steps = CapturedSteps(info.max_seq_len - 1)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            examples[False](size, padding=True)
            run = self._run(gm, names)
            if not self._graphs and not has_room(run, info.device):
                self.left_out.append(size.tokens)
                continue
            described = f"a step of {size.tokens} tokens of {size.sequences} sequences"
            graph, results = captured_graph(run, described, self._pool)
            # One step runs at a time: the results of all may lie in the same memory
            lent = pytree.tree_map_only(Tensor, borrowed, results)
            self._graphs[size] = CapturedStep(graph, info.inputs, self._cache.caches, *lent)
        for size in sorted(self._graphs.keys() & set(sizes)):
            steps.times[size] = {
                whole: self._timed(size, otherwise, names, example)
                for whole, example in examples.items()
            }
        return steps

    def replay(
        self, inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> CapturedStep | None:
        """Replay what was captured for a step, behind the copy of its numbers; return None for a step
        that was not padded to a captured size.
        """
        size = StepSizes(
            inputs["input_ids"].shape[1],
            len(inputs["kv_lens"]),
            len(inputs["logits_gather_indices"]),
        )
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

    def _timed(
        self, size: StepSizes, otherwise: nn.Module, names: Sequence[str], example: Example
    ) -> StepTimes:
        info = self._cache.info
        example(size, padding=True)
        info.buffer.upload()
        captured = shortest_time(self._graphs[size].graph.replay, info.device)
        example(size, padding=False)
        return StepTimes(captured, shortest_time(self._run(otherwise, names), info.device))
