"""Prefill in pieces as real CUDA graphs: results and caches are those of the graph itself, step
after step.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from onboard.config import RuntimeConfig
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.graph.compile.piecewise import PiecewiseGraph
from onboard.graph.context import TransformContext
from onboard.graph.transform import get_transform
from tests.support.graph.decoder import (
    VOCABULARY,
    copied_inputs,
    decoder,
    make_cache,
    set_decode_batch,
)
from tests.support.graph.harness import rmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _compile(backend: str, **fields: Any) -> tuple[CapturedDecode, TransformContext, Any]:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    gm = decoder("triton").to("cuda")
    factory: Any = SimpleNamespace()
    context = TransformContext(
        factory, RuntimeConfig(max_batch_size=8), torch.device("cuda"), torch.float32
    )
    context.cache = make_cache(device="cuda")
    cls = get_transform("compile_model")
    config = cls.config_class(stage="compile", backend=backend, piecewise_enabled=True, **fields)  # type: ignore[call-arg]
    compiled, info = cls(config).apply(gm, context)
    assert isinstance(compiled, CapturedDecode)
    return compiled, context, info


def _set_batch(cache: Any, lengths: list[int], starts: list[int]) -> None:
    tokens = np.random.default_rng(random.getrandbits(64)).integers(0, VOCABULARY, sum(lengths))
    pages = np.arange(1, 1 + 4 * len(lengths)).reshape(len(lengths), 4)
    cache.info.set_batch(tokens, np.array(starts), np.array(lengths), pages)


STEPS = [
    ([5], [0]),
    ([8], [3]),
    ([3, 1, 4], [0, 7, 2]),
    ([9, 1, 1], [2, 0, 5]),
    ([14, 16, 2], [0, 0, 1]),
    ([2], [13]),
]


@pytest.mark.parametrize(("backend", "matches"), [("torch-cudagraph", 4 + 3), ("torch-opt", 5 + 3)])
@torch.inference_mode()
def test_steps_are_those_of_the_graph(backend: str, matches: int) -> None:
    captured, context, info = _compile(backend, piecewise_num_tokens=[8, 16, 32])
    assert info.num_matches == matches
    assert not context.facts
    pieces, cache = captured.gm, context.cache
    assert isinstance(pieces, PiecewiseGraph)
    for bucket in pieces._buckets:
        bucket.seconds = 0.0  # a graph this small is as fast without
    for step, (lengths, starts) in enumerate(STEPS * 4):
        _set_batch(cache, lengths, starts)
        twin = copied_inputs(cache)
        actual = captured(**cache.args).clone()
        assert rmse(actual, pieces.gm(**twin)) <= 1e-5
        for name, tensor in cache.caches.items():
            assert rmse(tensor, twin[name]) <= 1e-5
        assert pieces.replays == step + 1
    set_decode_batch(cache, 3)
    twin = copied_inputs(cache)
    assert rmse(captured(**cache.args), pieces.gm(**twin)) <= 1e-5
    assert pieces.replays == 4 * len(STEPS), "decode has graphs of its own"


@torch.inference_mode()
def test_larger_steps_run_as_they_are_and_default_sizes_follow_the_limit() -> None:
    captured, context, _ = _compile("torch-cudagraph", piecewise_num_tokens=[8, 999])
    assert "no pieces for [999]" in context.facts[0]
    _set_batch(context.cache, [9], [0])
    captured(**context.cache.args)
    assert captured.gm.replays == 0  # type: ignore[union-attr]
    captured, *_ = _compile("torch-cudagraph")
    assert captured.gm.sizes == [64]  # type: ignore[union-attr]
