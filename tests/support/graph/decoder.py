"""A cached graph of one attention layer, and its inputs: what the tests of captured decode steps
run on.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import fx, nn

import onboard.ops  # noqa: F401
from onboard.cache.batch import SequenceInfo
from onboard.cache.cached_sequence import CachedSequenceInterface
from onboard.cache.resources import KVPagedResource

HEADS, SIZE, VOCABULARY, PAGE = 2, 16, 13, 4


class Decoder(nn.Module):
    """One layer of paged attention between an embedding and a head, with the inputs of a cached
    graph.
    """

    def __init__(self, backend: str = "torch") -> None:
        super().__init__()
        self.attention = getattr(torch.ops.onboard, f"{backend}_cached_attention")
        self.embed = nn.Embedding(VOCABULARY, HEADS * SIZE)
        self.positions = nn.Embedding(64, HEADS * SIZE)
        self.head = nn.Linear(HEADS * SIZE, VOCABULARY)

    def forward(
        self, input_ids, position_ids, cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host,
        logits_gather_indices, state_slots, k_cache, v_cache,
    ):  # fmt: skip
        x = self.embed(input_ids) + self.positions(position_ids)
        heads = x.view(1, -1, HEADS, SIZE)
        metadata = (cu_seqlens, kv_lens, block_table, slot_mapping, batch_info_host)
        attended = self.attention(heads, heads * 0.5, heads + 1, *metadata, k_cache, v_cache)
        hidden = x + attended.flatten(2)
        return self.head(
            torch.ops.onboard.gather_logits_before_lm_head(hidden, logits_gather_indices)
        )


class Leaves(fx.Tracer):
    def is_leaf_module(self, module, name):
        return False


def decoder(backend: str = "torch") -> fx.GraphModule:
    """Return the layer as a graph module with random weights, on the CPU."""
    model = Decoder(backend).requires_grad_(False)
    return fx.GraphModule(model, Leaves().trace(model))


def make_cache(
    num_pages: int = 40, max_batch_size: int = 8, device: str = "cpu"
) -> CachedSequenceInterface:
    info = SequenceInfo(
        max_batch_size=max_batch_size,
        max_seq_len=16,
        max_num_tokens=64,
        page_size=PAGE,
        device=torch.device(device),
    )
    cache = CachedSequenceInterface(info)
    for name in ("k_cache", "v_cache"):
        cache.add_cache(name, KVPagedResource(HEADS, SIZE, torch.float32, PAGE))
    cache.allocate(num_pages)
    for name, tensor in cache.caches.items():
        tensor.copy_(torch.randn(tensor.shape) * 0.5 + (name == "v_cache"))
    return cache


def set_decode_batch(cache: CachedSequenceInterface, size: int, seed: int | None = None) -> None:
    draw = np.random.default_rng(seed)
    starts, pages = draw.integers(0, 12, size), np.arange(1, 1 + 4 * size).reshape(size, 4)
    cache.info.set_batch(draw.integers(0, VOCABULARY, size), starts, np.ones(size, int), pages)


def copied_inputs(cache: CachedSequenceInterface) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in cache.args.items()}
