"""What code of repositories makes of dicts of the config, of tables of classes, of masks that it draws."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from onboard.codegen.translate.language.config_values import all_fields, of_field
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

DICTS = """
class Fast(nn.Module):
    def __init__(self, size: int, rank: int = 2, bias: bool = True, device=None):
        super().__init__()
        self.rank = rank
        if self.rank is None:
            self.rank = size // 2
        self.down = LAYERS["plain"](size, self.rank, bias=bias, device=device)
        self.up = nn.Linear(self.rank, size, bias=bias)
        self.up._is_last = True

    def forward(self, x):
        return self.up(self.down(x))


class Slow(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return self.proj(x)


LAYERS = {"plain": nn.Linear}
KINDS = {"fast": Fast, "slow": Slow}


def built(size, **kwargs):
    kind = kwargs.pop("kind")
    if kind == "slow":
        if len(kwargs) > 0:
            raise ValueError("more")
        return Slow(size)
    return Fast(size, **kwargs)


class Block(nn.Module):
    def __init__(self, size: int, mixer=None, other=None, device=None, **kwargs):
        if mixer is None:
            mixer = {"type": "slow"}
        del kwargs
        super().__init__()
        kind = KINDS[mixer["type"].lower()]
        left_out = {"type", "scale"}
        self.mixer = kind(size=size, **{k: v for k, v in mixer.items() if k not in left_out})
        self.other = built(size, **other)
        self.norm = None
        if not getattr(KINDS[mixer["type"].lower()], "has_norm", False):
            self.norm = nn.Linear(size, size)
        self.scale = mixer["scale"]

    def forward(self, x):
        y = self.mixer(x) * self.scale
        return self.other(y if self.norm is None else self.norm(y))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.kind not in KINDS.keys():
            options = " | ".join(KINDS.keys())
            raise NotImplementedError(f"{config.kind} is none of {options}")
        self.blocks = nn.ModuleList([Block(**config.to_dict()) for _ in range(config.layers)])
        if config.no_bias:
            for module in self.modules():
                if hasattr(module, "bias") and isinstance(module.bias, nn.Parameter):
                    if config.loud and config.loud > 1:
                        warnings.warn(f"{module.bias} is taken away from {module}")
                    module.register_parameter("bias", None)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""


def _config(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "size": 6,
        "layers": 2,
        "kind": "fast",
        "other": {"kind": "slow"},
        "loud": 0,
    }
    found |= fields
    return found | {"to_dict": lambda: found}


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("no_bias", [True, False])
def test_items_of_the_config_decide_what_is_made(
    rank: int | None, no_bias: bool, translate: Translate
) -> None:
    mixer = {"type": "FAST", "rank": rank, "scale": 0.5}
    config = _config(no_bias=no_bias, mixer=mixer)
    state, init, _ = translate(DICTS, config, specialised=True)
    own = {cls.__name__: each for cls, each in state.translator.states.items()}
    guards = [ast.unparse(item) for item in own["Block"].guards]
    assert "mixer['type'] == 'FAST'" in guards
    assert "sorted(mixer) == ['rank', 'scale', 'type']" in guards
    assert ("leave_out(self, 'bias')" in init) is no_bias
    assert "KINDS" not in init
    written = "\n\n\n".join(_written(own[name]) for name in ("Fast", "Slow", "Block", "Toy"))
    ours = _made(f"from onboard.modeling import leave_out\n\n\n{written}", config)
    original = _made(DICTS, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(4))
    assert torch.equal(ours(x), original(x))


MASKED = """
def attended(query, key, value, heads, kv_heads, causal=False, scale=None, bias=None, kind="plain"):
    if kind == "other":
        query = query.fft()
    if kv_heads is None:
        kv_heads = heads
    q = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    k = key.unflatten(-1, (kv_heads, -1)).permute(0, 2, 3, 1)
    v = value.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    if kv_heads > 1 and kv_heads < heads:
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    scores = q.matmul(k) * scale
    if causal and (not q.size(2) == 1):
        length = max(q.size(2), k.size(-1))
        hidden = scores.new_ones(length, length, dtype=torch.float32)
        hidden = ~hidden.tril().to(torch.bool)
        hidden = hidden[-q.size(2) :, -k.size(-1) :]
        scores = scores.masked_fill(hidden.view(1, 1, q.size(2), k.size(-1)), -1e9)
    weights = torch.softmax(scores, dim=-1)
    return weights.to(v.dtype).matmul(v).transpose(1, 2).flatten(2)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.attention["heads"]
        self.kv_heads = config.attention["kv_heads"]
        self.kind = config.attention["kind"]
        self.causal = not config.attention["both_ways"]
        self.scale = config.attention["scale"]
        if self.scale is None:
            self.scale = 1 / math.sqrt(4)

    def forward(self, x):
        narrow = x[..., : 4 * self.kv_heads]
        return attended(
            x, narrow, narrow, self.heads, self.kv_heads, causal=self.causal, scale=self.scale, kind=self.kind
        )
"""


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_in_a_helper_is_that_of_this_config(
    kv_heads: int, scale: float | None, translate: Translate
) -> None:
    attention = {
        "heads": 4,
        "kv_heads": kv_heads,
        "kind": "plain",
        "both_ways": False,
        "scale": scale,
    }
    config = {"attention": attention}
    state, _, forward = translate(MASKED, config, specialised=True)
    functions = [_function(key, each) for key, each in state.translator.functions.items()]
    written = "\n\n\n".join((*functions, _written(state)))
    assert "torch_attention" in written
    assert "fft" not in written
    ours, original = _made(written, config), _made(MASKED, config)
    generator = torch.Generator().manual_seed(5)
    for length in (1, 2, 7):
        x = torch.randn(2, length, 16, generator=generator)
        torch.testing.assert_close(ours(x), original(x))


def test_a_triangle_that_is_no_mask_is_the_numbers_that_it_is(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        x, length = x * self.size, x.shape[1]
        triangle = x.new_ones(length, length).tril().to(x.dtype)
        other = ~torch.ones(length, length, dtype=torch.bool).tril()
        return triangle[1:] @ x + other[1:].float() @ x
"""
    state, _, _ = translate(text, {"size": 5}, specialised=True)
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(6))[None]
    torch.testing.assert_close(_made(_written(state), {"size": 5})(x), _made(text, {"size": 5})(x))


@pytest.mark.parametrize("specialised", [True, False])
def test_fields_that_differ_from_layer_to_layer_are_left_alone(specialised: bool) -> None:
    """transformers refuses to read such a field of the config: it has no value for all layers."""
    config = AutoConfig.for_model("gemma4_text", head_dim=16, global_head_dim=32)
    with pytest.raises(RuntimeError, match="per-layer"):
        _ = config.head_dim
    frame: Any = SimpleNamespace(translator=SimpleNamespace(specialised=specialised))
    for field in ("head_dim", "hidden_size"):
        expr = ast.Attribute(ast.Name("config"), field)
        assert of_field(expr, config, frame) is None
    read = all_fields(ast.Name("config"), config).items
    assert "hidden_size" in read
    assert "head_dim" not in read


NAMED = """
from copy import deepcopy
from functools import partial


def activation(given: dict):
    config = deepcopy(given)
    name = config.pop("name")
    if not hasattr(nn.functional, name):
        raise ValueError(name)
    act = getattr(nn.functional, name)
    return partial(act, **config)


class Gate(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.layer = nn.Linear(part.size, part.size)
        self.act = activation(part.act)

    def forward(self, x):
        y = self.act(self.layer(x))
        return {"first": y, "rest": [y * 2, None], "loss": y.sum()}


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Gate(config.part)

    def combine(self, x, first, rest=None, **kwargs):
        return x + first + rest[0]

    def forward(self, x):
        outputs = self.gate(x)
        return self.combine(x, **outputs) + outputs.get("absent", 1.0)
"""


@pytest.mark.parametrize("act", [{"name": "silu"}, {"name": "gelu", "approximate": "tanh"}])
def test_functions_that_the_config_names_and_dicts_of_results_are_known(
    act: dict[str, Any], translate: Translate
) -> None:
    part = PretrainedConfig()
    part.size, part.act = 6, act
    sizes = {"part": part}
    state, _, forward = translate(NAMED, sizes, specialised=True)
    assert "dict" not in forward
    (gate,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Gate"]
    assert f"nn.functional.{act['name']}(" in _written(gate)
    guards = [ast.unparse(each) for each in gate.guards]
    assert f"part.act['name'] == '{act['name']}'" in guards
    assert f"sorted(part.act) == {sorted(act)}" in guards
    written = f"{_written(gate)}\n\n\n{_written(state)}"
    ours, theirs = _made(written, sizes), _made(NAMED, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(12))
    assert torch.equal(ours(x), theirs(x))


ASKED_FOR = """
from transformers.activations import ACT2FN

KINDS = ("silu", "soft")


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.act not in KINDS:
            raise ValueError("another")
        if config.act in ACT2FN:
            self.act = ACT2FN[config.act]
        else:
            self.act = nn.Softplus()

    def forward(self, x):
        return self.act(x)
"""


@pytest.mark.parametrize(
    ("act", "layer"), [("silu", "ACT2FN[config.act]"), ("soft", "nn.Softplus")]
)
def test_whether_a_table_has_an_entry_is_known(act: str, layer: str, translate: Translate) -> None:
    state, init, _ = translate(ASKED_FOR, {"act": act}, specialised=True)
    assert layer in init
    assert " in ACT2FN" not in init
    assert [ast.unparse(guard) for guard in state.guards] == [f"config.act == {act!r}"]
