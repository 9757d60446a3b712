"""Bounds of scores that change none of them, and GPUs that code names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Mask
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

BOUNDED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.size, 3 * config.size)

    def forward(self, x, mask):
        b, s, size = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.4
        scores = scores + mask
        lowest = torch.finfo(scores.dtype).min
        scores = BOUND
        out = torch.matmul(nn.functional.softmax(scores, dim=-1), v)
        return out.transpose(1, 2).reshape(b, s, size)
"""


@pytest.mark.parametrize(
    "bound",
    [
        "torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))",
        "torch.maximum(scores, torch.tensor(lowest, device=scores.device, dtype=scores.dtype))",
        "torch.max(scores, torch.tensor(-torch.finfo(scores.dtype).max).to(x.device))",
        "torch.clamp(scores, min=torch.finfo(scores.dtype).min)",
        "scores.clamp(min=lowest)",
        "scores.clamp_min(-1e9)",
        "scores.clip(-65504.0)",
        "scores.clip(lowest, torch.finfo(scores.dtype).max)",
        "torch.clamp(scores, min=-torch.finfo(x.dtype).max, max=torch.finfo(x.dtype).max)",
    ],
)
def test_scores_that_may_not_be_below_the_least_number_are_as_they_were(
    bound: str, translate: Translate
) -> None:
    text, fields = BOUNDED.replace("BOUND", bound), {"heads": 2, "size": 12}
    state, _, forward = translate(text, fields, specialised=True, mask=Mask())
    assert "torch_attention" in forward
    assert not any(word in forward for word in ("max", "clamp", "clip", "finfo"))
    original, ours = _made(text, fields), _made(_written(state), fields)
    ours.load_state_dict(original.state_dict())
    length = random.randint(2, 9)
    x, later = torch.randn(2, length, 12), torch.ones(length, length, dtype=torch.bool).triu(1)
    expected = original(x, torch.zeros(length, length).masked_fill(later, -torch.inf))
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "bound",
    [
        "torch.max(scores, torch.tensor(-2.0))",
        "torch.maximum(scores, x.min())",
        "scores.clamp(min=-80.0)",
        "scores.clamp(min=lowest, max=50.0)",
        "torch.clamp(scores, max=30.0)",
        "scores.clip(lowest, torch.finfo(scores.dtype).eps)",
        "scores.clip(lowest, torch.finfo(torch.float16).max)",
        "scores.clip(lowest, -lowest / 1e37)",
    ],
)
def test_bounds_that_scores_may_reach_are_not_left_out(bound: str, translate: Translate) -> None:
    text, fields = BOUNDED.replace("BOUND", bound), {"heads": 2, "size": 12}
    with pytest.raises(Untranslatable, match="read once they are masked|whose scores have bounds"):
        translate(text, fields, specialised=True, mask=Mask())


@pytest.mark.parametrize("bound", ["scores.clamp(-5.0, 5.0)", "torch.clip(scores, -5.0, 5.0)"])
def test_bounds_of_scores_that_are_not_masked_yet_are_named(
    bound: str, translate: Translate
) -> None:
    text = BOUNDED.replace("BOUND", "scores")
    first = text.index("scores = ")
    line = text[first : text.index("\n", first)]
    text = text.replace(line, f"{line}\n        scores = {bound}", 1)
    with pytest.raises(Untranslatable, match="attention whose scores have bounds"):
        translate(text, {"heads": 2, "size": 12}, specialised=True, mask=Mask())


NAMED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size, device=torch.cuda.current_device())

    def forward(self, x):
        x = x.cuda() + torch.full((1, 1), 2.0, device=torch.device("cuda:0"))
        ones = torch.ones(1, device="cuda").to(torch.float64)
        half = torch.tensor([0.5]).to("cuda", torch.float64)
        two = torch.zeros(1).cuda() + 2
        more = torch.ones(1, 1, device=torch.cuda.current_device())
        return self.inner(x.to("cuda")).to("cuda:0") * ones.to(x.dtype) + half.to(x.dtype) * two * more
"""


def test_what_is_put_on_a_gpu_by_its_name_is_where_the_input_is(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    state, _, forward = translate(NAMED, {"size": 4}, specialised=True)
    assert "cuda" not in forward
    assert forward.count("device=x.device") == 5
    ours = _made(_written(state).replace("device=torch.cuda.current_device()", ""), {"size": 4})
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(ours(x), ours.inner(x + 2) + 1)


ROOTED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.size, 3 * config.size)
        root = torch.sqrt(torch.tensor(config.size // config.heads, dtype=torch.float32))
        self.register_buffer("root", root.to(torch.get_default_dtype()), persistent=KEPT)

    def forward(self, x, mask):
        b, s, size = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = q.reshape(b * self.heads, s, -1), k.reshape(b * self.heads, s, -1)
        scores = torch.zeros(b * self.heads, s, s, dtype=q.dtype, device=k.device)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=ALPHA)
        scores = scores.view(b, self.heads, s, s) + mask
        out = torch.matmul(nn.functional.softmax(scores, dim=-1), v)
        return out.transpose(1, 2).reshape(b, s, size)
"""
_ALPHA = "(torch.tensor(1.0, dtype=self.root.dtype, device=self.root.device) / self.root)"


def test_a_scale_in_a_buffer_apart_from_the_checkpoint_is_a_number(translate: Translate) -> None:
    text = ROOTED.replace("ALPHA", _ALPHA).replace("KEPT", "False")
    fields = {"heads": 2, "size": 12}
    state, init, forward = translate(text, fields, specialised=True, mask=Mask())
    assert "self.root = float(" in init
    assert "1.0 / self.root" in forward
    original, ours = _made(text, fields), _made(_written(state), fields)
    ours.load_state_dict(original.state_dict())
    length = random.randint(2, 9)
    x, later = torch.randn(2, length, 12), torch.ones(length, length, dtype=torch.bool).triu(1)
    expected = original(x, torch.zeros(length, length).masked_fill(later, -torch.inf))
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-6)


def test_a_scale_of_the_checkpoint_stays_a_tensor(translate: Translate) -> None:
    text = ROOTED.replace("ALPHA", _ALPHA).replace("KEPT", "True")
    state, init, _ = translate(text, {"heads": 2, "size": 12}, specialised=True, mask=Mask())
    assert "float(" not in init
