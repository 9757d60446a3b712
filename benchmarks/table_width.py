"""Decode of short sequences where long ones are allowed: what a block table costs that is wide and
almost empty.

    python benchmarks/table_width.py [--batch 1,8,64,256] [--context 128] [--max-seq-len
    1024,131072] [--config FILE]

One model with random weights (without `--config` one of the shape of Qwen3-0.6B) is built for each
longest sequence, and decodes the same prompts; all else is alike. A figure is the median of a step,
in milliseconds, the ratio that of the widest table to the narrowest.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from onboard.bench.measure import run_batch
from onboard.bench.shape import Shape
from onboard.bench.subject import Subject, open_subject
from onboard.bench.whole_measurement import fitted_runtime, vocabulary_of
from onboard.runtime.build import build_engine, resolve_device

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
OUTPUT = 96
REPEATS = 5


def decode_steps(subject: Subject, shapes: list[Shape], max_seq_len: int) -> list[float]:
    """Return the milliseconds of a decode step of each shape, where sequences may have
    `max_seq_len` tokens.
    """
    device = resolve_device(subject.runtime.device)
    runtime = fitted_runtime(subject, shapes, device).model_copy(
        update={"max_seq_len": max_seq_len}
    )
    engine = build_engine(subject.folder, runtime, root=subject.root, model=subject.name)
    found = []
    for shape in shapes:
        prompts = shape.prompts(vocabulary_of(subject), seed=0)
        run_batch(engine, prompts, 8)
        runs = [run_batch(engine, prompts, shape.output) for _ in range(REPEATS)]
        found.append(1e3 * statistics.median(step for run in runs for step in run.decode_steps))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "batch": "1,8,64,256",
        "context": "128",
        "max-seq-len": "1024,131072",
    }.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--config", type=Path, help="config.json of another model")
    parser.add_argument("--root", type=Path, default=Path(), help="folder that has its model file")
    args = parser.parse_args()
    lengths = [int(each) for each in args.max_seq_len.split(",")]
    shapes = [Shape(int(each), int(args.context), OUTPUT) for each in args.batch.split(",")]
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        values = SHAPE if args.config is None else json.loads(args.config.read_text("utf-8"))
        config.write_text(json.dumps(values | {"max_position_embeddings": max(lengths)}), "utf-8")
        columns = []
        with open_subject(
            str(config), args.root, config=None, overrides={}, random_weights=True
        ) as subject:
            for length in lengths:
                columns.append(decode_steps(subject, shapes, length))
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    print(f"| batch | {' | '.join(f'{length:,} tokens' for length in lengths)} | ratio |")
    print("|---" * (len(lengths) + 2) + "|")
    for shape, *steps in zip(shapes, *columns, strict=True):
        print(
            f"| {shape.batch} | {' | '.join(f'{step:.3f}' for step in steps)} | {steps[-1] / steps[0]:.3f} |"
        )


if __name__ == "__main__":
    main()
