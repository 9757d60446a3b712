"""The bytes of the floor, beside those that are counted in the graph."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.bench.work import ModelWork, weights_of
from onboard.explain.explanation import stored
from onboard.explain.read_bytes import ReadWeights, cache_bytes
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.runtime.engine import Engine
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds
from tests.support.runtime.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[3]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


def _made(folder: Path, model_type: str, **options: object) -> tuple[ReadWeights, Engine]:
    made = make_tiny(folder, model_type, own_file=False, **options)
    values = json.loads((made.checkpoint / "config.json").read_text())
    spec: ModelSpec = analyze(values, made.checkpoint, model="acme/tiny", revision=None)
    shapes = {name: meta.shape for name, meta in Checkpoint(made.checkpoint).names().items()}
    return ReadWeights(spec, shapes, 4), made.engine(max_seq_len=128, max_num_tokens=256)


def _inside(read: ReadWeights) -> float:
    kinds = layer_kinds(read.spec)
    return sum(read.of_layer(kind, layer) for kind in kinds for layer in kind.layers)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0]}),
    ],
)
def test_weights_are_those_that_the_graph_reads(
    tmp_path: Path, model_type: str, options: dict[str, object]
) -> None:
    read, engine = _made(tmp_path, model_type, **options)
    weights = weights_of(engine.gm)
    experts = sum(each.bytes_each * each.chosen for each in weights.experts)
    row = 0 if options.get("tie_word_embeddings") else weights.row_bytes
    expected = weights.dense_bytes + weights.head_bytes + row + experts
    assert bool(experts) == (model_type == "qwen3_moe")
    assert _inside(read) + sum(read.outside_layers().values()) == expected


def test_parts_of_a_layer_are_the_layer(tmp_path: Path) -> None:
    read, engine = _made(tmp_path, "qwen3_moe", **EXPERTS)
    (kind,) = layer_kinds(read.spec)
    top = {name.split(".")[0] for name in kind.modules}
    parts = {name: read.of_layer(kind, 1, name) for name in sorted(top)}
    assert sum(parts.values()) == read.of_layer(kind, 1)
    assert parts["mlp"] > 0
    work = ModelWork(weights_of(engine.gm), tuple(engine.cache.resources.values()), heads=4)
    caches = tuple(engine.cache.resources.values())
    assert cache_bytes(caches, 50) == work.cache_bytes(50) > 0


def test_quantised_weights_are_read_as_they_are_stored() -> None:
    """No fewer bytes than the files have can be read of them, and a run may read no more."""
    folder = ROOT / "tests" / "support" / "quantised" / "hf_fp8_llama"
    values = json.loads((folder / "config.json").read_text())
    spec = analyze(values, folder, model="acme/tiny", revision=None)
    checkpoint = open_checkpoint(folder)
    shapes = {name: meta.shape for name, meta in checkpoint.names().items()}
    read = ReadWeights(spec, shapes, 2, stored(checkpoint))
    files = Checkpoint(folder).names()
    layers = {name: meta for name, meta in files.items() if ".layers." in name}
    assert any(name.endswith("weight_scale_inv") for name in layers)
    assert (
        0
        < _inside(read)
        == sum(
            meta.nbytes
            if meta.dtype.itemsize == 1 or "scale" in name
            else 2 * math.prod(meta.shape)
            for name, meta in layers.items()
        )
    )
