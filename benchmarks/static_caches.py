"""A static cache beside pages and transformers: prefill and decode of one shape, in one run.

    python benchmarks/static_caches.py [config.json] [--context 1024] [--output 64] [--repeats 3]
                                       [--form static_v2] [--compile] [--device cuda]

Without a config the shape is that of Llama 3.1 8B. Weights are random, prompts too, the batch is
one text. The static cache is the program of `onboard export --to exported-program`, run by PyTorch
as it is, and with `--compile` also through torch.compile. Pages are onboard's own engine, beside
transformers' `generate` with its static cache, which it compiles itself. Each is built alone and
freed; `first call` is the very first generation, with all that it builds. On a GPU without a
config: about three minutes, and one more with `--compile`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onboard.bench.ceilings import device_name, synchronized
from onboard.bench.measure import peak_memory, reset_peak_memory
from onboard.bench.peers import PeerRun
from onboard.bench.shape import Shape
from onboard.bench.subject import Subject, open_subject
from onboard.bench.whole_measurement import Result, Settings, run_suite, vocabulary_of
from onboard.graph.cache_init.static_cache import FORMS
from onboard.graph.export.static_program import to_program
from onboard.runtime.static.static_graph import empty_caches, static_graph

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
Row = tuple[str, float, float, float | None, int]
"""What it is, seconds of a prefill, of a decode step and of the first call, peak bytes."""


def static_rows(subject: Subject, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of the exported program, and that of the compiled one if it is wanted."""
    runtime = subject.runtime.model_copy(update={"max_seq_len": shape.length})
    gm, context = static_graph(
        subject.folder, runtime, options.form, root=subject.root, model=subject.name
    )
    device = context.device
    say("exporting the program")
    program = to_program(gm, shape.length, device).module()
    ways: dict[str, Callable[..., Any]] = {f"{options.form}, exported": program}
    if options.compile:
        ways[f"{options.form}, exported, torch.compile"] = torch.compile(program, dynamic=True)
    [prompt] = shape.prompts(vocabulary_of(subject), seed=1)
    for name, model in ways.items():
        say(name)

        def generate(count: int, model: Callable[..., Any] = model) -> None:
            caches = empty_caches(gm, shape.length, device)
            greedy(model, prompt, count, caches, context.first_position)

        yield timed(name, generate, shape, options.repeats, device)


@torch.inference_mode()
def greedy(
    model: Callable[..., Any],
    prompt: list[int],
    count: int,
    caches: list[torch.Tensor],
    first_position: int,
) -> None:
    """Generate `count` greedy tokens; the host learns each before the next step begins."""
    new, start, device = prompt, 0, caches[0].device
    for _ in range(count):
        end = start + len(new)
        ids = torch.tensor([new], device=device)
        places = torch.arange(start, end, device=device).unsqueeze(0) + first_position
        logits, *caches = model(ids, places, *caches, start, end)
        new, start = [int(logits[0, -1].argmax())], end


def timed(
    name: str, generate: Callable[[int], None], shape: Shape, repeats: int, device: torch.device
) -> Row:
    """Time it as transformers' `generate` is timed: a step is the difference of a long and a
    one-token generation, by tokens.
    """
    first = synchronized(lambda: generate(shape.output), device)
    reset_peak_memory(device)
    prefill = statistics.median(synchronized(lambda: generate(1), device) for _ in range(repeats))
    whole = statistics.median(
        synchronized(lambda: generate(shape.output), device) for _ in range(repeats)
    )
    return name, prefill, (whole - prefill) / (shape.output - 1), first, peak_memory(device)


def suite_rows(subject: Subject, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of onboard's pages and of transformers."""
    settings = Settings([shape], seed=1, repeats=options.repeats, peers=("hf-compiled",))
    report = run_suite(subject, settings, say)
    for fact in report.facts:
        say(f"note: {fact}")
    [result] = report.results
    yield paged_row(result)
    for name, run in result.peers.items():
        if isinstance(run, PeerRun):
            yield (
                f"transformers, {name}",
                run.prefill,
                run.decode_step,
                run.first_call,
                run.peak_memory,
            )
        else:
            say(f"{name} could not be measured: {run}")


def paged_row(result: Result) -> Row:
    """Return the row of onboard's engine."""
    found = result.measured
    if found is None:
        raise SystemExit(f"pages could not be measured: {result.reason}")
    return "onboard, paged", found.prefill, found.decode_step, None, found.peak_memory


def say(line: str) -> None:
    """Tell what happens, beside the table."""
    print(line, file=sys.stderr, flush=True)


def shown(row: Row) -> str:
    """Return a row of the table."""
    name, prefill, step, first, peak = row
    built = "" if first is None else f"{first:.1f}"
    return f"| {name} | {1e3 * prefill:.2f} | {1e3 * step:.3f} | {built} | {peak / 2**30:.1f} |"


def measure(config: Path, options: argparse.Namespace) -> None:
    """Print the table."""
    start = time.monotonic()
    shape = Shape(1, options.context, options.output)
    overrides = {"device": options.device, "dtype": options.dtype}
    opened = open_subject(
        str(config), Path.cwd(), config=None, overrides=overrides, random_weights=True
    )
    with opened as subject:
        rows = list(static_rows(subject, shape, options))
        torch._dynamo.reset()
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        rows += suite_rows(subject, shape, options)
    where = device_name(torch.device(options.device))
    print(f"{where}, {options.dtype}, one text, {shape.context} + {shape.output} tokens\n")
    print("| | prefill ms | decode ms a token | first call s | peak GiB |\n|---|---|---|---|---|")
    print("\n".join(map(shown, rows)))
    say(f"{time.monotonic() - start:.0f} s in all")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, default="static_v2")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "config.json"
        own.write_text(json.dumps(LLAMA_8B))
        measure(options.config or own, options)


if __name__ == "__main__":
    main()
