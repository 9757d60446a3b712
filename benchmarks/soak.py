"""Very many random requests to a tiny model with too few pages; each is compared with itself alone.

    python benchmarks/soak.py [--model hybrid] [--requests 20000] [--questions 1500] [--tokens 160]
    [--seed 0] python benchmarks/soak.py --device cuda [--steps 50000] [--seconds 90]

`attention` is a llama, `hybrid` an lfm2 (short convolutions, whose states are no matter of pages,
and attention), both of random weights, from the model files that ship. `onboard/testing/soak.py`
says what is drawn and asserted. On the CPU a model computes in float64, on a GPU in float32 with
the kernels and captured decode steps of every run: no rounding but the batch's own, so logits that
are as good as equal are the one thing that may move a token.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.config import RuntimeConfig
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from onboard.testing.soak import Soak, SoakReport, in_double, soak_figures

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {}),
    "hybrid": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
}


def save_model(folder: Path, kind: str) -> None:
    """Save a random checkpoint whose logits lie far apart."""
    model_type, options = MODELS[kind]
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(folder)


def make_engine(folder: Path, device: str, *, overlap: bool, **cache: Any) -> Engine:
    """Return an engine, in float64 on the CPU."""
    runtime = RuntimeConfig(
        device=device,
        dtype="float32",
        max_seq_len=96,
        max_batch_size=16,
        max_num_tokens=48,
        overlap=overlap,
        kv_cache_config={"tokens_per_block": 4, **cache},
    )
    engine = build_engine(folder, runtime)
    return in_double(engine) if device == "cpu" else engine


def main() -> None:
    """Run the soak; exit with 1 when an answer differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="hybrid")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument(
        "--questions", type=int, default=1500, help="different ones, each asked alone once"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--steps", type=int, default=sys.maxsize, help="after which no new request is sent"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the same")
    parser.add_argument(
        "--tokens", type=int, default=160, help="that the cache holds, of 16 requests with up to 80"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    args = parser.parse_args()
    print(f"model {args.model} on {args.device}, seed {args.seed}", flush=True)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.model)
        engine = make_engine(Path(folder), args.device, overlap=True, max_tokens=args.tokens)
        alone = make_engine(Path(folder), args.device, overlap=False, enable_block_reuse=False)
    soak = Soak(engine, alone, questions=args.questions, seed=args.seed)

    def progress(report: SoakReport) -> None:
        if report.steps % 1000 == 0:
            print(
                f"{report.requests} requests, {len(report.wrong)} wrong",
                file=sys.stderr,
                flush=True,
            )

    begin = time.monotonic()
    report = soak.run(
        args.requests,
        progress,
        lambda: soak.report.steps < args.steps and time.monotonic() - begin < args.seconds,
    )
    print(soak_figures(engine, report))
    print(*report.wrong[:5], sep="\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
