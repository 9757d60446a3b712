import random

import numpy as np
import pytest
import torch

from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.examples import set_decode_example, set_prefill_example
from onboard.cache.resources import KVPagedResource


def _make_info(**overrides: int) -> SequenceInfo:
    sizes = {
        "max_batch_size": 4,
        "max_seq_len": 20,
        "max_num_tokens": 32,
        "page_size": 4,
        **overrides,
    }
    return SequenceInfo(**sizes, device=torch.device("cpu"))


def _set(
    info: SequenceInfo,
    batch: list[tuple[int, int, list[int]]],
    two_groups: bool = False,
    **kwargs: object,
) -> np.ndarray:
    """`batch` holds (start, length, pages); return the token ids."""
    ids = np.array([random.randrange(1, 1000) for _, length, _ in batch for _ in range(length)])
    pages = np.zeros((len(batch), info.pages_per_sequence), dtype=np.int32)
    for row, (_, _, owned) in zip(pages, batch, strict=True):
        row[: len(owned)] = owned
    starts, lengths = (np.array([each[i] for each in batch]) for i in (0, 1))
    info.set_batch(
        ids, starts, lengths, np.stack([pages, pages]) if two_groups else pages, **kwargs
    )
    return ids


def test_a_mixed_batch_is_described_token_by_token() -> None:
    """Against a plain loop over sequences and tokens: decode, chunked prefill and prefill in one
    row.
    """
    info = _make_info()
    batch = [(9, 1, [7, 2, 5]), (4, 6, [3, 1, 8]), (0, 3, [6])]
    ids = _set(info, batch)
    expected: dict[str, list[int]] = {
        "position_ids": [],
        "slot_mapping": [],
        "cu_seqlens": [0],
        "kv_lens": [],
    }
    for start, length, pages in batch:
        for position in range(start, start + length):
            expected["position_ids"].append(position)
            expected["slot_mapping"].append(pages[position // 4] * 4 + position % 4)
        expected["cu_seqlens"].append(expected["cu_seqlens"][-1] + length)
        expected["kv_lens"].append(start + length)
    args = info.args
    assert args["input_ids"].tolist() == [ids.tolist()]
    assert args["position_ids"].tolist() == [expected["position_ids"]]
    for name in ("slot_mapping", "cu_seqlens", "kv_lens"):
        assert args[name].tolist() == expected[name], name
    assert args["block_table"].tolist() == [[7, 2, 5, 0, 0], [3, 1, 8, 0, 0], [6, 0, 0, 0, 0]]
    assert args["batch_info_host"].tolist() == [3, 10, 6, 10, 0]
    assert args["logits_gather_indices"].tolist() == [0, 6, 9]


def test_names_shapes_and_dtypes_are_the_documented_ones() -> None:
    info = _make_info()
    _set(info, [(0, 5, [1, 2]), (0, 2, [3])], logits_rows=np.arange(7))
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in info.args.items()}
    assert found == {
        "input_ids": ((1, 7), torch.int64),
        "position_ids": ((1, 7), torch.int64),
        "cu_seqlens": ((3,), torch.int32),
        "kv_lens": ((2,), torch.int32),
        "block_table": ((2, 5), torch.int32),
        "slot_mapping": ((7,), torch.int64),
        "state_slots": ((2,), torch.int64),
        "batch_info_host": ((5,), torch.int32),
        "logits_gather_indices": ((7,), torch.int64),
    }


def test_a_decode_batch_is_padded_with_one_token_sequences_in_page_zero() -> None:
    info = _make_info()
    info.decode_sizes = [1, 2, 4]
    _set(info, [(3, 1, [1]), (7, 1, [2, 3]), (0, 1, [4])])
    args = info.args
    assert info.num_sequences == 3
    assert args["cu_seqlens"].tolist() == [0, 1, 2, 3, 4]
    assert args["kv_lens"].tolist() == [4, 8, 1, 1]
    assert args["slot_mapping"].tolist() == [7, 15, 16, 0]
    assert args["block_table"][3].tolist() == [0] * 5
    assert args["logits_gather_indices"].tolist() == [0, 1, 2, 3]
    assert args["batch_info_host"].tolist() == [4, 4, 1, 8, 0]


def test_a_prefill_is_not_padded() -> None:
    info = _make_info()
    info.decode_sizes = [4]
    _set(info, [(3, 1, [1]), (0, 2, [2])])
    assert len(info.args["kv_lens"]) == 2


def test_small_and_large_steps_do_not_disturb_each_other() -> None:
    """They share a buffer, laid out differently."""
    info = _make_info(max_num_tokens=500, max_seq_len=400)
    for start, length in ((7, 400 - 7), (3, 1), (0, 350), (20, 2)):
        ids, pages = np.full(length, 77), np.full((1, 100), 9)
        info.set_batch(ids, np.array([start]), np.array([length]), pages)
        plain = _make_info(max_num_tokens=500, max_seq_len=400)
        plain.set_batch(ids, np.array([start]), np.array([length]), pages)
        assert {name: each.tolist() for name, each in info.args.items()} == {
            name: each.tolist() for name, each in plain.args.items()
        }


def test_every_decode_batch_has_its_inputs_at_the_same_addresses() -> None:
    info = _make_info()
    _set(info, [(0, 17, [1, 2, 3, 4, 5])])
    names = [name for name in info.args if name != "batch_info_host"]
    _set(info, [(3, 1, [1]), (7, 1, [2, 3])])
    before = {name: info.args[name].data_ptr() for name in names}
    _set(info, [(0, 17, [1, 2, 3, 4, 5])])
    _set(info, [(5, 1, [4, 4]), (2, 1, [2])])
    assert {name: info.args[name].data_ptr() for name in names} == before
    assert all(address % 64 == 0 for address in before.values())


def test_rope_length_adds_one_padding_row_and_only_when_no_token_is_that_far() -> None:
    info = _make_info()
    _set(info, [(0, 3, [1])], rope_length=15)
    assert info.args["position_ids"].tolist() == [[0, 1, 2, 14]]
    assert info.args["kv_lens"].tolist() == [3, 1]
    assert info.args["slot_mapping"].tolist() == [4, 5, 6, 0]
    _set(info, [(12, 3, [1, 2, 3, 4])], rope_length=15)
    assert info.args["position_ids"].tolist() == [[12, 13, 14]]
    info.decode_sizes = [1, 4]
    _set(info, [(2, 1, [1])], rope_length=15)
    assert info.args["position_ids"].tolist() == [[2, 14, 14, 14]]


def test_stale_values_of_a_larger_step_do_not_leak() -> None:
    info = _make_info(max_batch_size=3)
    _set(info, [(16, 1, [9, 9, 9, 9, 9])] * 3)
    info.set_batch(np.array([5]), np.array([0]), np.array([1]), np.array([[1]]))
    assert info.args["block_table"].tolist() == [[1, 0, 0, 0, 0]]
    assert info.args["kv_lens"].tolist() == [1]


def test_examples_fill_a_row_to_the_limit() -> None:
    info = _make_info()
    set_prefill_example(info, 32)
    assert info.args["batch_info_host"].tolist() == [2, 32, 20, 20, 1]
    set_decode_example(info, 3, kv_len=20)
    assert info.args["batch_info_host"].tolist() == [3, 3, 1, 20, 0]
    assert int(info.args["slot_mapping"].min()) >= 4  # not in the spare page


def test_a_sequence_past_the_limit_is_refused() -> None:
    with pytest.raises(AssertionError):
        _set(_make_info(), [(20, 1, [1, 2, 3, 4, 5])])


class _Recorder(torch.nn.Module):
    """A graph that names some of the inputs and returns the tokens as logits of one entry."""

    def forward(
        self, input_ids: torch.Tensor, kv_lens: torch.Tensor, k_cache_0: torch.Tensor
    ) -> torch.Tensor:
        return input_ids[..., None] * 1.0


def test_call_passes_what_the_graph_names() -> None:
    interface = CachedSequenceInterface(_make_info())
    interface.add_cache("k_cache_0", KVPagedResource(2, 8, torch.float32, 4))
    interface.add_cache("v_cache_0", KVPagedResource(2, 4, torch.float32, 4))
    interface.allocate(5)
    assert {name: tuple(cache.shape) for name, cache in interface.caches.items()} == {
        "k_cache_0": (5, 2, 4, 8),
        "v_cache_0": (5, 2, 4, 4),
    }
    assert interface.bytes_per_page == 4 * 2 * (8 + 4) * 4
    ids = _set(interface.info, [(0, 3, [1]), (0, 2, [2])])
    gm = torch.fx.symbolic_trace(_Recorder())
    assert interface.call(gm).flatten().tolist() == ids.tolist()
    assert interface.logits(gm).flatten().tolist() == [ids[2], ids[4]]


def test_positions_begin_where_the_model_says_and_keys_at_zero() -> None:
    info = _make_info(first_position=2)
    _set(info, [(9, 1, [7, 2, 5]), (0, 3, [6])])
    assert info.args["position_ids"].tolist() == [[11, 2, 3, 4]]
    assert info.args["kv_lens"].tolist() == [10, 3]
    assert info.args["slot_mapping"].tolist() == [5 * 4 + 1, 24, 25, 26]


def _start_rows(info: SequenceInfo, lengths: list[int]) -> np.ndarray:
    """Begin rows of random tokens, all but the last cached, whose tokens are drawn; return their
    slots.
    """
    slots = np.arange(len(lengths)) + 1
    for slot, length in zip(slots, lengths, strict=True):
        info.rows.start(slot, [random.randrange(1, 1000) for _ in range(length)])
        info.rows.set_sampling(slot, [0.7, 5.0, 0.9, 0.1], key=int(slot) * 77)
        info.rows.num_cached[slot] = length - 1
        for group in range(info.num_groups):
            info.rows.set_pages(
                slot,
                group,
                0,
                [random.randrange(1, 50) for _ in range(-(-length // info.page_size))],
            )
    return slots


def _go_on(info: SequenceInfo, slots: np.ndarray) -> None:
    """Give each row its next token, and a page when it needs one."""
    for slot in slots:
        info.rows.num_cached[slot] += 1
        length = int(info.rows.num_cached[slot])
        info.rows.latest[slot] = random.randrange(1, 1000)
        if length % info.page_size == 0:
            for group in range(info.num_groups):
                info.rows.set_pages(
                    slot, group, length // info.page_size, [random.randrange(1, 50)]
                )


def test_a_batch_that_decodes_on_is_described_like_any_other() -> None:
    """Only what has changed is written then: against the same rows under slots that were never seen
    before.
    """
    info = _make_info(first_position=2)
    info.set_groups(2)
    info.decode_sizes = [4]
    slots = _start_rows(info, [3, 9, 6])
    for _ in range(9):
        info.set_rows(slots)
        tensors = {**info.args, **info.choice}
        short = {name: tensor.clone() for name, tensor in tensors.items()}
        info.set_rows(slots.copy())  # equal, and not known to be
        for name, tensor in {**info.args, **info.choice}.items():
            assert torch.equal(short[name], tensor), name
        info.set_rows(slots)
        _go_on(info, slots)


def test_after_a_step_of_several_tokens_all_of_the_next_one_is_written() -> None:
    """Even where the very same sequences go on, each by one token."""
    found = []
    for lengths in (np.array([3, 1]), None):
        info, slots = _make_info(), np.array([1, 2])
        info.rows.num_cached[slots] = 4, 6
        info.rows.tokens[:3, :20] = np.arange(60).reshape(3, 20)
        for slot, pages in zip(slots, ([1, 2, 3], [4, 5, 6]), strict=True):
            info.rows.set_pages(slot, 0, 0, pages)
        if lengths is not None:
            info.set_rows(slots, lengths)
        info.rows.num_cached[slots] = 7, 7
        info.set_rows(slots)
        found.append({name: tensor.tolist() for name, tensor in info.args.items()})
    assert found[0] == found[1]


def test_tables_show_every_batch_s_pages_and_no_others() -> None:
    """Whatever was shown before, longer or shorter: against tables in which each row is written
    whole.

    A device that has the columns of before and copies as many as it is told to has all of them.
    """
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    info = _make_info(max_seq_len=80)
    info.set_groups(2)
    slots, copied = np.array([1, 2]), np.zeros((2, 5, 20), dtype=np.int32)
    for _ in range(100):
        if draw.random() < 0.2:
            lengths = [draw.randrange(1, 80) for _ in range(draw.randrange(1, 5))]
            _set(
                info,
                [(length - 1, 1, [7] * -(-length // 4)) for length in lengths],
                two_groups=True,
            )
            _copy_shown(info, copied, len(lengths))
            continue
        for slot in draw.sample(range(1, 5), 2):
            if draw.random() < 0.5:
                info.rows.start(slot, [1] * draw.randrange(1, 40))
                info.rows.num_cached[slot] = info.rows.num_tokens[slot] - 1
            first = draw.randrange(15)
            info.rows.set_pages(
                slot, draw.randrange(2), first, [draw.randrange(1, 50) for _ in range(5)]
            )
        if draw.random() < 0.5:
            slots = np.array(draw.sample(range(1, 5), draw.randrange(1, 5)))
        info.set_rows(slots)
        for group, name in enumerate(("block_table", "block_table_1")):
            assert info.args[name].tolist() == info.rows.tables[group, slots].tolist()
        _copy_shown(info, copied, len(slots))


def _copy_shown(info: SequenceInfo, copied: np.ndarray, rows: int) -> None:
    for target, name in zip(copied, ("block_table", "block_table_1"), strict=True):
        shown = info.args[name].numpy()
        for row, width in enumerate(info.buffer.widths[:rows]):
            target[row, :width] = shown[row, :width]
        assert (target[:rows] == shown).all()


def test_a_full_batch_has_room_for_the_padding_row_of_a_rotary_table() -> None:
    info = _make_info()
    _set(info, [(0, 8, [2 * index + 1, 2 * index + 2]) for index in range(4)], rope_length=15)
    assert info.args["cu_seqlens"].tolist() == [0, 8, 16, 24, 32, 33]
    assert info.args["kv_lens"].tolist() == [8, 8, 8, 8, 1]
    assert info.args["position_ids"][0, -1] == 14


def test_a_batch_that_decodes_on_beyond_a_rotary_border_gets_its_padding_row() -> None:
    info = _make_info()
    slots = _start_rows(info, [3, 9, 6])
    info.set_rows(slots)  # plain, and known
    info.set_rows(slots, rope_length=15)
    found = {name: tensor.clone() for name, tensor in info.args.items()}
    info.set_rows(slots.copy(), rope_length=15)
    assert all(torch.equal(found[name], tensor) for name, tensor in info.args.items())
    assert found["position_ids"][0].max() == 14


def test_the_views_of_decode_steps_are_kept_and_no_others() -> None:
    info = _make_info()
    for batch, kept in (
        ([(3, 1, [1]), (7, 1, [2, 3])], True),
        ([(0, 3, [1]), (7, 1, [2, 3])], False),
    ):
        _set(info, batch)
        before = info.inputs
        _set(info, batch)
        assert (info.inputs is before) == kept


@pytest.mark.parametrize(
    ("sampling", "drawn", "filtered"),
    [
        ([0.0, 5.0, 0.9, 0.1], False, False),  # the likeliest token is among any
        ([0.7, 0.0, 1.0, 0.0], True, False),
        ([0.7, 5.0, 1.0, 0.0], True, True),
        ([0.7, 0.0, 0.9, 0.0], True, True),
        ([0.7, 0.0, 1.0, 0.1], True, True),
    ],
)
def test_a_step_is_drawn_and_filtered_if_some_sequence_is(
    sampling: list[float], drawn: bool, filtered: bool
) -> None:
    info = _make_info()
    slots = _start_rows(info, [3, 4])
    info.rows.set_sampling(1, [0.0, 0.0, 1.0, 0.0], key=1)
    info.rows.set_sampling(2, sampling, key=2)
    info.set_rows(slots)
    assert (info.rows.drawn, info.rows.filtered) == (drawn, filtered)


def test_a_row_begins_with_nothing_of_the_sequence_before_it() -> None:
    rows = _make_info().rows
    rows.start(1, [5, 6, 7])
    rows.set_pages(1, 0, 0, [3, 4])
    rows.num_cached[1] = 3
    rows.changed.clear()
    rows.start(1, [8, 9])
    assert (rows.num_cached[1], rows.num_tokens[1], rows.tables[:, 1].any()) == (0, 2, False)
    assert rows.changed == {1}
    assert rows.tokens_at(np.array([1, 1]), np.array([0, 1])).tolist() == [8, 9]


def test_examples_lie_in_pages_that_the_pool_has() -> None:
    info = _make_info()
    info.pool_sizes = [4]
    set_decode_example(info, 2, kv_len=20)
    assert sorted({*info.args["block_table"].flatten().tolist()}) == [1, 2, 3]
