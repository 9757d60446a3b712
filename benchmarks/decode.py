"""Decode speed of an onboarded model beside transformers' own `generate`, in one process on one GPU.

    python benchmarks/decode.py MODEL --root ROOT [--batch 1 8 32] [--context 944] [--steps 128]

A step's time is the difference of a long and a short generation over the same prompts, divided by the difference in
tokens, so prefill cancels. Transformers is timed on the second pass over the same lengths: the first pays for plans
that it caches. The floor is what has to be read in a step, weights and mean key-value cache, over the bandwidth that
a large read on this GPU reaches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from onboard import LLM, SamplingParams

SHORT = 17


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call, the GPU's work included."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_seconds(generate: Callable[[int], object], steps: int, repeats: int) -> float:
    """Return the median time of one decode step of `generate(new_tokens)`, after one warm pass of each length."""
    for count in (SHORT, SHORT + steps):
        generate(count)
    times = []
    for _ in range(repeats):
        short = seconds(lambda: generate(SHORT))
        times.append((seconds(lambda: generate(SHORT + steps)) - short) / steps)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Return the bytes a second of a sum over 4 GiB."""
    data = torch.ones(2**30, dtype=torch.float32, device="cuda")
    for _ in range(3):
        data.sum()
    return data.nbytes / min(seconds(data.sum) for _ in range(5))


def floor_seconds(model: torch.nn.Module, batch: int, context: int, bandwidth: float) -> float:
    """Return the least time of a step: weights but an untied embedding, and the keys and values of the batch."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * context * batch
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes  # type: ignore[operator]
    return (weights + cache) / bandwidth


def transformers_generate(model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> Callable[[int], object]:
    """Return greedy `generate` of transformers over the prompts, with eager forward passes."""
    ids = torch.tensor(prompts, device="cuda")
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    return lambda count: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)  # type: ignore


def main() -> None:
    """Measure and print one row a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=944, help="prompt length")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    length = options.context + options.steps + SHORT + 1
    config = {"max_seq_len": length, "max_batch_size": max(options.batch), "max_num_tokens": 8192}
    llm = LLM(str(options.model), root=options.root, device="cuda", dtype="bfloat16", config=config)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, read bandwidth {bandwidth / 1e9:.0f} GB/s, prompts of {options.context}")
    print("| batch | onboard ms/step | transformers ms/step | ratio | onboard tok/s | share of the floor |")
    print("|---|---|---|---|---|---|")
    for batch in options.batch:
        prompts = torch.randint(model.config.vocab_size, (batch, options.context)).tolist()

        def ours(count: int, prompts: list[list[int]] = prompts) -> object:
            return llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))

        mine = step_seconds(ours, options.steps, options.repeats)
        theirs = step_seconds(transformers_generate(model, prompts), options.steps, 1)
        floor = floor_seconds(model, batch, options.context + SHORT + options.steps // 2, bandwidth)
        print(
            f"| {batch} | {mine * 1e3:.3f} | {theirs * 1e3:.2f} | {theirs / mine:.1f} | {batch / mine:.0f} "
            f"| {floor / mine:.2f} |",
            flush=True,
        )
    print(f"CUDA graph replays: {llm.engine.stats.graph_replays}")


if __name__ == "__main__":
    main()
