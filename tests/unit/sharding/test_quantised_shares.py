"""Ranks compute with codes of their shares of quantised weights; what would take blocks with one
scale apart is decoded.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.errors import OnboardError
from onboard.graph.quantise.coded_shares import encoded_share, weight_of_share
from onboard.graph.weight_load.parameters import Share
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, quantised_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.quantised.encoded import Encoded
from onboard.quantised.weight import QuantisedWeight
from onboard.testing.divided import Divided, divide
from onboard.verify.error import rmse_ratio
from tests.support import quantised
from tests.support.quantised_drawing import packed
from tests.support.sharding.zoo import ROOT, save_family

KEYS = sorted(path.stem for path in (ROOT / "transforms").rglob("quantize_*_from_config.py"))
WITH_CODES: dict[str, Any] = {
    key: {"backend": "torch"} for key in KEYS if key != "quantize_kv_cache_from_config"
}
SHAPE = (8, 12)


def random_encoded(rows: int, columns: int) -> Encoded:
    grid = -(-SHAPE[0] // rows), -(-SHAPE[1] // columns)
    codes = torch.randint(-100, 100, SHAPE, dtype=torch.int8)
    return Encoded(codes, torch.rand(grid), rows, columns, torch.rand(grid), zero=torch.ones(grid))


@pytest.mark.parametrize("block", [(1, 12), (1, 4), (2, 4), (8, 12), (4, 1)])
@pytest.mark.parametrize(
    "kept",
    [
        {0: [(0, 4)]},
        {0: [(5, 8)]},
        {1: [(4, 8)]},
        {0: [(4, 8), (0, 4)]},
        {0: [(4, 8)], 1: [(8, 12)]},
    ],
)
def test_the_codes_of_a_share_stand_for_its_values(
    block: tuple[int, int], kept: dict[int, list[tuple[int, int]]]
) -> None:
    encoded, share = random_encoded(*block), Share(SHAPE, kept)
    own = encoded_share(encoded, share)
    assert own.codes.shape == share.own_shape
    torch.testing.assert_close(own.values(), share.of(encoded.values()), rtol=0, atol=0)


def weight(block: tuple[int, int] | None, **parts: str) -> QuantisedWeight:
    return QuantisedWeight("w", SHAPE, "int4", parts, lambda _: random_encoded(1, 4), block=block)


@pytest.mark.parametrize(
    ("block", "parts", "kept", "stays"),
    [
        ((1, 4), {}, {1: [(4, 8)]}, True),
        ((1, 4), {}, {1: [(6, 12)]}, False),
        ((4, 4), {}, {0: [(2, 4)]}, False),
        (None, {}, {1: [(6, 12)]}, True),  # all inputs of an output have one scale
        ((1, 4), {"groups": "g"}, {0: [(0, 4)]}, True),
        ((1, 4), {"groups": "g"}, {1: [(0, 4)]}, False),
        ((1, 4), {"inputs": "i"}, {1: [(0, 4)]}, False),
    ],
)
def test_blocks_are_not_taken_apart(
    block: tuple[int, int] | None,
    parts: dict[str, str],
    kept: dict[int, list[tuple[int, int]]],
    stays: bool,
) -> None:
    found = weight_of_share(weight(block, **parts), share := Share(SHAPE, kept))
    assert (found is not None) == stays
    assert found is None or found.shape == share.own_shape


VARIANTS = [
    *("ct_fp8_block", "ct_fp8_static", "ct_nvfp4", "ct_mxfp4", "hf_fp8_llama", "ct_w4a16"),
    *("ct_w4a16_asym", "gptq_asym", "awq", "modelopt_int4_awq"),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_share_is_read_and_no_more(variant: str) -> None:
    """The second half of the outputs, or of the inputs: what is decoded of it are its values."""
    checkpoint = quantised_checkpoint(quantised.FOLDER / variant)
    assert checkpoint is not None
    read: list[float] = []
    for name, found in checkpoint.weights.items():
        whole, bytes_of = checkpoint.encoded(name).values(), []
        for dim, size in enumerate(found.shape):
            share, before = Share(found.shape, {dim: [(size // 2, size)]}), checkpoint.bytes_read
            if weight_of_share(found, share) is None:  # it is decoded
                continue
            own = checkpoint.encoded_share(name, share)
            torch.testing.assert_close(own.values(), share.of(whole), rtol=0, atol=0)
            bytes_of.append(checkpoint.bytes_read - before)
        stored = sum(checkpoint.files.names()[each].nbytes for each in found.parts.values())
        read.append(min(bytes_of) / stored)
    assert 0.5 <= min(read) < 0.56, read  # groups of inputs are every rank's


def test_words_that_are_not_full_are_not_taken_apart(tmp_path: Path) -> None:
    """14 codes of four bits take two words, and seven of them are no word."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for index in range(30):
        shape = draw.choice([(14, 14), (28, 64), (64, 28), (20, 32)])
        layer, folder = packed(draw, shape), tmp_path / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"quantization_config": layer.said}))
        named = {f"up_proj.{ending}": tensor for ending, tensor in layer.tensors.items()}
        save_file(named, folder / "model.safetensors")
        checkpoint = quantised_checkpoint(folder)
        assert checkpoint is not None
        if "two ways" in refusal_of(checkpoint):
            continue
        ((name, found),) = checkpoint.weights.items()
        for dim, size in enumerate(shape):
            share = Share(shape, {dim: [(size // 2, size)]})
            if weight_of_share(found, share) is not None:
                own = checkpoint.encoded_share(name, share).values()
                expected = share.of(layer.weight).float()
                torch.testing.assert_close(own, expected, msg=str(layer.said))


def refusal_of(checkpoint: QuantisedCheckpoint) -> str:
    try:
        checkpoint.names()
    except OnboardError as error:
        return error.message
    return ""


def test_parts_of_several_runs_are_read_one_by_one(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    checkpoint, share = Checkpoint(tmp_path), Share((6, 8), {0: [(4, 6), (0, 1)], 1: [(2, 4)]})
    assert torch.equal(checkpoint.read_part("w", share.kept), share.of(whole))
    assert checkpoint.bytes_read == 3 * 2 * whole.itemsize


def prompt_of(folder: Path) -> dict[str, torch.Tensor]:
    ids = load_file(folder / "expected.safetensors")["ids"].view(1, -1)
    return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}


def codes(divided: Divided) -> list[int]:
    """Return the bytes of each rank's codes."""
    kinds = (torch.float8_e4m3fn, torch.int8, torch.int32)
    return [
        sum(each.nbytes for each in graph.parameters() if each.dtype in kinds)
        for graph in divided.graphs
    ]


@pytest.mark.parametrize(
    ("variant", "limit"),
    [
        ("ct_fp8_static", 1e-5),  # one key head, which both ranks have
        ("ct_fp8_dynamic", 0.05),  # closings quantise the inputs of a rank by themselves
        ("ct_w4a16", 1e-5),  # words are of 128 inputs at least
        ("gptq_desc_act", 1e-5),
        ("ct_w4a16_qwen3_moe", 1e-5),  # experts by their numbers
        ("ct_w8a8_qwen3_moe", 0.05),  # inputs, too, are integers
    ],
)
def test_two_ranks_compute_with_codes(variant: str, limit: float) -> None:
    folder = quantised.FOLDER / variant
    prompt = prompt_of(folder)
    alone, both = (divide(folder, ROOT, ranks, WITH_CODES) for ranks in (1, 2))
    [whole] = codes(alone)
    assert whole > 0
    assert all(0 < own <= 0.6 * whole for own in codes(both))
    read = [context.bytes_read for context in both.contexts]
    assert max(read) <= 0.75 * alone.contexts[0].bytes_read, read
    expected = alone.logits(prompt)[0]
    for own in both.logits(prompt):
        assert rmse_ratio(own, expected) < limit


INNER = 256
"""Channels of an expert."""


def stacked_experts(folder: Path) -> Path:
    """A checkpoint whose experts are stacks of four-bit blocks with scales, drawn at random."""
    whole = quantised.FOLDER / "mxfp4_gpt_oss"
    config = json.loads((whole / "config.json").read_text()) | {"intermediate_size": INNER}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(whole / "model.safetensors")
    experts, hidden = config["num_local_experts"], config["hidden_size"]
    sizes = {"gate_up_proj": (2 * INNER, hidden), "down_proj": (hidden, INNER)}
    for name in list(tensors):
        stem, _, part = name.rpartition("_")
        if (size := sizes.get(stem.rpartition(".")[2])) is None:
            continue
        rows, groups = size[0], size[1] // 32
        blocks = torch.randint(256, (experts, rows, groups, 16)).to(torch.uint8)
        scales = torch.randint(117, 121, (experts, rows, groups)).to(torch.uint8)
        bias = torch.randn(experts, rows).bfloat16()
        tensors[name] = {"blocks": blocks, "scales": scales, "bias": bias}[part]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_a_stack_a_share_is_read_and_no_more(tmp_path: Path, dim: int) -> None:
    """The second half of the experts, of their inputs or of their outputs."""
    checkpoint = quantised_checkpoint(stacked_experts(tmp_path))
    assert checkpoint is not None
    for name, weight in checkpoint.weights.items():
        share = Share(weight.shape, {dim: [(weight.shape[dim] // 2, weight.shape[dim])]})
        stays = weight_of_share(weight, share)
        assert stays is not None
        whole = torch.stack([each.values() for each in checkpoint.encoded_stack(name)])
        before = checkpoint.bytes_read
        own = [each.values() for each in checkpoint.encoded_stack(name, share=share)]
        torch.testing.assert_close(torch.stack(own), share.of(whole), rtol=0, atol=0)
        assert stays.shape == tuple(share.of(whole).shape)
        stored = sum(checkpoint.files.names()[each].nbytes for each in weight.parts.values())
        assert 2 * (checkpoint.bytes_read - before) == stored


def test_a_share_of_a_stack_takes_no_block_apart() -> None:
    stack = replace(weight((1, 4)), shape=(2, *SHAPE))
    for kept, stays in (({2: [(4, 8)]}, True), ({2: [(6, 12)]}, False), ({1: [(3, 8)]}, True)):
        assert (weight_of_share(stack, Share(stack.shape, kept)) is not None) == stays
    turned = replace(stack, shape=(2, SHAPE[1], SHAPE[0]), transposed=True)
    for kept, stays in (({1: [(4, 8)]}, True), ({1: [(6, 12)]}, False), ({2: [(3, 8)]}, True)):
        assert (weight_of_share(turned, Share(turned.shape, kept)) is not None) == stays


def test_of_stacked_experts_a_rank_reads_its_channels_alone() -> None:
    """Four-bit blocks and scales in stacks, which this model's experts of few channels decode."""
    folder = quantised.FOLDER / "mxfp4_gpt_oss"
    checkpoint = quantised_checkpoint(folder)
    assert checkpoint is not None
    stored, stacks = checkpoint.files.names(), checkpoint.weights.values()
    halves = sum(stored[part].nbytes for each in stacks for part in each.parts.values()) // 2
    prompt = prompt_of(folder)
    alone, both = (divide(folder, ROOT, ranks) for ranks in (1, 2))
    whole = alone.contexts[0].bytes_read
    for context in both.contexts:
        assert context.bytes_read < whole - halves  # of the other matrices half, too
        assert not [fact for fact in context.facts if "take their blocks apart" in fact]
    expected = alone.logits(prompt)[0]
    for own_logits in both.logits(prompt):
        assert rmse_ratio(own_logits, expected) < 1e-5


def test_blocks_that_shares_take_apart_are_decoded() -> None:
    """Of blocks of 128 x 128, 144 channels have two, which two ranks do not divide; where a block
    has all inputs of its outputs, each of these gets its scale.
    """
    folder, down = quantised.FOLDER / "hf_fp8_llama", "model.layers.0.mlp.down_proj.weight"
    alone, both = (divide(folder, ROOT, ranks, WITH_CODES) for ranks in (1, 2))
    decoded = divide(folder, ROOT, 1).graphs[0].get_parameter(down)
    scale = "model.layers.0.mlp.gate_proj_up_proj.weight_scale"
    gate, up = alone.graphs[0].get_parameter(scale).split(144)
    assert len(gate.unique()) == 2
    for rank, (graph, context) in enumerate(zip(both.graphs, both.contexts, strict=True)):
        own = slice(72 * rank, 72 * rank + 72)
        assert torch.equal(graph.get_parameter(down), decoded[:, own])
        assert torch.equal(graph.get_parameter(scale), torch.cat([gate[own], up[own]]))
        assert any("2 quantised weights are decoded" in fact for fact in context.facts)


def test_ranks_quantise_their_shares_as_they_are_loaded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    folder = save_family(tmp_path, "llama", 5, **sizes, num_key_value_heads=2, head_dim=64)
    prompt = {"input_ids": torch.arange(9)[None], "position_ids": torch.arange(9)[None]}
    alone, both = (divide(folder, ROOT, ranks, WITH_CODES, quantize="int4") for ranks in (1, 2))
    assert all(0 < own <= 0.5 * codes(alone)[0] for own in codes(both))
    expected = alone.logits(prompt)[0]
    for own in both.logits(prompt):
        assert rmse_ratio(own, expected) < 1e-5
