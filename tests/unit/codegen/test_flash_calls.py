"""Calls of flash_attn's function become the canonical op, which gives what that gives."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401  # registers the canonical ops
from onboard.hf.old import attention_forms
from onboard.hf.old.attention_forms import flash_attn_func
from onboard.hf.old.layers.kernel_casts import without_kernel_assertions
from onboard.verify.error import rmse_ratio
from tests.support.odd_code import GENERATE, run_apart, save_odd

Translate = Callable[..., tuple[Any, str, str]]
TOY = """
from onboard.hf.old.attention_forms import flash_attn_func


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wide = -1

    def forward(self, x):
        q, k = x, x[:, :, :2]
        return flash_attn_func(q, k, k + 1, {arguments})
"""
OP = "torch_attention"


def _translated(translate: Translate, arguments: str) -> str:
    _, _, forward = translate(TOY.format(arguments=arguments), {}, specialised=True)
    return forward


@pytest.mark.parametrize(
    "arguments",
    [
        "causal=True",
        "0.0, None, True",
        "dropout_p=0.1 if self.training else 0.0, softmax_scale=0.3, causal=True",
        "causal=True, window_size=(3, 0), deterministic=True",
        "causal=True, window_size=(self.wide, self.wide)",
        "causal=True, softcap=0.5",
        "softmax_scale=0.7 / torch.full([], q.shape[-1] ** 0.3), causal=True",
        "causal=q.shape[1] > 1",
    ],
)
def test_causal_attention_is_the_canonical_op(arguments: str, translate: Translate) -> None:
    forward = _translated(translate, arguments)
    assert OP in forward
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    for length in (1, 9):
        x = torch.randn(2, length, 4, 8, generator=generator)
        names: dict[str, Any] = {"x": x, "torch": torch}
        exec("\n".join(forward.replace("return ", "ours = ").splitlines()), names)
        given = arguments.replace("self.training", "False").replace("self.wide", "-1")
        expected = eval(
            f"attend(q, k, k + 1, {given})",
            {"q": x, "k": x[:, :, :2], "attend": flash_attn_func, "torch": torch},
        )
        assert rmse_ratio(names["ours"], expected) < 1e-6


@pytest.mark.parametrize(
    "arguments",
    ["causal=False", "", "causal=True, alibi_slopes=x[0, 0, :, 0]", "causal=x.sum() > 0"],
)
def test_other_attention_stays_as_it_is_written(arguments: str, translate: Translate) -> None:
    assert OP not in _translated(translate, arguments)


EFFICIENT = """
from onboard.hf.old.attention_forms import LowerTriangularMask, memory_efficient_attention


def made(x):
    length = x.shape[1]
    return torch.full((1, 1, length, length), -1e9).triu(1)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        mask = made(x)
        return memory_efficient_attention(x, x + 1, x - 1, {arguments})
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "attn_bias=LowerTriangularMask()",
        "LowerTriangularMask(), 0.0, 0.3",
        "mask, scale=0.7",
        "attn_bias=None if mask.sum() == 0 else LowerTriangularMask()",
        "LowerTriangularMask() if mask.sum() != 0 else None",
    ],
)
def test_attention_of_xformers_under_its_causal_mask_is_the_op(
    arguments: str, translate: Translate
) -> None:
    text = EFFICIENT.format(arguments=arguments)
    _, _, forward = translate(text, {}, specialised=True, masks={"made": ["added"]})
    assert OP in forward
    assert "xformers" not in forward
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    for length in (1, 9):
        x = torch.randn(2, length, 4, 8, generator=generator)
        names: dict[str, Any] = {"x": x, "torch": torch}
        exec(forward.replace("return ", "ours = "), names)
        mask = torch.full((1, 1, length, length), -1e9).triu(1)
        given = vars(attention_forms) | {"x": x, "mask": mask}
        expected = eval(f"memory_efficient_attention(x, x + 1, x - 1, {arguments})", given)
        assert rmse_ratio(names["ours"], expected) < 1e-6


@pytest.mark.parametrize("arguments", ["None", "x[0, 0, :, 0]", "scale=0.3"])
def test_attention_of_xformers_under_no_causal_mask_stays(
    arguments: str, translate: Translate
) -> None:
    text = EFFICIENT.format(arguments=arguments)
    assert OP not in translate(text, {}, specialised=True, masks={"made": ["added"]})[2]


ODD = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
y = flash_attn_func(q=q.to(torch.bfloat16), k=k.to(torch.bfloat16), v=v.to(torch.bfloat16), causal=True)
return self.out(y.to(x.dtype).reshape(b, t, -1))
"""
KEPT = ODD.replace("k=k.to(torch.bfloat16)", "k=(2 * k.to(torch.bfloat16))")


def test_casts_that_kernels_need_are_left_out_and_said(tmp_path: Path) -> None:
    """Those of a tensor that the code goes on with are no such casts: attention in bfloat16 is that."""
    head = "from flash_attn import flash_attn_func\n"
    folders = [
        save_odd(tmp_path / name, head=head, attention=body)
        for name, body in (("odd_kernel_casts", ODD), ("odd_halved_keys", KEPT))
    ]
    found = run_apart(GENERATE, folders)
    made = found["odd_kernel_casts"]
    assert "error" not in made, made
    assert "torch_attention(" in made["text"]
    assert "bfloat16" not in made["text"]
    assert made["worst"] < 1e-6
    assert not made["recorded"]
    assert any("keeps the model's dtype" in fact for fact in made["facts"])
    other = found["odd_halved_keys"]
    assert "nan_to_num" not in str(other)
    assert "keeps the model's dtype" not in str(other)


ASSERTED = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
assert all((i.dtype in [torch.float16, torch.bfloat16] for i in (q, k, v))), "for its kernels"
assert all(i.is_cuda for i in (q, k, v))
return self.out(flash_attn_func(q, k, v, causal=True).reshape(b, t, -1))
"""
LENGTHS = ASSERTED.replace("i.is_cuda for i", "i.shape[1] > 99 for i")


def test_what_kernels_alone_ask_for_is_left_out_and_said(tmp_path: Path) -> None:
    head = "from flash_attn import flash_attn_func\n"
    bodies = {"odd_asserted": ASSERTED, "odd_lengths": LENGTHS}
    folders = [save_odd(tmp_path / key, head=head, attention=body) for key, body in bodies.items()]
    found = run_apart(GENERATE, folders)
    made = found["odd_asserted"]
    assert "error" not in made, made
    assert "torch_attention(" in made["text"]
    assert made["worst"] < 1e-6
    assert any("asserts what the kernels" in fact for fact in made["facts"])
    assert "AssertionError" in found["odd_lengths"]["error"]


@pytest.mark.parametrize(
    ("test", "is_left_out"),
    [
        ("q.is_cuda and k.is_cuda", True),
        ("all([i.dtype in (torch.half, torch.bfloat16) for i in (q, k)])", True),
        ("q.dtype in [torch.float16, torch.float32]", False),
        ("q.is_cuda or q.shape[1] > 1", False),
        ("all(i.shape[1] > 1 for i in (q, k))", False),
        ("q.dtype == k.dtype", False),
    ],
)
def test_other_assertions_stay(test: str, is_left_out: bool) -> None:
    text = f"from flash_attn import flash_attn_varlen_func as attend\nassert {test}, 1\n"
    tree, whole = ast.parse(text), ast.unparse(ast.parse(text))
    assert without_kernel_assertions(tree) == is_left_out
    assert ast.unparse(tree).endswith("assert True") if is_left_out else ast.unparse(tree) == whole
    assert not without_kernel_assertions(ast.parse(f"assert {test}"))  # whose kernels?
