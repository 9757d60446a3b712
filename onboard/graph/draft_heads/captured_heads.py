"""Draft heads as CUDA graphs: a step in which each of some requests reads one row, and one in which
each reads what a step that checked drafts has left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.examples import draft_examples, set_heads_example
from onboard.cache.step_buffer import StepSizes
from onboard.graph.compile.captured_prompts import CapturedPrompts, draft_sizes
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.graph.draft_heads.add_heads import HeadGraph


def head_sizes(
    num_drafts: int, max_num_tokens: int, max_batch_size: int, max_seq_len: int
) -> list[StepSizes]:
    """Return the sizes of a head's steps behind ones that have checked `num_drafts` in each of some
    sequences: so many tokens, and a row of logits for each sequence, ascending.
    """
    sizes = draft_sizes(num_drafts, max_num_tokens, max_batch_size, max_seq_len)
    # As many sequences as tokens would be a step of one row each
    return [
        StepSizes(each.tokens, each.sequences, each.sequences)
        for each in sizes
        if each.tokens > each.sequences
    ]


def captured_head(
    head: HeadGraph,
    cache: CachedSequenceInterface,
    batches: Sequence[int],
    sizes: Sequence[StepSizes],
    facts: list[str],
) -> HeadGraph:
    """Return a head whose steps of one row for each of `batches` sequences, and of `sizes`, are
    captured; `facts` get what there is no memory for.
    """
    gm, graphs, info = head.gm, CapturedPrompts(cache), cache.info
    captured = graphs.capture(gm, gm, sizes, draft_examples(info))
    rows = [StepSizes(each, each, each) for each in batches]
    graphs.capture(gm, gm, rows, {False: partial(set_heads_example, info)})
    if graphs.left_out:
        facts.append(f"no steps of {graphs.left_out} tokens of heads, their memory is not free")
    module = CapturedDecode(gm)
    module.prompts = graphs
    return replace(head, gm=module, captured=captured)
