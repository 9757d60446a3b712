"""Four-bit weights over few tokens on a Hopper GPU, in every form that the kernel has, against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from onboard.ops.experts import cuda_few_tokens_moe as moe
from onboard.ops.experts.triton_moe import Activation, Weight, route
from onboard.ops.few_tokens import cuda_few_tokens as few
from onboard.ops.four_bits.four_bits import Words, pack, unpacked
from onboard.ops.linear import triton_fp8_linear as fp8
from onboard.ops.linear.fp8_linear import dequantised
from tests.support.ops.naive import relative_error
from tests.support.ops.seeds import seeded

_CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_CAPABILITY[0] != 9, reason="needs a Hopper GPU"),
]
ops = torch.ops.onboard
FORMS = [("int4", group) for group in (32, 64, 128, 256, 0)]  # 0: all inputs
FORMS += [("e2m1", group) for group in (16, 32, 64, 128)]
SCALES = {
    "int4": (torch.bfloat16, torch.float16, torch.float32),
    "e2m1": (torch.uint8, torch.float8_e4m3fn, torch.float32),
}


def _words(
    levels: str, group: int, shape: tuple[int, ...], dtype: torch.dtype, zeros: bool = False,
    whole: bool = False, bias: bool = False,
) -> Words:  # fmt: skip
    *rows, inputs = shape
    values = pack(torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8))
    groups = (*rows, -(-inputs // group))
    scale = torch.rand(groups, device="cuda") * 0.02 + 0.005
    if dtype == torch.uint8:
        scale = torch.randint(117, 124, groups, device="cuda").to(torch.uint8)
    zero = torch.randint(0, 16, groups, device="cuda", dtype=torch.uint8) if zeros else None
    factor = torch.rand(rows, device="cuda") + 0.5 if whole else None
    added = torch.randn(rows, device="cuda").bfloat16() if bias else None
    return Words(values, scale.to(dtype), zero, factor, added, levels, group)


def _values(words: Words, inputs: int) -> Tensor:
    form = (words.scale, words.zero, words.whole, words.levels, words.group)
    return unpacked(words.values, *form, inputs).double()


def _expected(x: Tensor, words: Words, around: few.Around) -> Tensor:
    wide = x.double()
    if around.norm is not None:
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + around.eps)
        # A tensor core's operands are rounded: 2^-9 of each input, which products of a gate double
        wide = (wide * around.norm.double()).bfloat16().double() * inverse
    y = wide @ _values(words, x.shape[1]).T
    if words.bias is not None:
        y = y + words.bias.double()
    if around.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if around.residual is None else y + around.residual.double()


@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
@pytest.mark.parametrize(("levels", "group"), FORMS)
def test_products_are_those_of_float64(levels: str, group: int, tokens: int) -> None:
    seeded()
    for (outputs, inputs), dtype, (zeros, gated) in product(
        ((200, 1000), (1104, 2880), (20000, 512), (40, 16000)),
        SCALES[levels],
        ((False, False), (True, True)),
    ):
        zeros = zeros and levels == "int4"
        shape = (outputs, inputs)
        words = _words(levels, group or inputs, shape, dtype, zeros, whole=gated, bias=gated)
        x = torch.randn(tokens, inputs, device="cuda").bfloat16() + (1 if zeros else 0)
        norm = torch.rand(inputs, device="cuda").bfloat16() if gated else None
        made = outputs // 2 if gated else outputs
        residual = torch.randn(tokens, made, device="cuda").bfloat16()
        around = few.Around(residual, norm, 1e-6, gated, "silu" if gated else "")
        assert few.suits(x, words)
        error = relative_error(few.product(x, words, around), _expected(x, words, around))
        assert error < 5e-3, (outputs, inputs, dtype, zeros, gated, error)


@pytest.mark.parametrize("act", ["", "silu"])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_bytes_are_those_of_float64(tokens: int, blocks: bool, act: str) -> None:
    """Eight-bit floats of every code, with scales of rows or of blocks."""
    seeded()
    for outputs, inputs in (
        (200, 1024),
        (1104, 2880),
        (20000, 512),
        (48, 14336),
        (320, 64),
        (400, 128),
    ):
        codes = torch.randint(0, 256, (outputs, inputs), device="cuda", dtype=torch.uint8)
        codes[codes % 128 == 127] = 0  # no numbers
        weight = codes.view(torch.float8_e4m3fn)
        shape = (-(-outputs // 128), -(-inputs // 128)) if blocks else (outputs,)
        scale = torch.rand(shape, device="cuda") * 1e-3 + 1e-4
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        norm = torch.rand(inputs, device="cuda").bfloat16() if act else None
        bias = torch.randn(outputs, device="cuda").bfloat16() if blocks else None
        made = outputs // 2 if act else outputs
        residual = torch.randn(tokens, made, device="cuda").bfloat16()
        wide = x.double()
        if norm is not None:
            inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            wide = (wide * norm.double()).bfloat16().double() * inverse
        y = wide @ dequantised(weight, scale).double().T
        y = y if bias is None else y + bias.double()
        if act:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        words = fp8._words(weight, scale, bias)
        assert few.suits(x, words)
        around = few.Around(residual, norm, 1e-6, bool(act), act)
        actual = few.product(x, words, around)
        assert relative_error(actual, y + residual.double()) < 5e-3, (outputs, inputs)


@pytest.mark.parametrize(
    "tiles",
    [
        (8, 1, 1, 4, 2),
        (2, 2, 1, 2, 3),
        (4, 2, 2, 4, 2),
        (1, 4, 1, 4, 2),
        (4, 1, 4, 1, 2),
        (8, 2, 1, 4, 1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 11])
def test_no_division_of_the_work_changes_the_result(tiles: tuple[int, ...], tokens: int) -> None:
    seeded()
    for levels, group, inputs in (("int4", 128, 4096), ("int4", 64, 300), ("e2m1", 32, 2880)):
        words = _words(levels, group, (3000, inputs), SCALES[levels][0], zeros=levels == "int4")
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        actual = few.product(x, words, few.Around(), few.Tiles(*tiles))
        assert relative_error(actual, _expected(x, words, few.Around())) < 5e-3


MIXTURES: list[dict[str, Any]] = [
    {"levels": "e2m1", "group": 32, "order": "interleaved", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
    {"levels": "e2m1", "group": 16, "order": "up_gate", "act_fn": "gelu_tanh"},
    {"levels": "int4", "group": 128, "order": "gate_up"},
    {"levels": "int4", "group": 32, "order": "up_gate", "is_gated_mlp": False, "act_fn": "relu2"},
]  # fmt: skip


def _chosen(tokens: int, top: int, experts: int) -> Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top).indices


@pytest.mark.parametrize(
    ("tokens", "top"), [(1, 1), (1, 3), (1, 8), (2, 1), (9, 3), (33, 1), (35, 3), (12, 9)]
)
@pytest.mark.parametrize("form", MIXTURES)
def test_a_mixture_is_that_of_plain_torch(form: dict[str, Any], tokens: int, top: int) -> None:
    """Of one token, and of some: with experts that have no pair, one, or more than a block's."""
    seeded()
    form = {"act_fn": "silu", "is_gated_mlp": True, **form}
    levels, group = form.pop("levels"), form["group"]
    experts, hidden, inner = 9, 400, 300
    rows = inner * (2 if form["is_gated_mlp"] else 1)
    dtype = torch.uint8 if levels == "e2m1" else torch.bfloat16
    up = _words(levels, group, (experts, rows, hidden), dtype, bias=True)
    down = _words(levels, group, (experts, hidden, inner), dtype, bias=True)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    chosen = _chosen(tokens, top, experts)
    if top > 1:
        chosen[0, 0] = -1  # an expert of another rank
    if tokens > 30:
        chosen[:20, -1] = 4
    form["act_fn"] = "gelu_pytorch_tanh" if form["act_fn"] == "gelu_tanh" else form["act_fn"]
    for routing in (
        torch.rand(tokens, top, device="cuda"),
        torch.rand(tokens, top, device="cuda").bfloat16(),
    ):
        weights = (up.values, down.values, up.scale, down.scale, None, None, None, None)
        biases = {"w3_w1_stacked_bias": up.bias, "w2_stacked_bias": down.bias}
        name = "mxfp4" if levels == "e2m1" else "int4"
        mixture = getattr(ops, f"triton_{name}_moe")
        reference = getattr(ops, f"torch_{name}_moe")
        given = biases | {"residual": torch.randn_like(x) if top == 3 else None}
        actual = mixture(x, chosen, routing, *weights, **form, **given)
        wide = {key: None if value is None else value.float() for key, value in given.items()}
        expected = reference(x.float(), chosen, routing.float(), *weights, **form, **wide)
        assert relative_error(actual, expected) < 1e-2


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("tokens", "top"), [(1, 1), (1, 3), (1, 8), (5, 3), (33, 2)])
def test_a_mixture_of_bytes_is_that_of_plain_torch(
    tokens: int, top: int, blocks: bool, gated: bool
) -> None:
    """Eight-bit floats with scales of rows or of blocks; blocks that two parts share have another kernel."""
    seeded()
    for inner in (256, 192):
        experts, hidden, rows = 9, 384, inner * (2 if gated else 1)
        stacks = (experts, rows, hidden), (experts, hidden, inner)
        codes = [torch.randint(0, 120, shape, device="cuda", dtype=torch.uint8) for shape in stacks]
        parts = (2 if gated else 1, 1)
        scales = [
            torch.rand(
                (experts, part * -(-shape[1] // part // 128), -(-shape[2] // 128)) if blocks else shape[:2],
                device="cuda",
            ) * 1e-2
            for shape, part in zip(stacks, parts, strict=True)
        ]  # fmt: skip
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        chosen = _chosen(tokens, top, experts)
        routing = torch.rand(tokens, top, device="cuda")
        name = "finegrained_fp8" if blocks else "fp8"
        weights = (*(each.view(torch.float8_e4m3fn) for each in codes), *scales, gated, "silu")
        actual = getattr(ops, f"triton_{name}_moe")(x, chosen, routing, *weights)
        expected = getattr(ops, f"torch_{name}_moe")(x.float(), chosen, routing, *weights)
        assert relative_error(actual, expected) < 1e-2, inner


@pytest.mark.parametrize("inputs", [2880, 8192])
def test_programs_that_share_a_block_s_inputs_find_its_experts(inputs: int) -> None:
    """Large inputs are divided; programs begin in the middle of a block, and go on to the next."""
    seeded()
    tokens, experts, top, inner = 64, 24, 4, 520
    up = _words("int4", 128, (experts, 2 * inner, inputs), torch.bfloat16, zeros=True)
    down = _words("int4", 128, (experts, inputs, inner), torch.bfloat16)
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    chosen, routing = _chosen(tokens, top, experts), torch.rand(tokens, top, device="cuda")
    weights = (up.values, down.values, up.scale, down.scale, up.zero, None, None, None)
    assert moe.takes(x, chosen, routing, _weight(up), _weight(down), SILU)
    actual = ops.triton_int4_moe(x, chosen, routing, *weights)
    expected = ops.torch_int4_moe(x.float(), chosen, routing, *weights)
    assert relative_error(actual, expected) < 1e-2


@pytest.mark.parametrize("tokens", [12, 40])
@pytest.mark.parametrize("largest", [127, 255])
def test_scales_of_all_sizes_are_powers_of_two(largest: int, tokens: int) -> None:
    """From 2^-110 to 1, or to 2^100, of each output its own: each has the error of its own size."""
    seeded()
    experts, outputs, inputs, top = 5, 700, 352, 2
    words = _words("e2m1", 32, (experts, outputs, inputs), torch.uint8)
    exponents = torch.randint(17, min(largest, 227) + 1, (experts, outputs, 1), device="cuda")
    words.scale.copy_(exponents.to(torch.uint8).expand_as(words.scale))
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    chosen = _chosen(tokens, top, experts)
    for columns in (8, 16):
        routed = route(chosen, experts, columns)
        assert routed.order is not None
        blocks = few.Blocks(routed.blocks, routed.order, experts, top)
        actual = few.product_of_blocks(
            x, words, few.Around(), blocks, columns, few.Tiles(1, 16, batch=2, resident=1, ring=3)
        )
        pairs = routed.order.long()
        expert = chosen.flatten()[pairs]
        expected = (_values(words, inputs)[expert] @ x[pairs // top].double()[..., None])[..., 0]
        own = torch.exp2(exponents[expert, :, 0].double() - 127)
        assert relative_error(actual.double() / own, expected / own) < 5e-3


SILU = Activation(True, "silu", None, None, 0.0)


def _weight(words: Words) -> Weight:
    return Weight(
        words.values, words.bias, words.scale, None, words.levels, words.group, words.zero
    )
