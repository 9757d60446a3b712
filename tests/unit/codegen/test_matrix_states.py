"""RWKV 5 and 6: functions that are gated linear attention, and states that the model makes of zeros
for its layers, from modeling code to the op that has a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.analysis.recognise.mixers import probe_scan
from onboard.analysis.recognise.recorder import HelperCall
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.conftest import Translate

HELPER = """
def mixed(training, receptance, key, value, time_decay, time_first, state):
    sizes = (*receptance.shape[:2], *time_first.shape)
    r, k, v = (x.float().view(sizes) for x in (receptance, key, value))
    decay = torch.exp(-torch.exp(time_decay.float())).SEEN(sizes)
    out = []
    for t in range(sizes[1]):
        pair = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        read = state + time_first.float().unsqueeze(-1) * pair
        state = pair + decay[:, t].unsqueeze(-1) * state
        out.append((r[:, t].unsqueeze(-2) @ read).squeeze(-2))
    return torch.stack(out, 1), state
"""
OF_TOKENS, OF_CHANNELS = HELPER.replace("SEEN", "view"), HELPER.replace("SEEN", "expand")
HEADS, SIZE = 3, 4


def _call(text: str, of_tokens: bool, **others: Any) -> HelperCall:
    print("seed", seed := random.getrandbits(20))
    torch.manual_seed(seed)
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    tensors = dict(zip(("receptance", "key", "value"), torch.randn(3, 2, 11, 12), strict=True))
    decay = torch.randn(2, 11, 12) if of_tokens else torch.randn(HEADS, SIZE)
    rest = {"time_decay": decay, "time_first": torch.randn(HEADS, SIZE)}
    state = torch.randn(2, HEADS, SIZE, SIZE)  # what the model has left there since
    function: Callable[..., Any] = names["mixed"]
    return HelperCall(
        "mixed", function, {"training": False, **tensors, **rest, "state": state, **others}
    )


@pytest.mark.parametrize(("text", "of_tokens"), [(OF_TOKENS, True), (OF_CHANNELS, False)])
def test_both_ways_of_calling_it_are_the_op(text: str, of_tokens: bool) -> None:
    found = probe_scan(_call(text, of_tokens))
    assert found is not None
    way = {} if of_tokens else {"way": 1}
    assert (found.kind, found.parameters) == ("scan", {"op": "torch_gated_linear_attention"} | way)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("read = state +", "read = 0.9 * state +"),
        ("decay[:, t].unsqueeze(-1) * state", "decay[:, t].unsqueeze(-1) * read"),
        ("-torch.exp(time_decay.float())", "-torch.nn.functional.softplus(time_decay)"),
        ("r, k, v =", "k, r, v ="),
    ],
)
def test_another_recurrence_is_not(right: str, wrong: str) -> None:
    assert right in OF_TOKENS
    assert probe_scan(_call(OF_TOKENS.replace(right, wrong), True)) is None


def test_a_call_with_another_argument_is_not() -> None:
    assert probe_scan(_call(OF_TOKENS, True, training=False, scale=0.5)) is None


ATTENTION = """
b, t, c = x.shape
if t == 1 and state is not None:
    shifted = state[0][:, :, index]
else:
    shifted = F.pad(x, (0, 0, 1, -1))
    if state is not None:
        shifted[:, 0] = state[0][:, :, index]
if len(shifted.size()) == 2:
    shifted = shifted.unsqueeze(1)
r, k, v = self.qkv(x + (shifted - x) * self.first.flatten()).chunk(3, dim=-1)
if state is not None:
    state[0][:, :, index] = x[:, -1]
own = state[1][..., index] if state is not None else None
y, own = mixed(self.training, r, k, v, self.decay(shifted), self.first, own)
if own is not None:
    state[1][..., index] = own
return self.out(y.reshape(b, t, c).to(x.dtype)), state
"""
BLOCK = """
y, state = self.attn(self.norm1(x), position_ids, state, self.index)
x = x + y
return x + self.mlp(self.norm2(x)), state
"""
MODEL = """
x = self.embed(input_ids)
if state is None:
    layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
    size = self.config.hidden_size // heads
    state = []
    last = torch.zeros((x.shape[0], x.shape[2], layers), dtype=x.dtype, device=x.device)
    state.append(last)
    state.append(x.new_zeros(x.shape[0], heads, size, size, layers).contiguous())
for layer in self.layers:
    x, state = layer(x, position_ids, state)
return self.norm(x)
"""
PARTS = """self.first = nn.Parameter(torch.ones(self.heads, self.size))
        self.decay = nn.Linear(config.hidden_size, config.hidden_size)
        self.theta ="""


def _saved(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write code and config of a model of such layers, changed so."""
    bodies = {"head": OF_TOKENS, "attention": ATTENTION, "block": BLOCK, "model": MODEL}
    file = save_odd(folder, **bodies) / "modeling_odd.py"
    text = file.read_text()
    for old, new in (
        ("self, x, position_ids):", "self, x, position_ids, state=None, index=0):"),
        (
            "self, input_ids, position_ids=None):",
            "self, input_ids, position_ids=None, state=None):",
        ),
        ("self.theta =", PARTS),
        *changes,
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    return folder


@pytest.mark.slow
def test_states_that_the_model_makes_of_zeros_are_left_to_the_cache(tmp_path: Path) -> None:
    """Zeros alone, and where layers compute the same without any."""
    zeros = "x.new_zeros(x.shape[0]"
    folders = [
        _saved(tmp_path / "odd_states"),
        _saved(tmp_path / "odd_ones", (zeros, zeros.replace("zeros", "ones"))),
        _saved(
            tmp_path / "odd_asks", ("y.reshape(b, t, c)", "(2 if state else 1) * y.view(x.shape)")
        ),
    ]
    found = run_apart(GENERATE, folders)
    made = found.pop("odd_states")
    assert made.get("worst", 1.0) < 1e-5, made
    assert "torch_gated_linear_attention(" in made["text"]
    assert "torch_token_shift(" in made["text"]
    assert made["recorded"] == []
    assert not any(word in made["text"] for word in ("state[", "index", "unsqueeze"))
    for name, other in found.items():
        assert "error" in other, (name, other)


TOY = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, state=None):
        if state is None:
            MADE
        return x if state is None else x + state[0].sum() + 2
"""
ZEROS = [
    "one = 2; one = x.new_zeros(self.size); state = [one]",
    "state = [torch.zeros(self.size).to(x.dtype) for _ in range(3)]",
    "one = torch.zeros_like(x); state = (one, one.float())",
    "size, other = self.size, 2; state = []; state.append(torch.zeros(size))",
]


@pytest.mark.parametrize("made", ZEROS)
def test_zeros_are_not_made(made: str, translate: Translate) -> None:
    _, _, forward = translate(TOY.replace("MADE", made), {"size": 3}, specialised=True)
    assert forward == "return x"


@pytest.mark.parametrize(
    "made",
    [
        "state = [torch.ones(self.size)]",
        "one = torch.zeros(2); one = torch.ones(2); state = [one]",
        "one = torch.zeros(2); one, two = torch.ones(2, 2); state = [one]",
        "state = torch.zeros(self.size)",
        "state = [torch.zeros(self.size), torch.full((2,), -1e38)]",
        "state = [torch.zeros(self.size)]; state[0] -= 1e30",
        "state = [torch.zeros(self.size)]; x = x.relu(); state.append(x)",
    ],
)
def test_other_states_are(made: str, translate: Translate) -> None:
    """Or they are refused."""
    try:
        _, _, forward = translate(TOY.replace("MADE", made), {"size": 3}, specialised=True)
    except Untranslatable:
        return
    assert "+ 2" in forward
