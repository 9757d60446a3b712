"""Two GPUs beside one: the same tokens, CUDA graphs on both, decode speed, a rank that is killed.

Run: `python benchmarks/two_gpus.py CHECKPOINT ROOT [DEVICE]`. It ends with exit code 1 at the first
thing that is wrong.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from onboard import LLM, SamplingParams
from onboard.errors import OnboardError

BATCHES, CONTEXT, NEW = (1, 8, 64), 1024, 129


def settings(device: str) -> dict[str, Any]:
    """Return limits: small ones on the CPU, where this shows that it runs."""
    small = {"max_seq_len": 64, "max_batch_size": 64} if device == "cpu" else {}
    return small or {"max_seq_len": CONTEXT + 2 * NEW, "max_batch_size": BATCHES[-1]}


def milliseconds(llm: LLM, batch: int, context: int, new: int) -> float:
    """Time of a decode step: the difference of a long and a short generation."""
    size = int(llm.engine.vocab_size or 0)
    prompts = [[(7 * i + 13 * j) % size for j in range(context)] for i in range(batch)]

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - start

    seconds(new)
    return 1e3 * (seconds(new) - seconds(1)) / (new - 1)


def main() -> int:
    """Compare one rank and two; return the exit code."""
    checkpoint, root, device = [*sys.argv[1:], "cuda"][:3]
    context, new = (24, 17) if device == "cpu" else (CONTEXT, NEW)
    greedy = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    prompts = [list(range(1, 1 + length)) for length in (3, 17, 1, 29)]
    found: dict[int, Any] = {}
    for world in (1, 2):
        llm = LLM(checkpoint, root, device=device, world_size=world, settings=settings(device))
        for share in llm.ranks.shares if llm.ranks else ():
            print(share)
        print(*llm.engine.facts, sep="\n")
        tokens = [each.outputs[0].token_ids for each in llm.generate(prompts, greedy)]
        times = {batch: milliseconds(llm, batch, context, new) for batch in BATCHES}
        stats = llm.engine.stats
        print(
            f"{world} ranks: {times} ms a step; {stats.graph_replays} replays, "
            f"{stats.steps_ahead} of {stats.steps} steps ahead"
        )
        found[world] = tokens
        if world == 2 and (code := killed(llm, prompts, greedy)):
            return code
        llm.close()
        del llm
    same = sum(a == b for a, b in zip(found[1], found[2], strict=True))
    print(f"{same} of {len(prompts)} outputs are the same")  # in bfloat16 some may part: look
    return 0 if same or device != "cpu" else 1


def killed(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> int:
    """End the second rank while it generates; return 1 unless that is said within ten seconds."""
    assert llm.ranks is not None
    process = llm.ranks.workers.links[0].process
    assert process is not None
    threading.Timer(0.5, process.kill).start()
    start = time.monotonic()
    try:
        llm.generate(prompts * 2000, params)
    except OnboardError as error:
        print(f"killed: {error} ({time.monotonic() - start:.1f} s)")
        return 0 if time.monotonic() - start < 10.5 else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
