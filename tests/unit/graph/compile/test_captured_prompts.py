"""Steps that read prompts or drafts as whole captured ones; the capture itself is stood in for by the step
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
from onboard.cache.examples import draft_examples, prompt_examples
from onboard.cache.step_buffer import CHOICE_NAMES, ROW_NAMES, StepSizes
from onboard.errors import OnboardError
from onboard.graph.compile.captured_prompts import CapturedPrompts, obstacle, step_sizes
from onboard.graph.compile.cuda_graph import CapturedDecode
from onboard.ops.library import op_sources
from onboard.ops.sampling.sampling import choose_tokens
from tests.support.graph.captures import stand_in_for_captures
from tests.support.graph.decoder import VOCABULARY, copied_inputs, decoder, make_cache
from tests.support.graph.harness import rmse

PROMPTS = [StepSizes(8, 7, 7), StepSizes(15, 9, 9)]
DRAFTED = [StepSizes(3, 2, 3), StepSizes(6, 3, 6), StepSizes(12, 5, 12)]


@pytest.mark.parametrize(
    ("wanted", "limits", "expected"),
    [
        (
            None,
            (8192, 256, 4096),
            [
                (64, 63),
                (128, 127),
                (192, 191),
                (256, 255),
                (384, 257),
                (512, 257),
                (768, 257),
                (1024, 257),
            ],
        ),
        (None, (8192, 4, 513), [(64, 5), (128, 5), (192, 5), (256, 5), (384, 5), (512, 5)]),
        (None, (300, 1, 512), [(64, 2), (128, 2), (192, 2), (256, 2)]),
        ([96, 7, 9999, 7], (8192, 16, 4096), [(7, 6), (96, 17)]),
        ([1, 2], (8192, 16, 4096), []),
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
    expected = {f"{word}_{kind}" for word in ("triton", "invariant") for kind in kinds}
    assert names == expected | {"triton_cached_mla", "triton_cached_rope_mla"}


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


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> tuple[CapturedDecode, Any]:
    """A graph with captured sizes of prompts, of drafts and of decode steps, and its cache."""
    stand_in_for_captures(monkeypatch)
    gm, cache = decoder(), make_cache()
    decode, prompts = CapturedDecode(gm), CapturedPrompts(cache)
    decode.capture(cache, [4, 8])
    info = cache.info
    info.captured = prompts.capture(gm, gm, PROMPTS, prompt_examples(info))
    info.captured_drafts = prompts.capture(gm, gm, DRAFTED, draft_examples(info))
    decode.prompts = prompts
    return decode, cache


def _set_rows(
    cache: Any, starts: list[int], lengths: list[int], wanted: list[int] | None = None
) -> None:
    rows, slots = cache.info.rows, np.arange(1, 1 + len(lengths))
    for slot, start, length in zip(slots.tolist(), starts, lengths, strict=True):
        rows.start(slot, torch.randint(VOCABULARY, (start + length,)).tolist())
        rows.num_cached[slot] = start
        rows.set_pages(slot, 0, 0, range(4 * slot - 3, 4 * slot + 1))
    cache.info.set_rows(slots, np.array(lengths), logits_rows=wanted and np.array(wanted))


@pytest.mark.parametrize(
    ("starts", "lengths", "size"),
    [
        ([0], [5], (8, 7)),
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
    _check_replay(captured, (starts, lengths, None), size)


@pytest.mark.parametrize(
    ("starts", "lengths", "rows", "size"),
    [
        ([5], [3], [0, 1, 2], (3, 2)),
        ([5], [2], [0, 1], (3, 2)),
        ([5, 8], [3, 1], [0, 1, 2, 3], (6, 3)),
        ([5, 8, 3], [3, 1, 2], [0, 1, 2, 3, 4, 5], (12, 5)),
        ([5, 8, 3], [3, 1, 8], [0, 1, 2, 3, 11], (12, 5)),
        ([5, 8, 3], [3, 1, 9], [0, 1, 2, 3, 12], None),
    ],
)
@torch.inference_mode()
def test_a_step_with_drafts_is_padded_and_replayed(
    captured: tuple[CapturedDecode, Any],
    starts: list[int],
    lengths: list[int],
    rows: list[int],
    size: tuple[int, int] | None,
) -> None:
    _check_replay(captured, (starts, lengths, rows), size)


def _check_replay(
    captured: tuple[CapturedDecode, Any], step: Any, size: tuple[int, int] | None
) -> None:
    """Logits and stored keys are those of the graph itself, of a step without padding; tokens are
    drawn for the slot and the place of each row.
    """
    decode, cache = captured
    info, seed = cache.info, int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    info.rows.sampling[1::2] = 0.8, 0, 1.0, 0.0
    info.rows.keys[:] = np.random.default_rng(seed).integers(2**63, size=len(info.rows.keys))
    known = info.captured, info.captured_drafts
    info.captured = info.captured_drafts = None
    torch.manual_seed(seed)
    _set_rows(cache, *step)
    alone = copied_inputs(cache)
    choice = {name: tensor.clone() for name, tensor in info.choice.items()}
    info.captured, info.captured_drafts = known
    torch.manual_seed(seed)
    _set_rows(cache, *step)
    tokens, logits = cache.next_tokens(decode)
    expected = decode.gm(**alone)[0]
    assert rmse(logits()[: len(expected)], expected) <= 1e-6
    how = [choice[name] for name in CHOICE_NAMES]
    assert tokens.tolist()[: len(expected)] == choose_tokens(expected, *how).tolist()
    owners = np.repeat(np.arange(len(step[1])), step[1])
    places = alone["logits_gather_indices"].numpy()
    slots, lengths = (1 + owners)[places], (alone["position_ids"][0].numpy() + 1)[places]
    assert [choice[name].tolist() for name in ROW_NAMES] == [slots.tolist(), lengths.tolist()]
    assert not info.choice[ROW_NAMES[0]][len(places) :].any(), "padding is of the spare slot"
    assert decode.replays == (size is not None)
    if size is not None:
        assert (info.sizes.tokens, info.sizes.sequences) == size
    for name in cache.caches:  # padding writes no page of a sequence
        assert torch.equal(cache.caches[name][1:], alone[name][1:])


def test_times_are_known_by_size_and_kind(captured: tuple[CapturedDecode, Any]) -> None:
    _, cache = captured
    both = {True: StepTimes(1.0, 1.0), False: StepTimes(1.0, 1.0)}
    assert cache.info.captured.times == dict.fromkeys(PROMPTS, both)
    one = {False: StepTimes(1.0, 1.0)}
    assert cache.info.captured_drafts.times == dict.fromkeys(DRAFTED, one)


@torch.inference_mode()
def test_other_caches_are_refused(captured: tuple[CapturedDecode, Any]) -> None:
    decode, cache = captured
    _set_rows(cache, [0], [5])
    assert decode.prompts is not None
    with pytest.raises(OnboardError, match="allocated again"):
        decode.prompts.replay(cache.info.inputs, dict(cache.caches))
