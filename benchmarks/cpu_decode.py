"""Decoding on the CPU beside transformers' own `generate`, in turns, in one process.

    python benchmarks/cpu_decode.py [MODEL] [--root ROOT] [--threads 2] [--batch 1 4] [--context 64
    256] [--turns 9]

A step is the difference of a long and a one-token generation, by tokens. Both sides are timed in
turns, so that what else the machine does meets both; shown are the medians, of wall time and of
this process's CPU time, and their ratios (over 1: onboard is quicker). MODEL defaults to the demo
checkpoint; float32, greedy, random prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from onboard import LLM
from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.cli.commands.demo import CHECKPOINT

Times = tuple[float, float]
"""Seconds of wall time, and of the process."""


def seconds(work: Callable[[], object]) -> Times:
    """Return the times of one call."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def step(generate: Callable[[int], object], tokens: int) -> Times:
    """Return the times of one decode step of `generate(new_tokens)`."""
    short, long = seconds(lambda: generate(1)), seconds(lambda: generate(1 + tokens))
    return (long[0] - short[0]) / tokens, (long[1] - short[1]) / tokens


def sides(llm: LLM, model: Any, prompts: list[list[int]]) -> list[Callable[[int], object]]:
    """Return our and transformers' generation over the prompts."""
    ids = torch.tensor(prompts)
    options = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    return [
        lambda count: run_batch(llm.engine, prompts, count),
        lambda count: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options),
    ]


def row(llm: LLM, model: Any, shape: Shape, turns: int, seed: int) -> str:
    """Measure one shape; return its line of the table."""
    both = sides(llm, model, shape.prompts(model.config.vocab_size, seed))
    for generate in both:
        generate(5)
    times = [[step(generate, shape.output) for generate in both] for _ in range(turns)]
    cells = []
    for kind in range(2):
        ours, theirs = (
            1e3 * statistics.median(turn[side][kind] for turn in times) for side in range(2)
        )
        cells.append(f"{ours:.2f} | {theirs:.2f} | {theirs / ours:.2f}")
    return f"| {shape.batch} | {shape.context} | {' | '.join(cells)} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--root", type=Path, default=Path())
    for name, default in {
        "threads": 2,
        "tokens": 64,
        "turns": 9,
        "seed": random.randrange(2**31),
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 256])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = {
        "max_seq_len": max(args.context) + args.tokens + 1,
        "max_batch_size": max(args.batch),
        "kv_cache_config": {"enable_block_reuse": False},
    }
    llm = LLM(str(args.model), root=args.root, device="cpu", dtype="float32", config=config)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    print(f"{args.threads} threads, {args.tokens} steps, {args.turns} turns, seed {args.seed}")
    print(
        "| batch | context | onboard ms/step | transformers | ratio | onboard CPU ms/step | transformers | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for context in args.context:
        for batch in args.batch:
            shape = Shape(batch, context, args.tokens)
            print(row(llm, model, shape, args.turns, args.seed), flush=True)


if __name__ == "__main__":
    main()
