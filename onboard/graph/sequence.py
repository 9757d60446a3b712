"""What the cached graph is called with: the flat row of tokens, its metadata, and the caches.

Each step's integers are written into one pinned host buffer and reach the device in one asynchronous copy; every
input of the graph is a view of that buffer. The buffer has two layouts, for decode-sized rows and for full rows, so
that a decode step copies only what it needs and a captured CUDA graph always finds its inputs at the same address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from onboard.graph.cache import CacheResource, PageAllocator

IntArray = npt.NDArray[np.integer]

_ALIGNMENT = 256  # bytes; Triton specialises on aligned pointers
_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "slot_mapping": torch.int64,
    "logits_gather_indices": torch.int64,
    "cu_seqlens": torch.int32,
    "kv_lens": torch.int32,
    "block_table": torch.int32,
    "state_slots": torch.int64,
}
METADATA_NAMES = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
"""What attention over pages takes."""
STATE_METADATA_NAMES = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
"""What a recurrence takes that keeps one state a sequence."""


@dataclass(frozen=True)
class _Layout:
    """Where each field lies in the buffer when rows have at most `tokens` tokens of `sequences` sequences."""

    tokens: int
    sequences: int
    arrays: dict[str, IntArray]
    """On the host."""
    device: dict[str, torch.Tensor]
    num_bytes: int
    views: dict[tuple[int, int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    """By number of tokens, sequences and rows of logits."""


class SequenceInfo:
    """The inputs of the cached graph for one step: tokens, positions and the metadata of docs/architecture.md."""

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        page_size: int,
        device: torch.device,
        first_position: int = 0,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max(max_num_tokens, max_batch_size)
        self.page_size = page_size
        self.device = device
        self.first_position = first_position
        """What a sequence's first token has in `position_ids`; nothing else counts from there."""
        self.pages_per_sequence = -(-max_seq_len // page_size)
        self.decode_sizes: list[int] = []
        """Captured decode batch sizes, ascending: a decode-only batch is padded up to the next one."""
        # One sequence and one token more than the limits: `rope_length` may add a row.
        sequences = max_batch_size + 1
        total = self._num_bytes(self.max_num_tokens + 1, sequences)
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros(total, dtype=torch.uint8, device=device)
        self._layouts = [self._layout(tokens, sequences) for tokens in (sequences, self.max_num_tokens + 1)]
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._range = np.arange(self.max_num_tokens + 2)
        self._info = torch.zeros(4, dtype=torch.int32)
        self.args: dict[str, torch.Tensor] = {}
        """The graph's inputs for this step, by name."""
        self.num_sequences = 0
        """Sequences of this step, without padding."""
        self.set_decode_example(1)

    def set_batch(
        self,
        token_ids: IntArray,
        starts: IntArray,
        lengths: IntArray,
        pages: IntArray,
        logits_rows: IntArray | None = None,
        *,
        slots: IntArray | None = None,
        rope_length: int = 0,
        position_ids: IntArray | None = None,
    ) -> None:
        """Describe one step: prefill, chunked prefill, decode or a mixture.

        `token_ids` [tokens] are the new tokens of all sequences, one after the other; `starts` [sequences] how many
        tokens of each are cached; `lengths` [sequences] how many are new; `pages` [sequences, <= pages_per_sequence]
        each sequence's pages; `slots` [sequences] where its recurrent states lie (default: the spare slot 0, for models
        that have none). `logits_rows` are the rows whose logits are wanted (default: each sequence's last).
        `rope_length` makes the row's largest position at least `rope_length - 1` by a padding row, for models whose
        rotary table depends on it. `position_ids` [tokens] are the tokens' positions for the model where they are not
        their places in the sequence: an image's tokens may share some.
        """
        self.num_sequences = len(lengths)
        padding = self._padding(starts, lengths, rope_length)
        if padding:
            token_ids, starts, lengths = (
                _padded(each, padding, i) for i, each in ((0, token_ids), (0, starts), (1, lengths))
            )
            pages = np.concatenate([pages, np.zeros((padding, pages.shape[1]), dtype=pages.dtype)])
            slots = None if slots is None else _padded(slots, padding, 0)
        tokens, sequences = len(token_ids), len(lengths)
        kv_lens = starts + lengths
        longest_query, longest_kv = int(lengths.max()), int(kv_lens.max())
        assert longest_kv <= self.max_seq_len
        sequence, positions, ends = self._rows(starts, lengths)
        assert tokens == ends[-1]
        page, offset = np.divmod(positions, self.page_size)
        wanted = ends - 1 if logits_rows is None else logits_rows
        layout = self._layout_for(tokens, sequences)
        host = layout.arrays
        host["input_ids"][:tokens] = token_ids
        host["position_ids"][:tokens] = positions + self.first_position
        if position_ids is not None:
            host["position_ids"][: tokens - padding] = position_ids + self.first_position
        host["position_ids"][tokens - padding : tokens] = max(rope_length - 1, 0)
        host["slot_mapping"][:tokens] = pages[sequence, page].astype(np.int64) * self.page_size + offset
        host["logits_gather_indices"][: len(wanted)] = wanted
        host["cu_seqlens"][0] = 0  # the other layout may have written there
        host["cu_seqlens"][1 : sequences + 1] = ends
        host["kv_lens"][:sequences] = kv_lens
        host["block_table"][:sequences, : pages.shape[1]] = pages
        host["block_table"][:sequences, pages.shape[1] :] = 0
        host["state_slots"][:sequences] = 0 if slots is None else slots
        self._info.numpy()[:] = sequences, tokens, longest_query, longest_kv
        self._copy_to_device(layout)
        self.args = self._views(layout, tokens, sequences, len(wanted))

    def set_decode_example(self, size: int, kv_len: int = 1) -> None:
        """Set a decode batch of `size` sequences with `kv_len` keys each that read the same pages (from 1 on).

        For warm-up, measurement and capture: it has the shapes of a real step; what it computes is of no use.
        """
        kv = np.full(size, kv_len)
        self.set_batch(np.zeros(size, dtype=np.int64), kv - 1, np.ones_like(kv), self._example_pages(size))

    def set_prefill_example(self, tokens: int) -> None:
        """Set a prefill of `tokens` tokens in sequences as long as possible, all in the same pages."""
        full, rest = divmod(min(tokens, self.max_batch_size * self.max_seq_len), self.max_seq_len)
        lengths = np.array([self.max_seq_len] * full + [rest] * (rest > 0))
        ids = np.zeros(lengths.sum(), dtype=np.int64)
        self.set_batch(ids, np.zeros_like(lengths), lengths, self._example_pages(len(lengths)))

    @property
    def num_bytes(self) -> int:
        """Bytes of a step's inputs on the device."""
        return self._device.nbytes

    @property
    def num_slots(self) -> int:
        """Slots of recurrent states: the spare 0, one for each sequence of a batch, and one for a sequence alone."""
        return self.max_batch_size + 2

    @property
    def num_logits(self) -> int:
        """Rows of logits that this step yields, padding included."""
        return len(self.args["logits_gather_indices"])

    def _example_pages(self, sequences: int) -> IntArray:
        return np.tile(np.arange(1, self.pages_per_sequence + 1), (sequences, 1))

    def _padding(self, starts: IntArray, lengths: IntArray, rope_length: int) -> int:
        """Return how many padding sequences the step needs: for its rotary table, or to reach a captured size."""
        if rope_length > (starts + lengths).max():
            return 1
        if lengths.max() > 1:
            return 0
        return next((size - len(lengths) for size in self.decode_sizes if size >= len(lengths)), 0)

    def _rows(self, starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return each token's sequence and position [tokens], and where each sequence's tokens end [sequences]."""
        order = self._range[: len(lengths)]
        if lengths.max() == 1:  # decode, which has to be quick
            return order, starts, order + 1
        ends = np.cumsum(lengths)
        sequence = np.repeat(order, lengths)
        return sequence, self._range[: ends[-1]] - np.repeat(ends - starts - lengths, lengths), ends

    def _layout_for(self, tokens: int, sequences: int) -> _Layout:
        """Return the smaller layout that fits, once its host buffer is free to be written."""
        layout = next(each for each in self._layouts if tokens <= each.tokens)
        assert sequences <= layout.sequences
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy may still read the host buffer
        return layout

    def _copy_to_device(self, layout: _Layout) -> None:
        if self._copied is not None:
            self._device[: layout.num_bytes].copy_(self._host[: layout.num_bytes], non_blocking=True)
            self._copied.record()

    def _views(self, layout: _Layout, tokens: int, sequences: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the inputs' views; those of pure decode steps are kept, since making them takes a while."""
        key = (tokens, sequences, rows)
        if (known := layout.views.get(key)) is not None:
            return known
        counts = {"cu_seqlens": sequences + 1, "kv_lens": sequences, "block_table": sequences}
        counts["state_slots"] = sequences
        counts["logits_gather_indices"] = rows
        views = {name: tensor[: counts.get(name, tokens)] for name, tensor in layout.device.items()}
        for name in ("input_ids", "position_ids"):
            views[name] = views[name][None]
        views["batch_info_host"] = self._info
        if tokens == sequences == rows:
            layout.views[key] = views
        return views

    def _shapes(self, tokens: int, sequences: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_DTYPES, (tokens,))
        shapes["cu_seqlens"] = (sequences + 1,)
        shapes["kv_lens"] = shapes["state_slots"] = (sequences,)
        shapes["block_table"] = (sequences, self.pages_per_sequence)
        return shapes

    def _num_bytes(self, tokens: int, sequences: int) -> int:
        shapes = self._shapes(tokens, sequences)
        return sum(_aligned(int(np.prod(shapes[name])) * dtype.itemsize) for name, dtype in _DTYPES.items())

    def _layout(self, tokens: int, sequences: int) -> _Layout:
        arrays, device, offset = {}, {}, 0
        for name, shape in self._shapes(tokens, sequences).items():
            size = int(np.prod(shape)) * _DTYPES[name].itemsize
            host, device[name] = (
                buffer[offset : offset + size].view(_DTYPES[name]).view(shape) for buffer in (self._host, self._device)
            )
            arrays[name] = host.numpy()
            offset += _aligned(size)
        return _Layout(tokens, sequences, arrays, device, offset)


class CachedSequenceInterface:
    """The sequence metadata and the named caches of one model: everything that its cached graph is called with."""

    def __init__(self, info: SequenceInfo) -> None:
        self.info = info
        self.resources: dict[str, CacheResource] = {}
        """Cache name (a placeholder of the graph) -> what it stores."""
        self.caches: dict[str, torch.Tensor] = {}
        self.allocator = PageAllocator(0)
        self._known: tuple[nn.Module, int, list[str]] | None = None

    def add_cache(self, name: str, resource: CacheResource) -> None:
        """Register a cache; its memory comes with `allocate`."""
        assert name not in self.resources, f"cache {name} is registered twice"
        self.resources[name] = resource

    def allocate(self, num_pages: int) -> None:
        """(Re)allocate every cache; contents are lost.

        Paged ones get `num_pages` pages, the spare page 0 among them, and states as many slots as a batch can use.
        """
        self.caches.clear()  # free the old ones first
        self.caches = {
            name: resource.allocate(self.info.num_slots if resource.by_sequence else num_pages, self.info.device)
            for name, resource in self.resources.items()
        }
        self.allocator = PageAllocator(num_pages)

    @property
    def num_pages(self) -> int:
        """Pages of each cache, the spare page 0 included."""
        return self.allocator.num_pages

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all caches."""
        return sum(resource.bytes_per_page for resource in self.resources.values())

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token takes over all caches."""
        return self.bytes_per_page / self.info.page_size

    @property
    def args(self) -> Mapping[str, torch.Tensor]:
        """Every input that a cached graph may name."""
        return {**self.info.args, **self.caches}

    def call(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm` on the present step with exactly the inputs that it names; return logits [1, rows, vocabulary]."""
        info, caches = self.info.args, self.caches
        output = gm(**{name: info[name] if name in info else caches[name] for name in self._names(gm)})
        logits = getattr(output, "logits", output)
        assert isinstance(logits, torch.Tensor)
        return logits

    def logits(self, gm: nn.Module) -> torch.Tensor:
        """Run `gm` and return the wanted logits [wanted rows, vocabulary], padding rows included."""
        logits = self.call(gm)[0]
        if "logits_gather_indices" in self._names(gm):
            return logits
        return logits[self.info.args["logits_gather_indices"]]

    def _names(self, gm: nn.Module) -> list[str]:
        """Return the names of the inputs of `gm`, read off its graph only after the graph has changed."""
        size = len(gm.graph.nodes) if hasattr(gm, "graph") else 0  # type: ignore[union-attr, arg-type]
        if self._known is None or self._known[:2] != (gm, size):
            self._known = gm, size, input_names(gm)
        return self._known[2]


def input_names(gm: nn.Module) -> list[str]:
    """Return the names of a graph module's placeholders, also through a wrapper that exposes `graph`.

    A model without a graph says them itself (`input_names`).
    """
    if not hasattr(gm, "graph"):
        names: list[str] = gm.input_names  # type: ignore[assignment]
        return names
    graph = gm.graph
    assert isinstance(graph, torch.fx.Graph)
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _padded(values: IntArray, padding: int, value: int) -> IntArray:
    return np.concatenate([values, np.full(padding, value)]).astype(np.int64)
