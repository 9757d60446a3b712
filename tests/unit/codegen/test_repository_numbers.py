"""What code of repositories computes of the config, or of the text's length, in small modules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import TOO_LONG, Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

SLOPES = """
def slopes_of(heads):
    def of_power(count):
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]
    if math.log2(heads).is_integer():
        return of_power(heads)
    nearest = 2 ** math.floor(math.log2(heads))
    return of_power(nearest) + slopes_of(2 * nearest)[0::2][: heads - nearest]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads

    def forward(self, x):
        return x * torch.Tensor(slopes_of(self.heads))
"""
LENGTH = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.length = config.length
        self.known = 1.0

    def forward(self, x):
        length = x.size()[1]
        if length == x.size()[1] and not self.training:
            power = math.log(LENGTH, 2) + 1
            alpha = max(2 ** math.ceil(power) - 1, 1)
            self.known = alpha
        else:
            alpha = self.known
        return x * alpha
"""
LOGN = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.Tensor([math.log(i, 4) if i > 4 else 1 for i in range(1, config.most)])[None, :]

    def forward(self, x):
        if self.table.device != x.device or self.table.dtype != x.dtype:
            self.table = self.table.to(x.device).type_as(x)
        return x * self.table[:, :7]
"""


def test_slopes_that_a_recursion_gives_are_written_as_their_formula(translate: Translate) -> None:
    config = {"heads": random.randint(1, 128)}
    print(config)
    state, _, forward = translate(SLOPES, {"heads": 4}, specialised=True)
    assert "slopes_of" not in forward
    x = torch.randn(2, config["heads"])
    assert torch.allclose(_made(_written(state), config)(x), _made(SLOPES, config)(x), rtol=1e-6)


def test_a_recursion_that_gives_something_else_is_refused(translate: Translate) -> None:
    other = SLOPES.replace("[0::2]", "[1::2]")
    with pytest.raises(Untranslatable, match="calls itself"):
        translate(other, {"heads": 6}, specialised=True)


def test_a_number_of_the_texts_length_is_its_constant_up_to_what_the_config_says(
    translate: Translate,
) -> None:
    text = LENGTH.replace("LENGTH", "length / self.length")
    longest = random.randint(5, 40)
    print(longest)
    state, _, _ = translate(text, {"length": 16}, specialised=True)
    ours, theirs = _made(_written(state), {"length": longest}), _made(text, {"length": longest})
    theirs.eval()
    x = torch.randn(1, longest + 1)
    assert torch.equal(ours(x[:, :-1]), theirs(x[:, :-1]))
    assert not torch.equal(theirs(x), x)
    with pytest.raises(AssertionError, match=TOO_LONG):
        ours(x)


def test_a_number_of_the_texts_length_that_no_config_bounds_is_refused(
    translate: Translate,
) -> None:
    with pytest.raises(Untranslatable, match="depends on the text's length"):
        translate(LENGTH.replace("LENGTH", "length / 7.5"), {"length": 16}, specialised=True)


def test_a_tensor_that_a_constructor_keeps_is_a_buffer_and_cast_as_it_is_used(
    translate: Translate,
) -> None:
    state, init, _ = translate(LOGN, {"most": 64}, specialised=True)
    assert "register_buffer('table'" in init.replace('"', "'")
    x = torch.randn(2, 7, dtype=torch.bfloat16)
    ours, theirs = _made(_written(state), {"most": 64}), _made(LOGN, {"most": 64})
    assert ours(x).dtype is torch.bfloat16
    assert torch.equal(ours(x), theirs(x))


POWER = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.power = 1.0 if config.by_size else 0.5

    def forward(self, x):
        scores = torch.matmul(x[:, None], x[:, None].transpose(-1, -2))
        scores = scores / torch.full([], x.size(SIZE) ** self.power, dtype=x.dtype)
        scores = scores + torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        return torch.matmul(nn.functional.softmax(scores, dim=-1), x[:, None])
"""


def test_a_scale_that_is_a_power_of_the_heads_size_is_attentions(translate: Translate) -> None:
    text, config = POWER.replace("SIZE", "-1"), {"by_size": True}
    state, _, forward = translate(text, config, specialised=True)
    assert "1.0 / x.size(-1) ** self.power" in forward
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(_made(_written(state), config)(x), _made(text, config)(x))


def test_a_scale_of_the_texts_length_is_none_of_attentions(translate: Translate) -> None:
    _, _, forward = translate(POWER.replace("SIZE", "1"), {"by_size": True}, specialised=True)
    assert "torch_attention" not in forward


MASKED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        q, k = x[:, None], x[:, None] * self.factor
        hidden = torch.full((q.shape[2], k.shape[2]), -10000.0, device=x.device)
        offset = k.shape[2] - q.shape[2]
        scores = torch.matmul(q, k.transpose(-1, -2)) + torch.triu(hidden, DIAGONAL)
        return torch.matmul(nn.functional.softmax(scores, dim=-1), k)
"""


@pytest.mark.parametrize(
    ("diagonal", "is_causal"),
    [
        ("offset + 1", True),
        ("diagonal=1 + k.shape[2] - q.shape[2]", True),
        ("offset", False),
        ("q.shape[2] - k.shape[2] + 1", False),
        ("k.shape[2] + 1", False),
    ],
)
def test_keys_after_the_last_queries_are_hidden_by_a_mask_that_says_so(
    diagonal: str, is_causal: bool, translate: Translate
) -> None:
    text, config = MASKED.replace("DIAGONAL", diagonal), {"factor": 2}
    state, _, forward = translate(text, config, specialised=True)
    assert ("torch_attention" in forward) == is_causal
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(_made(_written(state), config)(x), _made(text, config)(x))
