"""Decode steps as real CUDA graphs: replayed for every batch that fits, with the results of the
graph module itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from onboard.cache.examples import set_prefill_example
from onboard.cache.token_masks import TokenMasks
from onboard.config import RuntimeConfig
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.graph.context import TransformContext
from onboard.graph.transform import get_transform
from tests.support.graph.decoder import copied_inputs, decoder, make_cache, set_decode_batch
from tests.support.graph.harness import rmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [1, 2, 4, 8]


def _compile(backend: str, **settings: Any) -> tuple[Any, TransformContext, Any]:
    gm = decoder("triton").to("cuda")
    runtime = RuntimeConfig(max_batch_size=8, cuda_graph_config=settings)
    factory: Any = SimpleNamespace()
    context = TransformContext(factory, runtime, torch.device("cuda"), torch.float32)
    context.cache = make_cache(device="cuda")
    cls = get_transform("compile_model")
    compiled, info = cls(cls.config_class(stage="compile", backend=backend)).apply(gm, context)
    return compiled, context, info


@pytest.mark.parametrize(
    ("backend", "matches"), [("auto", 4 + 1), ("torch-cudagraph", 4 + 1), ("torch-opt", 5)]
)
@torch.inference_mode()
def test_decode_batches_are_replayed(backend: str, matches: int) -> None:
    captured, context, info = _compile(backend)
    cache, gm = context.cache, getattr(captured.gm, "_orig_mod", captured.gm)
    assert isinstance(captured, CapturedDecode)
    assert info.num_matches == matches
    assert captured.sizes == cache.info.decode_sizes == SIZES
    for step, size in enumerate([1, 3, 8, 5, 2, 8, 1], start=1):
        set_decode_batch(cache, size)
        expected = gm(**copied_inputs(cache))
        actual = captured(**cache.args)
        assert rmse(actual, expected) <= 1e-5
        assert (captured.replays, captured.eager_calls) == (step, 0)


@torch.inference_mode()
def test_keys_written_by_a_replay_are_read_by_the_next() -> None:
    captured, context, _ = _compile("torch-cudagraph")
    cache = context.cache
    set_decode_batch(cache, 3)
    twin = copied_inputs(cache)
    for _ in range(3):
        actual, expected = captured(**cache.args), captured.gm(**twin)
        assert rmse(actual, expected) <= 1e-5
        for name in ("k_cache", "v_cache"):
            assert torch.equal(cache.caches[name][1:], twin[name][1:])


@torch.inference_mode()
def test_prefill_runs_without_a_graph() -> None:
    captured, context, _ = _compile("torch-cudagraph")
    set_prefill_example(context.cache.info, 9)
    expected = captured.gm(**copied_inputs(context.cache))
    assert rmse(captured(**context.cache.args), expected) <= 1e-5
    assert (captured.replays, captured.eager_calls) == (0, 1)


@torch.inference_mode()
def test_without_padding_other_sizes_run_without_a_graph() -> None:
    captured, context, _ = _compile("torch-cudagraph", batch_sizes=[2, 4], enable_padding=False)
    assert context.cache.info.decode_sizes == []
    for size in (2, 3, 4):
        set_decode_batch(context.cache, size)
        captured(**context.cache.args)
    assert (captured.replays, captured.eager_calls) == (2, 1)


@torch.inference_mode()
def test_the_host_does_not_write_a_step_before_the_replay_has_read_the_last() -> None:
    """The device is kept busy, so that every step is prepared while the one before has yet to
    start.
    """
    captured, context, _ = _compile("torch-cudagraph")
    cache, expected, found = context.cache, [], []
    square = torch.randn(4096, 4096, device="cuda")
    for size in (8, 3, 8, 1, 5):
        set_decode_batch(cache, size)
        expected.append(cache.next_tokens(captured.gm)[0].clone())
        for _ in range(40):
            square = (square @ square).clamp(-1, 1)
        tokens, _ = cache.next_tokens(captured)
        found.append(tokens.clone())
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert captured.replays == 5


@torch.inference_mode()
def test_the_second_choice_is_captured_behind_each_step() -> None:
    """Some rows have one token left, which is not the likeliest; the others choose as they did."""
    captured, context, _ = _compile("torch-cudagraph")
    cache = context.cache
    for size in (8, 3, 1, 5, 8):
        set_decode_batch(cache, size)
        tokens, logits = cache.next_tokens(captured)
        first, own = tokens.tolist(), logits().float().cpu()
        second, masks = own.topk(2).indices[:, 1].tolist(), TokenMasks(*own.shape)
        for row in range(0, size, 2):
            only = np.arange(8 * len(masks.of(row, last=0))) == second[row]
            masks.of(row, last=0)[:] = np.packbits(only, bitorder="little")
        chosen = cache.choose_again(logits(), masks, captured)
        step = captured._captured[cache.info.inputs["input_ids"].shape[1], True]
        assert step.again is not None
        assert chosen is step.again.tokens
        assert chosen.tolist()[:size] == [
            (first if row % 2 else second)[row] for row in range(size)
        ]
