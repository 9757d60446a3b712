"""A model run as a rank of a group runs it: logits of a prompt, a ragged batch decoded with caches,
and what came of the graph.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onboard.config import Mode, RuntimeConfig
from onboard.graph.fx import op_name
from onboard.runtime.build import build_engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.prompts import all_logprobs, ragged_prompts

LENGTHS = (3, 17, 1, 29)
NEW_TOKENS = 6
FUSION = "fuse_allreduce_residual_rmsnorm"


@dataclass(frozen=True)
class Ran:
    """What a rank computed."""

    logits: torch.Tensor
    """Of the longest prompt, [tokens, vocabulary]."""
    tokens: list[list[int]]
    """Of each prompt, greedily."""
    logprobs: list[torch.Tensor]
    """Of every token at each of these."""
    calls: Counter[str]
    """Collectives in the graph that was loaded."""
    fused: Counter[str]
    """Ops in the graph after sums over the ranks were joined with norms."""
    facts: list[str]
    summaries: dict[str, str]
    matches: dict[str, int]
    weight_bytes: int
    """Of what the rank has of the checkpoint."""


def run(
    folder: Path,
    world_size: int,
    seed: int,
    transforms: dict[str, Any] | None = None,
    mode: Mode = "graph",
    root: Path | None = None,
) -> Ran:
    """Build the engine of a checkpoint and run it; every rank calls this alike."""
    caches = {"tokens_per_block": 4, "enable_block_reuse": False}
    limits = {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 64}
    config = RuntimeConfig(
        device="cpu",
        dtype="float32",
        world_size=world_size,
        mode=mode,
        kv_cache_config=caches,
        transforms=transforms or {},
        **limits,
    )
    counts: Counter[str] = Counter()
    fused: Counter[str] = Counter()
    sizes: list[int] = []

    def observe(key: str, module: torch.nn.Module, _: object) -> None:
        if key == "load_weights":
            counts.update(op_name(node) for node in module.graph.nodes)  # type: ignore[union-attr, arg-type]
            stored = {id(each): each.nbytes for each in module.state_dict(keep_vars=True).values()}
            sizes.append(sum(stored.values()))
        if key == FUSION:
            fused.update(op_name(node) for node in module.graph.nodes)  # type: ignore[union-attr, arg-type]

    engine = build_engine(folder, config, root=root, observer=observe)
    vocabulary = int(engine.vocab_size or 0)
    prompts = ragged_prompts(vocabulary, LENGTHS, seed)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocabulary
    )
    logits = engine.logits(prompts[-1])
    requests = [each for prompt in prompts for each in engine.submit(prompt, params)]
    engine.run()
    return Ran(
        logits,
        [list(each.tokens) for each in requests],
        [all_logprobs(list(each.logprobs or [])) for each in requests],
        Counter({name: counts[name] for name in ("dist_all_reduce", "all_gather")}),
        fused,
        list(engine.facts),
        {entry.key: entry.summary for entry in engine.history},
        {entry.key: entry.num_matches for entry in engine.history},
        sizes[0],
    )
