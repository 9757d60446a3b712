"""Prefill in pieces: where a graph is cut, what pads a step, and that results and caches are those
of the graph itself.

No CUDA graph exists on the CPU: a stand-in runs a piece on its static inputs again and writes over
its results, as a replay does. tests/gpu has the real thing.
"""

import random

import numpy as np
import pytest
import torch
from torch import fx, nn

from onboard.graph.compile.pieces import CannotSplitError
from onboard.graph.compile.piecewise import PiecewiseGraph, token_buckets
from tests.support.graph.decoder import (
    HEADS,
    PAGE,
    SIZE,
    VOCABULARY,
    Leaves,
    copied_inputs,
    decoder,
    make_cache,
    set_decode_batch,
)
from tests.support.graph.harness import rmse

ops = torch.ops.onboard


class StandIn:
    """Replays pieces as CUDA graphs do; the memory of a value that was let go is spoilt, as if
    another had taken it.
    """

    def __init__(self) -> None:
        self.pieces = 0

    def record(self, run):
        results = run()
        self.pieces += 1

        def replay() -> None:
            for old, new in zip(results, run(), strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)

        return replay, results

    def borrowed(self, tensor):
        return tensor


class Layers(nn.Module):
    """Two layers of paged attention, with a residual stream, sizes taken from the input, and logits
    of chosen rows.
    """

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(width, width) for _ in range(2)) for _ in range(3)
        )
        self.mlp, self.head = nn.Linear(width, width), nn.Linear(width, VOCABULARY)

    def forward(
        self, input_ids, position_ids, cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host,
        logits_gather_indices, state_slots, k_cache, v_cache,
    ):  # fmt: skip
        tokens = torch.ops.aten.sym_size.int(input_ids, 1)
        x = self.embed(input_ids) + self.positions(position_ids)
        metadata = (
            cu_seqlens,
            kv_lens,
            block_table,
            slot_mapping,
            batch_info_host,
            k_cache,
            v_cache,
        )
        for layer in range(2):
            q, k, v = (
                each[layer](x).view(1, tokens, HEADS, SIZE) for each in (self.q, self.k, self.v)
            )
            attended = ops.torch_cached_attention(q, k, v, *metadata)
            x = x + attended.reshape(tokens, HEADS * SIZE)[None]
            x = x + self.mlp(x).sigmoid()
        return self.head(ops.gather_logits_before_lm_head(x, logits_gather_indices)) * 2


def _graph(model):
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    model = model.requires_grad_(False)
    return fx.GraphModule(model, Leaves().trace(model))


def _captured(gm, sizes=(8, 32)):
    cache, stand_in = make_cache(), StandIn()
    pieces = PiecewiseGraph(gm, recorder=stand_in)
    pieces.capture(cache, sizes)
    return pieces, cache, stand_in


def _set_batch(cache, lengths, starts) -> None:
    tokens = np.random.default_rng(random.getrandbits(64)).integers(0, VOCABULARY, sum(lengths))
    pages = np.arange(1, 1 + 4 * len(lengths)).reshape(len(lengths), 4)
    cache.info.set_batch(tokens, np.array(starts), np.array(lengths), pages)


def _named(gm, cache):
    return {
        name: cache.args[name]
        for name in (str(n.target) for n in gm.graph.nodes if n.op == "placeholder")
    }


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (None, 512, [64, 128, 256, 512]),
        (None, 300, [64, 128, 256, 300]),
        (None, 40, [40]),
        ([96, 16, 700], 512, [16, 96]),
        ([], 512, []),
    ],
)
def test_token_buckets(wanted, most, expected):
    assert token_buckets(wanted, most) == expected


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([5], [0]),
        ([8], [3]),
        ([3, 1, 4], [0, 7, 2]),
        ([9, 1, 1], [2, 0, 5]),
        ([1, 1], [3, 9]),
        ([14, 16, 2], [0, 0, 1]),
    ],
    ids=["prefill", "full", "mixed", "next size", "decode", "largest"],
)
@pytest.mark.parametrize("model", ["one layer", "two layers"])
def test_steps_are_those_of_the_graph(model, lengths, starts):
    gm = decoder() if model == "one layer" else _graph(Layers())
    pieces, cache, _ = _captured(gm)
    for step in range(3):
        _set_batch(cache, lengths, starts)
        twin = {name: tensor.clone() for name, tensor in _named(gm, cache).items()}
        actual = pieces(**_named(gm, cache))
        assert rmse(actual, gm(**twin)) <= 1e-6
        for name, tensor in cache.caches.items():
            assert rmse(tensor, twin[name]) <= 1e-6, "no page differs, the spare one included"
        assert pieces.replays == step + 1


def test_a_result_outlives_the_next_step():
    pieces, cache, _ = _captured(_graph(Layers()))
    _set_batch(cache, [5], [0])
    first = pieces(**_named(pieces, cache))
    kept = first.clone()
    _set_batch(cache, [7], [1])
    pieces(**_named(pieces, cache))
    assert torch.equal(first, kept)


def test_larger_steps_run_as_they_are():
    pieces, cache, _ = _captured(decoder(), sizes=[8])
    _set_batch(cache, [9], [0])
    twin = copied_inputs(cache)
    assert rmse(pieces(**cache.args), pieces.gm(**twin)) == 0
    assert pieces.replays == 0


def test_the_graph_is_cut_at_attention_and_before_the_chosen_rows():
    pieces, _, stand_in = _captured(_graph(Layers()), sizes=[16])
    segments = pieces._pieces.segments
    assert [each.captured for each in segments] == [True, False, True, False, True, False]
    assert stand_in.pieces == 3
    assert len(segments[-1].outputs) == 1


def test_what_is_not_compiled_calls_no_operator_of_ours_through_the_dispatcher():
    graph = _graph(Layers())
    through = [node for node in graph.graph.nodes if _is_ours(node)]
    pieces, _, _ = _captured(graph, sizes=[16])
    parts = [each.run.__self__ for each in pieces._pieces.segments]
    direct = pieces.whole.__dict__["_direct"]
    assert through
    assert not [node for part in (*parts, direct) for node in part.graph.nodes if _is_ours(node)]


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("onboard")


def test_a_step_runs_in_pieces_only_where_that_was_measured_to_be_faster():
    pieces, cache, _ = _captured(decoder(), sizes=[8, 16, 32])
    for bucket, (seconds, whole) in zip(pieces._buckets, [(2, 5), (4, 6), (9, 10)], strict=True):
        bucket.seconds, bucket.whole_seconds = seconds, whole
    # Between 16 and 32 tokens a whole step takes 6 to 10 seconds, in 32 padded rows it takes 9.
    served = {
        tokens: pieces._bucket_for(tokens) for tokens in (1, 8, 9, 16, 20, 27, 28, 29, 32, 33)
    }
    sizes = {tokens: bucket and bucket.tokens for tokens, bucket in served.items()}
    assert sizes == {
        1: 8,
        8: 8,
        9: 16,
        16: 16,
        20: None,
        27: None,
        28: 32,
        29: 32,
        32: 32,
        33: None,
    }
    _set_batch(cache, [16, 4], [0, 0])
    twin = copied_inputs(cache)
    assert torch.equal(pieces(**cache.args), pieces.gm(**twin))
    assert pieces.replays == 0


class AllRows(Layers):
    """Logits of every token: the result is a piece's."""

    def forward(self, *inputs):
        hidden = self.embed(inputs[0])
        heads = hidden.view(1, -1, HEADS, SIZE)
        attended = ops.torch_cached_attention(heads, heads, heads, *inputs[2:7], *inputs[-2:])
        return self.head(hidden + attended.flatten(2))


class SizeOutside(AllRows):
    """A number that depends on the tokens is an argument of a call that cannot be captured."""

    def forward(self, *inputs):
        hidden = self.embed(inputs[0])
        tokens = torch.ops.aten.sym_size.int(hidden, 1)
        return hidden + torch.ops.aten.slice.Tensor(inputs[5], 0, 0, tokens)[None, :, None]


_NAMES = [
    "input_ids",
    "position_ids",
    "cu_seqlens",
    "kv_lens",
    "block_table",
    "slot_mapping",
    "batch_info_host",
]


def _with_names(model_class):
    class Named(model_class):
        def forward(
            self, input_ids, position_ids, cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host,
            k_cache, v_cache,
        ):  # fmt: skip
            return model_class.forward(
                self, input_ids, position_ids, cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host,
                k_cache, v_cache,
            )  # fmt: skip

    return _graph(Named())


def test_a_piece_that_is_last_gives_the_rows_of_the_step():
    gm = _with_names(AllRows)
    pieces, cache, _ = _captured(gm)
    _set_batch(cache, [3, 4], [0, 2])
    twin = {name: tensor.clone() for name, tensor in _named(gm, cache).items()}
    actual, expected = pieces(**_named(gm, cache)), gm(**twin)
    assert actual.shape == expected.shape == (1, 7, VOCABULARY)
    assert rmse(actual, expected) <= 1e-6


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(CannotSplitError, match="sym_size.*needed outside"):
        _captured(_with_names(SizeOutside))


def test_decode_and_pieces_share_one_module():
    pieces, cache, _ = _captured(decoder())
    set_decode_batch(cache, 3)
    twin = copied_inputs(cache)
    assert rmse(pieces(**cache.args), pieces.gm(**twin)) <= 1e-6
    assert cache.info.page_size == PAGE
