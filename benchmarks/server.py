"""The server over HTTP, random weights: how much it costs, how long a first token takes, and what
adapters cost.

    python benchmarks/server.py overhead [--shape llama-3.1-8b] [--device cuda] [--streams 64]
                                         [--context 1024] [--tokens 256] [--rounds 3]
    python benchmarks/server.py latency [--clients 64] [--shortest 256] [--longest 4096]
                                        [--tokens 128] [--seconds 40] [--rate R] [--set NAME=VALUE]
                                        [-- COMMAND of another server with {folder} and {port}]
    python benchmarks/server.py adapters [--batch 8] [--context 1024] [--tokens 129] [--rounds 3]

`overhead` has the same work done by `LLM.generate` and over HTTP, by one engine, which has the
prompts of every round anew; the client (`http_load.py`) is a process of its own, and the host's time
is that of all threads of this one, waiting for a GPU included. `latency` finds the
most requests a second that as many clients bring about, then lets 0.7 of them arrive (or `--rate`).
A server of another kind gets the same checkpoint (a config and a tokenizer, no weights) and has to
call its model "model". `adapters` times decode steps without adapters, with adapters that nobody
asks for, with one and with four (rank 16, on every linear layer of the blocks).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from onboard import LLM, SamplingParams
from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.runtime.calls.async_llm import AsyncLLM
from onboard.serve.app import create_app
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.server import Server, listen
from onboard.serve.service import Service

LLAMA = {"model_type": "llama", "bos_token_id": None, "eos_token_id": 0, "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
}
ADAPTERS = ("one", "two", "three", "four")
RANK = 16
SHARE = 0.7
"""Of the most requests a second, those that arrive."""


def save_checkpoint(folder: Path, shape: str) -> None:
    """Write a config, and a tokenizer that has a text for every token."""
    config = AutoConfig.for_model(**LLAMA, **SHAPES[shape], architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    words = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġ{number}" for number in range(len(words), config.vocab_size)]
    tokens = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>").save_pretrained(folder)


def save_adapter(folder: Path, checkpoint: Path) -> None:
    """Write a random adapter for every linear layer of the blocks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in path:
            sizes = {"A": (RANK, module.in_features), "B": (module.out_features, RANK)}
            for name, size in sizes.items():
                values = torch.randn(size).mul_(0.01).bfloat16()
                tensors[f"base_model.model.{path}.lora_{name}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    ends = sorted({key.split(".")[-3] for key in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ends}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_llm(folder: Path, device: str, shape: Shape, **options: Any) -> LLM:
    """Return the model with room for a shape."""
    settings = {
        "skip_loading_weights": True,
        "max_batch_size": shape.batch,
        "max_seq_len": shape.length,
    }
    dtype = "float32" if device == "cpu" else "bfloat16"
    return LLM(folder, root=folder, device=device, dtype=dtype, settings=settings, **options)  # type: ignore[arg-type]


def say(name: str, **figures: Any) -> None:
    """Print one line of figures."""
    print(f"{name}: {json.dumps(figures)}", flush=True)


def load_server(port: int, vocabulary: int, **told: Any) -> dict[str, Any]:
    """Have a process load the server at a port of this machine; return its figures."""
    options = [text for name, value in told.items() for text in (f"--{name}", str(value))]
    client = [sys.executable, str(Path(__file__).with_name("http_load.py"))]
    command = [*client, f"http://127.0.0.1:{port}", "--vocabulary", str(vocabulary), *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    found: dict[str, Any] = json.loads(output)
    return found


def overhead(args: argparse.Namespace, folder: Path) -> None:
    """The same work by `LLM.generate` and over HTTP."""
    shape = Shape(args.streams, args.context, args.tokens)
    llm = load_llm(folder, args.device, shape)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    alone, served, tokens = [], [], shape.batch * shape.output
    for seed in range(args.rounds + 1):  # the first one warms up
        prompts = shape.prompts(vocabulary, seed)
        begin, worked = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        alone.append((tokens / (time.perf_counter() - begin), time.process_time() - worked))
    work = {"requests": args.streams, "clients": args.streams, "tokens": args.tokens}
    work |= {"shortest": args.context, "longest": args.context}
    with served_here(llm, folder) as port:
        for seed in range(args.rounds + 1):
            worked = time.process_time()
            found = load_server(port, vocabulary, seed=seed, **work)
            served.append((found["tokens_per_second"], time.process_time() - worked))
            say("served", **found)
    print(f"| {args.streams} streams | tokens/s, by round | median | host's us a token |")
    print("|---|---|---|---|")
    for name, rounds in {"LLM.generate": alone, "over HTTP": served}.items():
        by_round = " ".join(f"{rate:.0f}" for rate, _ in rounds[1:])
        rate, worked = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
        print(f"| {name} | {by_round} | {rate:.0f} | {1e6 * worked / tokens:.0f} |")
    shares = [statistics.median(rate for rate, _ in rounds[1:]) for rounds in (served, alone)]
    print(f"share over HTTP: {shares[0] / shares[1]:.3f}", flush=True)


@contextmanager
def served_here(llm: LLM, folder: Path) -> Iterator[int]:
    """Serve a model of this process; yield the port."""
    settings = ServeSettings(names=["model"], port=0)
    door = listen(settings)
    server = Server(create_app(Service(AsyncLLM.over(llm), settings, folder)), settings)
    thread = threading.Thread(target=server.run, args=([door],))
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served_apart(command: Sequence[str], folder: Path) -> Iterator[int]:
    """Have a process serve; yield the port when it lives."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    begin = time.perf_counter()
    process = subprocess.Popen([each.format(folder=folder, port=port) for each in command])
    try:
        while not lives(port):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        say("started", seconds=round(time.perf_counter() - begin, 1))
        yield port
    finally:
        process.terminate()
        process.wait()


def lives(port: int) -> bool:
    """Return whether the server at a port of this machine says that it lives."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def own_command(args: argparse.Namespace) -> list[str]:
    """Return how our own server is started."""
    longest = args.longest + args.tokens
    settings = ["skip_loading_weights=true", f"max_seq_len={longest}", *args.set]
    command = [sys.executable, "-m", "onboard", "serve", "{folder}", "--root", "{folder}"]
    command += ["--name", "model", "--port", "{port}", "--device", args.device]
    return command + [text for each in settings for text in ("--set", each)]


def latency(args: argparse.Namespace, folder: Path) -> None:
    """The most requests a second, and the times to first tokens under a part of them."""
    vocabulary = SHAPES[args.shape]["vocab_size"]
    work = {name: getattr(args, name) for name in ("clients", "shortest", "longest", "tokens")}
    with served_apart(args.command or own_command(args), folder) as port:
        load_server(port, vocabulary, **{**work, "requests": args.clients // 4, "seed": 0})
        most = load_server(port, vocabulary, requests=2 * args.clients, seed=1, **work)
        say("most", **most)
        rate = args.rate or SHARE * most["requests_per_second"]
        count = max(round(rate * args.seconds), 1)
        found = load_server(port, vocabulary, requests=count, rate=rate, seed=2, **work)
        say("arriving", **found)
    first, further = found["first_token_ms"], found["further_token_ms"]
    print(
        "| most requests/s | arriving/s | first token, ms: p50 / p90 / p99 | further: p50 / p99 |"
    )
    print(f"|---|---|---|---|\n| {most['requests_per_second']:.2f} | {rate:.2f} ", end="")
    print(f"| {first['p50']:.0f} / {first['p90']:.0f} / {first['p99']:.0f} ", end="")
    print(f"| {further['p50']:.1f} / {further['p99']:.1f} |", flush=True)


def adapters(args: argparse.Namespace, folder: Path) -> None:
    """Decode steps without adapters and with some."""
    shape = Shape(args.batch, args.context, args.tokens)
    folders = {name: folder / name for name in ADAPTERS}
    for each in folders.values():
        save_adapter(each, folder)
    cases: Mapping[str, list[str | None]] = {
        "nobody asks": [None] * shape.batch,
        "one adapter": [ADAPTERS[0]] * shape.batch,
        "four adapters": [ADAPTERS[i % len(ADAPTERS)] for i in range(shape.batch)],
    }
    plain = steps(load_llm(folder, args.device, shape), args, shape, {"": []})[""]
    free()
    llm = load_llm(folder, args.device, shape, lora=folders)
    found = steps(llm, args, shape, cases)
    print("| batch | adapters | ms a step | tokens/s | longer by |\n|---|---|---|---|---|")
    for name, step in {"none loaded": plain, **found}.items():
        rate, longer = 1e3 * shape.batch / step, step / plain - 1
        print(f"| {shape.batch} | {name} | {step:.3f} | {rate:.0f} | {longer:+.1%} |", flush=True)


def steps(
    llm: LLM, args: argparse.Namespace, shape: Shape, cases: Mapping[str, Sequence[str | None]]
) -> dict[str, float]:
    """Return the milliseconds of a decode step for each of several choices of adapters."""
    prompts = shape.prompts(SHAPES[args.shape]["vocab_size"], seed=1)
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds + 1):
        for name, chosen in cases.items():
            run = run_batch(llm.engine, prompts, shape.output, chosen)
            found[name].append(1e3 * statistics.median(run.decode_steps))
    return {name: min(times[1:]) for name, times in found.items()}


def free() -> None:
    """Give back what an engine had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    numbers = {
        "overhead": {"streams": 64, "context": 1024, "tokens": 256, "rounds": 3},
        "latency": {
            "clients": 64,
            "shortest": 256,
            "longest": 4096,
            "tokens": 128,
            "seconds": 40,
        },
        "adapters": {"batch": 8, "context": 1024, "tokens": 129, "rounds": 3},
    }
    for part, defaults in numbers.items():
        each = parts.add_parser(part)
        each.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
        each.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        for name, default in defaults.items():
            each.add_argument(f"--{name}", type=int, default=default)
        if part == "latency":
            each.add_argument("--rate", type=float, default=0.0)
            each.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
            each.add_argument("command", nargs="*", help="of another server, behind --")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = options()
    print(torch.cuda.get_device_name() if args.device == "cuda" else args.device, flush=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        save_checkpoint(folder, args.shape)
        {"overhead": overhead, "latency": latency, "adapters": adapters}[args.part](args, folder)


if __name__ == "__main__":
    main()
