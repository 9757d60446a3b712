"""Code of models whose layers differ: attention here, a recurrence there."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.verify.error import rmse_ratio
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

TABLE = """
from onboard.hf.old.fla.linear_attention_forms import chunk_simple_gla
from onboard.hf.old.fla.linear_attention_forms import chunk_simple_gla as fused


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        slopes = -Toy.slopes(self.heads) * (1 + config.heads)
        self.register_buffer("slope", slopes, persistent=False)
        self.ways = {"chunk": chunk_simple_gla, "fused": fused}

    @staticmethod
    def slopes(heads):
        def of(n):
            def of_power(n):
                first = 2 ** (-(2 ** -(math.log2(n) - 3)))
                return [first * first**i for i in range(n)]

            if math.log2(n).is_integer():
                return of_power(n)
            nearest = 2 ** math.floor(math.log2(n))
            return of_power(nearest) + of(2 * nearest)[0::2][: n - nearest]

        return torch.tensor(of(heads), dtype=torch.float)

    def forward(self, x):
        b, s, _ = x.shape
        way = "fused" if s <= 64 else "chunk"
        q = x.view(b, s, self.heads, -1)
        g = self.slope[None, None, :].expand(b, s, self.heads)
        out, state = self.ways[way](q=q, k=q, v=q, g=g, head_first=False)
        gate = x * 2
        return out.flatten(2) * torch.sigmoid_(gate) + gate
"""


@pytest.mark.parametrize("heads", [3, 4])
def test_a_table_of_kernels_that_compute_the_same_is_the_op(
    heads: int, translate: Translate
) -> None:
    state, init, forward = translate(TABLE, {"heads": heads}, specialised=True)
    assert "torch_lightning_attention(" in forward
    assert "ways" not in init + forward
    assert "sigmoid_" not in forward
    x = torch.randn(2, 9, heads * 4, generator=torch.Generator().manual_seed(5))
    original, ours = _made(TABLE, {"heads": heads}), _made(_written(state), {"heads": heads})
    torch.testing.assert_close(ours.slope, original.slope)
    assert rmse_ratio(ours(x), original(x)) < 1e-5


EITHER_WAY = """
from onboard.hf.old.fla.linear_attention_forms import chunk_delta_rule


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        q = x.unsqueeze(2) * self.factor
        how = {"output_final_state": True, "head_first": False}
        if x.shape[1] < 64:
            out, state = chunk_delta_rule(q, q, q, q[..., 0].sigmoid(), **how)
        else:
            out, state = chunk_delta_rule(q, q, q, q[..., 0].sigmoid(), **how)
        return out.squeeze(2)READ
"""


def test_a_state_that_both_ways_leave_is_not_read(translate: Translate) -> None:
    text = EITHER_WAY.replace("READ", "")
    config = {"factor": 0.3}
    state, _, _ = translate(text, config, specialised=True)
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(5))
    assert rmse_ratio(_made(_written(state), config)(x), _made(text, config)(x)) < 1e-5
    with pytest.raises(Untranslatable, match="the state that chunk_delta_rule leaves"):
        translate(EITHER_WAY.replace("READ", " + state.sum()"), config, specialised=True)


MASKED = """
def causal(x):
    return torch.full((1, 1, x.shape[1], x.shape[1]), -1e9).triu(1)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.full = config.full

    def forward(self, x):
        mask = causal(x)
        if not self.full:
            if mask is None:
                mask = torch.ones(x.shape[:2])
            elif mask.dim() == 4 and mask.shape[1] == 1:
                mask = mask[:, 0, -1, :].to(torch.float32)
                mask = (mask > -1e4).to(torch.int32)
            else:
                raise ValueError(mask.shape)
            x = x * 2
        return xREAD
"""


def test_the_last_row_of_a_mask_hides_nothing(translate: Translate) -> None:
    masks = {"causal": ["added"]}
    text = MASKED.replace("READ", "")
    state, _, forward = translate(text, {"full": False}, specialised=True, masks=masks)
    assert "mask" not in forward
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(_made(_written(state), {"full": False})(x), 2 * x)
    text = MASKED.replace("READ", " * mask.sum()")
    with pytest.raises(Untranslatable):
        translate(text, {"full": True}, specialised=True, masks=masks)


APART = """
class Attends(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        y = self.proj(x)
        return y.relu(), y, None


class Recurs(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.proj(x).tanh(), None, None


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.mixer = Attends(config) if index % 2 else Recurs(config)

    def forward(self, x):
        y, weights, cache = self.mixer(x)
        return (x + y, weights, cache)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x
"""


def test_what_layers_give_besides_is_taken_apart_by_class(translate: Translate) -> None:
    config = {"size": 4}
    state, _, _ = translate(APART, config, specialised=True)
    own = {cls.__name__: each for cls, each in state.translator.states.items()}
    written = "\n\n\n".join(_written(own[name]) for name in ("Attends", "Recurs", "Layer"))
    ours, original = _made(f"{written}\n\n\n{_written(state)}", config), _made(APART, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours(x), original(x))


ABSENT = """
class Dense(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.proj(x)


class Routed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Dense(config)

    def forward(self, x, starts, ends):
        y = self.inner(x)
        return y.tanh(), y if starts is None else y[starts:ends]


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.mlp = Routed(config) if index >= config.dense else Dense(config)

    def forward(self, x, starts=None, ends=None):
        y = self.mlp(x, starts, ends)
        if isinstance(y, tuple):
            y, scores = y
        return x + y


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_a_class_of_no_layer_may_take_other_arguments(translate: Translate) -> None:
    config = {"size": 4, "dense": 0}
    state, _, _ = translate(ABSENT, config, specialised=True)
    own = {cls.__name__: each for cls, each in state.translator.states.items()}
    assert [ast.unparse(item) for item in own["Layer"].guards] == ["isinstance(self.mlp, Routed)"]
    written = "\n\n\n".join(_written(own[name]) for name in ("Dense", "Routed", "Layer"))
    ours, original = _made(f"{written}\n\n\n{_written(state)}", config), _made(ABSENT, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours(x), original(x))
    with pytest.raises(Untranslatable, match="too many arguments"):
        translate(ABSENT, {"size": 4, "dense": 1}, specialised=True)


GATED = """
from onboard.hf.old.fla.kda_gates import fused_kda_gate
from onboard.hf.old.fla.linear_attention_forms import chunk_kda


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.A_log = nn.Parameter(torch.tensor(config.rates))
        self.dt_bias = nn.Parameter(torch.tensor(config.biases))

    def forward(self, x):
        q = x.unflatten(-1, (2, -1))
        how = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
        gates = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        out, state = chunk_kda(q=q, k=q, v=q, g=q, beta=q[..., 0].sigmoid(), GATED, **how)
        return out.flatten(2)
"""


def test_gates_that_a_kernel_makes_decays_of_are_those_made_before(translate: Translate) -> None:
    config = {"rates": [0.3, -0.7], "biases": [0.1, 0.4, -0.2, 0.3, 0.9, -0.5, 0.2, 0.6]}
    inside = GATED.replace("GATED", "use_gate_in_kernel=True, **gates")
    before = GATED.replace("g=q", "g=fused_kda_gate(q, **gates)").replace(" GATED,", "")
    state, _, forward = translate(inside, config, specialised=True)
    assert "torch_kda(" in forward
    print("seed", seed := int(torch.seed() % 2**31))
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(seed))
    helper = """
from onboard.hf.old.fla import kda_gates

def fused_kda_gate(g, A_log, dt_bias):
    return kda_gates.fused_kda_gate(g, A_log, dt_bias=dt_bias)

"""
    texts = (helper + _written(state), inside, before)
    ours, original, other = (_made(text, config) for text in texts)
    assert rmse_ratio(original(x), other(x)) < 1e-6
    assert rmse_ratio(ours(x), original(x)) < 1e-5


ONE_BY_A_VARIABLE = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        g = x + 1
        h = x
        if x.shape[1] <= 64:
            o = torch.tanh(g * self.factor)
        else:
            g = g * self.factor
            o = torch.tanh(g)
        ELSE
        return o
"""


def test_sides_that_compute_the_same_are_one(translate: Translate) -> None:
    config = {"factor": 0.3}
    text = ONE_BY_A_VARIABLE.replace("ELSE", "g = o + 1; o = o * g")
    state, _, forward = translate(text, config, specialised=True)
    assert "if " not in forward
    print("seed", seed := int(torch.seed() % 2**31))
    x = torch.randn(2, 70, 8, generator=torch.Generator().manual_seed(seed))
    for length in (9, 70):
        ours, theirs = (_made(t, config)(x[:, :length]) for t in (_written(state), text))
        torch.testing.assert_close(ours, theirs)
    other = text.replace("g = g * self.factor", "g = g * self.factor * 2")
    assert "if " in translate(other, config, specialised=True)[2]
    read = text.replace("g = o + 1; ", "")
    state, _, forward = translate(read, config, specialised=True)
    assert "if " in forward
    for length in (9, 70):
        ours, theirs = (_made(t, config)(x[:, :length]) for t in (_written(state), read))
        torch.testing.assert_close(ours, theirs)


def test_sides_are_not_one_where_another_name_is_read_behind(translate: Translate) -> None:
    config = {"factor": 0.3}
    text = ONE_BY_A_VARIABLE.replace("            o =", "            h = g; o =")
    text = text.replace("o = torch.tanh(g)", "h = g; o = torch.tanh(g)").replace(
        "ELSE", "o = o * h"
    )
    state, _, forward = translate(text, config, specialised=True)
    assert "if " in forward
    x = torch.randn(2, 70, 8)
    for length in (9, 70):
        ours, theirs = (_made(t, config)(x[:, :length]) for t in (_written(state), text))
        torch.testing.assert_close(ours, theirs)
