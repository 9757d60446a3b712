"""`onboard bench` as users type it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from onboard.cli import main
from onboard.cli.documents import BenchDocument, Document
from tests.support.runtime.tiny import Tiny

Capture = pytest.CaptureFixture[str]
VLLM = {
    *(
        "num_prompts",
        "max_concurrency",
        "completed",
        "duration",
        "total_input_tokens",
        "total_output_tokens",
    ),
    *(
        "request_throughput",
        "output_throughput",
        "total_token_throughput",
        "avg_latency",
        "latencies",
        "percentiles",
    ),
    *(
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "std", "p99")
    ),
}


def test_a_model_is_measured_beside_the_floor_and_transformers(
    llama: Tiny, tmp_path: Path, capsys: Capture
) -> None:
    words = [
        "bench",
        str(llama.checkpoint),
        "--root",
        str(llama.root),
        "--device",
        "cpu",
        "--batch",
        "2,1",
    ]
    words += [
        "--context",
        "8,200",
        "--output-len",
        "6",
        "--repeats",
        "1",
        "--compare",
        "hf",
        "--seed",
        "5",
    ]
    assert main.run([*words, "--output", str(tmp_path), "--profile", "--json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert "seed 5" in printed.err
    BenchDocument.model_validate(document)
    own = {
        key: value
        for key, value in document.items()
        if key not in Document.model_fields | {"schema": None}
    }
    assert own == json.loads((tmp_path / "bench.json").read_text())
    assert [(r["max_concurrency"], r["input_len"], r["fits"]) for r in document["results"]] == [
        *((1, 8, True), (2, 8, True)),
        *((1, 200, False), (2, 200, False)),
    ]
    for result in document["results"][:2]:
        assert result.keys() >= VLLM
        for name, own in (
            ("prefill", result["prefill_ms"]),
            ("decode_step", result["decode_step_ms"]),
        ):
            assert result["share_of_floor"][name] == pytest.approx(
                result["floor"][f"{name}_ms"] / own
            )
            assert result["peers"]["hf"][f"{name}_ms"] > 0
        assert result["profile"]["kernels"] > 10
    assert "longer than the model's 128" in document["results"][2]["reason"]
    stages = document["startup"]["stages"]
    assert {"imports", "export", "weight_load", "cache_init", "first token"} <= {
        stage["name"] for stage in stages
    }
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(
        document["startup"]["seconds"], rel=0.05
    )
    for name in ("roofline.svg", "startup.svg", "decode_1_8.svg", "decode_2_8.svg"):
        ElementTree.parse(tmp_path / name)


def test_random_weights_need_no_more_than_a_config(
    llama: Tiny, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "shapes.json"
    config.write_text((llama.checkpoint / "config.json").read_text())
    words = [
        "bench",
        str(config),
        "--root",
        str(llama.root),
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main.run(words) == 2
    assert capsys.readouterr().err.endswith("is a config without weights. Add --random-weights\n")
    sizes = [
        "--batch",
        "1",
        "--context",
        "8,300",
        "--output-len",
        "4",
        "--repeats",
        "1",
        "--compare",
        "hf",
    ]
    assert main.run([*words, "--random-weights", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "floor ms" in printed
    assert "hf ms" in printed
    assert "does not fit" in printed
    assert (
        "note: batch 1, context 300: sequences of 304 tokens are longer than the model's 128"
        in printed
    )
    assert json.loads((tmp_path / "out" / "bench.json").read_text())["random_weights"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "1,x"], "--batch '1,x' is not a list of numbers"),
        (["--context", "0"], "--context has 0"),
        (["--compare", "hg"], "--compare 'hg' is no peer. Use hf, hf-compiled"),
    ],
)
def test_wrong_words_are_one_line(
    llama: Tiny, words: list[str], message: str, capsys: Capture
) -> None:
    assert main.run(["bench", str(llama.checkpoint), "--device", "cpu", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
