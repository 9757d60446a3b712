"""Steps that read prompts as whole captured ones; the capture itself is stood in for by the step
again, which is what a replay does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.cache.captured_steps import StepTimes
from onboard.cache.step_buffer import StepSizes
from onboard.errors import OnboardError
from onboard.graph.compile.captured_prompts import CapturedPrompts, obstacle, step_sizes
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.ops.library import op_sources
from tests.support.graph.decoder import VOCABULARY, copied_inputs, decoder, make_cache
from tests.support.graph.harness import rmse


@pytest.mark.parametrize(
    ("wanted", "limits", "expected"),
    [
        (
            None,
            (8192, 256, 4096),
            [
                (64, 64),
                (128, 128),
                (192, 192),
                (256, 256),
                (384, 257),
                (512, 257),
                (768, 257),
                (1024, 257),
            ],
        ),
        (None, (8192, 4, 513), [(64, 5), (128, 5), (192, 5), (256, 5), (384, 5), (512, 5)]),
        (None, (300, 1, 512), [(64, 2), (128, 2), (192, 2), (256, 2)]),
        ([96, 7, 9999, 7], (8192, 16, 4096), [(7, 7), (96, 17)]),
        ([1], (8192, 16, 4096), []),
        ([], (8192, 16, 4096), []),
    ],
)
def test_sizes(
    wanted: list[int] | None, limits: tuple[int, int, int], expected: list[tuple[int, int]]
) -> None:
    sizes = step_sizes(wanted, *limits)
    assert [(size.tokens, size.sequences) for size in sizes] == expected
    assert all(size.rows == size.sequences for size in sizes)


def test_only_attention_over_pages_is_known_to_serve_any_lengths() -> None:
    names = {name for name, source in op_sources().items() if source.any_lengths}
    kinds = ("cached_attention", "cached_rope_attention")
    assert names == {f"{word}_{kind}" for word in ("triton", "invariant") for kind in kinds}


@pytest.mark.parametrize(
    ("backend", "ranks", "landed", "reason"),
    [
        ("triton", 1, True, ""),
        ("torch", 1, True, "torch_cached_attention launches"),
        ("triton", 2, True, "several ranks"),
        ("triton", 1, False, "no kernel chooses"),
    ],
)
def test_what_stands_in_the_way(backend: str, ranks: int, landed: bool, reason: str) -> None:
    latest = SimpleNamespace(landed=np.zeros(1) if landed else None)
    cache: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=ranks), latest=latest)
    found = obstacle(decoder(backend), cache)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def _stand_in(step: Any, described: str, pool: Any) -> tuple[Any, Any]:
    """Return what a capture returns; a replay writes the step's results to where they were."""
    tokens, output = step()
    tokens, output = tokens.clone(), output.clone()

    def replay() -> None:
        for target, source in zip((tokens, output), step(), strict=True):
            target.copy_(source)

    return SimpleNamespace(replay=replay), (tokens, output)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> tuple[CapturedDecode, Any]:
    """A graph with two captured sizes, and its cache."""
    module = "onboard.graph.compile.captured_prompts"
    monkeypatch.setattr(f"{module}.captured_graph", _stand_in)
    monkeypatch.setattr(f"{module}.borrowed", lambda tensor: tensor)
    monkeypatch.setattr(f"{module}.shortest_time", lambda step, device: step() and None or 1.0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    gm, cache = decoder(), make_cache()
    decode, prompts = CapturedDecode(gm), CapturedPrompts(cache)
    prompts.capture(gm, gm, [StepSizes(8, 8, 8), StepSizes(15, 9, 9)])
    decode.prompts = prompts
    return decode, cache


def _set_rows(cache: Any, starts: list[int], lengths: list[int]) -> None:
    rows, slots = cache.info.rows, np.arange(1, 1 + len(lengths))
    for slot, start, length in zip(slots.tolist(), starts, lengths, strict=True):
        rows.start(slot, torch.randint(VOCABULARY, (start + length,)).tolist())
        rows.num_cached[slot] = start
        rows.set_pages(slot, 0, 0, range(4 * slot - 3, 4 * slot + 1))
    cache.info.set_rows(slots, np.array(lengths))


@pytest.mark.parametrize(
    ("starts", "lengths", "size"),
    [
        ([0], [5], (8, 8)),
        ([0, 0], [8, 5], (15, 9)),
        ([3, 9, 0, 2], [1, 1, 6, 1], (15, 9)),
        ([0], [15], (15, 9)),
        ([5, 0, 7, 1, 2, 3, 4, 6], [1, 8, 1, 1, 1, 1, 1, 1], (15, 9)),
        ([0, 0], [9, 9], None),
    ],
)
@torch.inference_mode()
def test_a_step_is_padded_and_replayed(
    captured: tuple[CapturedDecode, Any],
    starts: list[int],
    lengths: list[int],
    size: tuple[int, int] | None,
) -> None:
    """Logits and stored keys are those of the graph itself, of a step without padding."""
    decode, cache = captured
    known, cache.info.captured = cache.info.captured, None
    torch.manual_seed(3)
    _set_rows(cache, starts, lengths)
    alone = copied_inputs(cache)
    cache.info.captured = known
    torch.manual_seed(3)
    _set_rows(cache, starts, lengths)
    tokens, logits = cache.next_tokens(decode)
    expected = decode.gm(**alone)[0]
    assert rmse(logits()[: len(lengths)], expected) <= 1e-6
    assert tokens.tolist()[: len(lengths)] == expected.argmax(-1).tolist()
    assert decode.replays == (size is not None)
    if size is not None:
        assert (cache.info.sizes.tokens, cache.info.sizes.sequences) == size
    for name in cache.caches:  # padding writes no page of a sequence
        assert torch.equal(cache.caches[name][1:], alone[name][1:])


def test_times_are_known_by_size_and_kind(captured: tuple[CapturedDecode, Any]) -> None:
    _, cache = captured
    both = {True: StepTimes(1.0, 1.0), False: StepTimes(1.0, 1.0)}
    assert cache.info.captured.times == {StepSizes(8, 8, 8): both, StepSizes(15, 9, 9): both}


@torch.inference_mode()
def test_other_caches_are_refused(captured: tuple[CapturedDecode, Any]) -> None:
    decode, cache = captured
    _set_rows(cache, [0], [5])
    assert decode.prompts is not None
    with pytest.raises(OnboardError, match="allocated again"):
        decode.prompts.replay(cache.info.inputs, dict(cache.caches))
