"""A benchmark on a GPU: ceilings that a GPU can have, one decode step's kernels, CUDA-graph
sizes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onboard.bench.ceilings import measure_ceilings
from onboard.cli import main
from tests.support.runtime.tiny import Tiny, make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("bench"), own_file=False, **SHAPE)


def test_every_element_is_read() -> None:
    from onboard.ops.triton.read import BLOCKS, read_all

    data = torch.rand(10_000_019, device="cuda")
    for block in BLOCKS:
        assert float(read_all(data, block).double().sum()) == pytest.approx(
            float(data.double().sum()), rel=1e-5
        )


def test_a_large_read_is_as_quick_as_a_copy() -> None:
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    data = torch.ones(2**28, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    data.clone()
    start.record()
    data.clone()
    end.record()
    torch.cuda.synchronize()
    copied = 2 * data.nbytes / (1e-3 * start.elapsed_time(end))
    assert 0.9 * copied < ceilings.read_bandwidth < 2 * copied


def test_a_step_is_one_graph_whose_kernels_are_shown(
    model: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "bench",
        str(model.checkpoint),
        "--root",
        str(model.root),
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    words += [
        "--batch",
        "1,4",
        "--context",
        "64",
        "--output-len",
        "17",
        "--compare",
        "hf",
        "--profile",
        "--json",
    ]
    assert main.run([*words, "--output", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    for result in document["results"]:
        assert 0 < result["share_of_floor"]["decode_step"] < 1
        assert result["peers"]["hf"]["decode_step_ms"] > result["decode_step_ms"]
        names = " ".join(total["name"] for total in result["profile"]["totals"])
        assert "attention" in names  # "decode_attention" on Hopper GPUs
        assert result["profile"]["busy_us"] < result["profile"]["step_us"]


def test_tuning_keeps_the_graphs_sizes(
    model: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.yaml"
    words = [
        "tune",
        str(model.checkpoint),
        "--root",
        str(model.root),
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    assert (
        main.run(
            [*words, "--config", str(path), "--batch", "1", "--context", "32", "--repeats", "2"]
        )
        == 0
    )
    assert "batch_sizes" in path.read_text()
    assert "decode step in ms by batch size" in capsys.readouterr().out
