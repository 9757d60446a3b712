"""What code of repositories of 2024 and 2025 has, written for transformers 4.43 to 4.57, in small
modules.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from onboard.analysis.blocks.spec_mixtures import MixtureParameters
from onboard.analysis.recognise.mixtures import probe_mixture
from onboard.analysis.recognise.recorder import ModuleCall
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.language.values import Known
from onboard.plain_config import ROPE_INIT_FUNCTIONS, PlainConfig
from onboard.vetting.model_text import vet_model_text
from tests.unit.codegen.conftest import HEAD
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

ROPE = """
from onboard.plain_config import ROPE_INIT_FUNCTIONS


class Rope(nn.Module):
    def __init__(self, dim=None, kind="default", config=None):
        super().__init__()
        self.rope_kwargs = {}
        if config is None:
            self.rope_kwargs = {"rope_type": kind, "dim": dim}
        self.init_fn = ROPE_INIT_FUNCTIONS["default"]
        inv_freq, self.factor = self.init_fn(config, None, **self.rope_kwargs)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        return x[:, None] * self.inv_freq * self.factor


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rope = Rope(config=config)

    def forward(self, x):
        return self.rope(x)
"""
LAYERS = """
class Plain(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.factor = config.factor + index

    def forward(self, x):
        return x * self.factor


class Ahead(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.factor = config.factor

    def forward(self, x, y):
        return x + y * self.factor


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = []
        for index in range(config.layers + config.ahead):
            kind = Plain if index < config.layers else Ahead
            self.layers.append(kind(config, index))
        self.layers = nn.ModuleList(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
DISPATCH = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        q = x.reshape(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS[self.config.kind]
        out, _ = attend(self, q, q, q, None, scaling=0.5)
        return out
"""


SHARING = """
class Mixer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.kind = "cross" if index % config.share != 0 else "self"
        self.factor = config.factor + index
        if self.kind == "self":
            self.scale = nn.Parameter(torch.full((4,), 0.5 + index))

    def forward(self, x, kept=None):
        if self.kind == "cross" and kept is not None and isinstance(kept, tuple):
            k, v = kept
        else:
            k, v = x * self.scale, x + self.scale
        return x * self.factor + k * v, (k, v)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.share = config.share
        self.layers = nn.ModuleList([Mixer(config, i) for i in range(config.layers)])

    def forward(self, x):
        kept = None
        for index, layer in enumerate(self.layers):
            outputs = layer(x, kept=kept)
            x = outputs[0]
            if index % self.share == 0:
                kept = outputs[-1]
        return x
"""

FOLDED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = config.norm

    def forward(self, x, mask=None):
        q = x.reshape(x.shape[0], x.shape[1], 2, -1).transpose(1, 2)
        sizes = (q.size(0), q.size(1), q.size(2), q.size(2))
        folded = q.reshape(sizes[0] * sizes[1], sizes[2], -1)
        room = torch.empty(sizes[0] * sizes[1], sizes[2], sizes[3], dtype=q.dtype)
        found = torch.baddbmm(room, folded, folded.transpose(1, 2), beta=0.0, alpha=1.0 / self.norm)
        scores = found.view(*sizes)
        if mask is None and scores.shape[2] == scores.shape[3]:
            mask = torch.ones(sizes[0], 1, sizes[2], sizes[3], dtype=torch.bool)
            mask.tril_()
            mask = ~mask
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = nn.functional.softmax(scores, dim=-1)
        return torch.matmul(weights, q)
"""


def test_a_lookup_in_the_table_of_attention_is_the_canonical_op(translate: Translate) -> None:
    _, _, forward = translate(DISPATCH, {"kind": "sdpa"}, specialised=True)
    assert "torch.ops.onboard.torch_attention(" in forward
    assert "ALL_ATTENTION_FUNCTIONS" not in forward


OF_NUMBERS = FOLDED.replace("dtype=torch.bool", "dtype=torch.float32").replace(
    "mask = ~mask", "mask = 1.0 - mask\n            mask = mask.to(torch.bool)"
)


@pytest.mark.parametrize("text", [FOLDED, OF_NUMBERS], ids=["truth values", "numbers"])
def test_a_mask_that_is_made_where_scores_are_square_is_causal(
    translate: Translate, text: str
) -> None:
    sizes = {"norm": random.uniform(0.5, 2.0)}
    print(sizes)
    state, _, forward = translate(text, sizes, specialised=True, mask=Known(None))
    assert "torch.ops.onboard.torch_attention(" in forward
    assert "tril" not in forward
    x = torch.randn(3, 5, 8)
    expected = _made(text, sizes)(x)
    torch.testing.assert_close(_made(_written(state), sizes)(x), expected)


@pytest.mark.parametrize("text", [FOLDED, OF_NUMBERS], ids=["truth values", "numbers"])
@pytest.mark.parametrize("change", ["mask.triu_()", "mask.tril_(1)", "mask.tril_().mul_(2.0)"])
def test_another_mask_is_not(translate: Translate, change: str, text: str) -> None:
    text = text.replace("mask.tril_()", change)
    try:
        _, _, forward = translate(text, {"norm": 1.0}, specialised=True, mask=Known(None))
    except Untranslatable:
        return
    assert "torch_attention" not in forward


def test_keywords_of_an_attribute_that_is_empty_everywhere_are_none(translate: Translate) -> None:
    sizes = {"head_dim": 8, "rope_theta": float(random.randint(10, 10**6))}
    print(sizes)
    state, _, _ = translate(ROPE, sizes, specialised=True)
    (rope,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Rope"]
    written = ROPE[: ROPE.index("class Rope")] + f"{_written(rope)}\n\n\n{_written(state)}"
    x = torch.randn(3)
    assert torch.equal(_made(written, sizes)(x), _made(ROPE, sizes)(x))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_kind_of_the_config_is_looked_up_in_the_table(translate: Translate, kind: str) -> None:
    text = ROPE.replace(
        'ROPE_INIT_FUNCTIONS["default"]',
        'ROPE_INIT_FUNCTIONS[config.rope_scaling.get("rope_type", config.rope_scaling.get("type"))]',
    )
    text = text.replace("ROPE_INIT_FUNCTIONS\n", "ROPE_INIT_FUNCTIONS, PlainConfig as Config\n", 1)
    parameters = {"rope_type": kind, "rope_theta": float(random.randint(10, 10**6))}
    parameters |= {"factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "rope_parameters": parameters}
    sizes["max_position_embeddings"] = 128
    print(sizes)
    state, _, _ = translate(text, sizes, specialised=True)
    (rope,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Rope"]
    written = text[: text.index("class Rope")] + f"{_written(rope)}\n\n\n{_written(state)}"
    made = []
    for each in (written, text):
        names: dict[str, Any] = {}
        exec(HEAD + each, names)
        made.append(names["Toy"](PlainConfig(**sizes)))
    x = torch.randn(3)
    assert torch.equal(made[0](x), made[1](x))


def test_keywords_of_a_dict_that_says_something_are_not_dropped(translate: Translate) -> None:
    text = ROPE.replace("self.rope_kwargs = {}", "self.rope_kwargs = config.more")
    sizes = {"head_dim": 8, "rope_theta": 10.0, "more": {"a": 1}}
    state, _, _ = translate(text, sizes, specialised=True)
    (rope,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Rope"]
    assert "a=config.more['a']" in _written(rope)
    assert "sorted(config.more) == ['a']" in [_text(each) for each in rope.guards]
    text = ROPE.replace("self.rope_kwargs = {}", "self.rope_kwargs = dict(zip(config.more, [1]))")
    with pytest.raises(Untranslatable, match="unknown"):
        translate(text, sizes, specialised=True)


def test_a_class_of_layers_that_no_layer_has_is_left_out_and_guarded(translate: Translate) -> None:
    sizes = {"factor": random.uniform(0.5, 2.0), "layers": 3, "ahead": 0}
    print(sizes)
    state, init, _ = translate(LAYERS, sizes, specialised=True)
    assert "Ahead" not in init
    (plain,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Plain"]
    written = f"{_written(plain)}\n\n\n{_written(state)}"
    x = torch.randn(2, 4)
    assert torch.equal(_made(written, sizes)(x), _made(LAYERS, sizes)(x))
    (guard,) = [each for each in state.guards if "all(" in _text(each)]
    for ahead in (0, 1):
        known = {"config": SimpleNamespace(**{**sizes, "ahead": ahead})}
        assert eval(_text(guard), known) is (ahead == 0)


def _text(expr: Any) -> str:
    return ast.unparse(expr)


def test_plain_rope_of_the_table_is_that_of_llama() -> None:
    theta = float(random.randint(10, 10**6))
    print(theta)
    config = LlamaConfig(hidden_size=48, num_attention_heads=4, rope_theta=theta)
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    ours = PlainConfig(hidden_size=48, num_attention_heads=4, rope_theta=theta)
    found, factor = ROPE_INIT_FUNCTIONS["default"](ours, None)
    assert torch.equal(found, expected)
    assert factor == 1.0


def test_a_model_file_may_import_the_table() -> None:
    vet_model_text("from onboard.plain_config import ROPE_INIT_FUNCTIONS, PlainConfig\n")


def test_what_a_layer_leaves_for_later_ones_is_a_tuple_or_nothing(translate: Translate) -> None:
    sizes = {"factor": random.uniform(0.5, 2.0), "layers": 5, "share": 2}
    print(sizes)
    state, _, forward = translate(SHARING, sizes, specialised=True)
    assert "kept = None" in forward
    (mixer,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Mixer"]
    written = f"{_written(mixer)}\n\n\n{_written(state)}"
    assert written.count("kept is not None") == 1
    x = torch.randn(2, 4)
    assert torch.equal(_made(written, sizes)(x), _made(SHARING, sizes)(x))


def test_one_hot_vectors_of_as_many_classes_as_tokens_are_exported(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        places = nn.functional.one_hot(x.argmax(dim=-1), num_classes=x.shape[0])
        return places.float() @ x * self.factor
"""
    config = {"factor": 3.0}
    state, _, _ = translate(text, config, specialised=True)
    ours, theirs = _made(_written(state), config), _made(text, config)
    shapes = ({0: torch.export.Dim("tokens", min=5, max=64)},)
    graph = torch.export.export(ours, (torch.randn(6, 4),), dynamic_shapes=shapes).module()
    for tokens in (5, 17):
        x = torch.randn(tokens, 4)
        assert torch.equal(graph(x), theirs(x))


BUFFERS = """
import onboard.ops
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.size, 6, bias=False)
        self.w2 = nn.Linear(6, config.size, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)))


class Gate(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wg = nn.Linear(config.size, config.experts, bias=False)

    def forward(self, x):
        shares = F.softmax(self.wg(x.reshape(-1, x.shape[-1])), dim=1)
        mask = F.one_hot(torch.argmax(shares, dim=1), num_classes=int(shares.shape[1]))
        places = F.one_hot(((torch.cumsum(mask, 0) - 1) * mask).sum(1), num_classes=shares.shape[0])
        weights = torch.einsum("se,sc->sec", shares * mask, places.float())
        return weights, weights.bool()


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = Gate(config)
        self.experts = nn.ModuleList([Expert(config) for _ in range(config.experts)])

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, mask = self.gate(x)
        buffers = torch.einsum("sec,sm->ecm", mask.type_as(x), rows)
        outs = torch.stack([expert(buffer) for buffer, expert in zip(buffers, self.experts)])
        y = torch.einsum("sec,ecm->sm", weights.type_as(x), outs).reshape(x.shape)
        return y
"""


def test_a_mixture_is_written_with_its_router(translate: Translate) -> None:
    sizes, x = {"size": 8, "experts": 5}, torch.randn(2, 9, 8)
    state, _, _ = translate(BUFFERS, sizes, specialised=True)
    toy = state.cls(SimpleNamespace(**sizes))
    found = probe_mixture(toy, [ModuleCall((x,), {}, toy(x))])
    assert found is not None
    mixtures = {"Toy": MixtureParameters.model_validate(found.parameters)}
    state, _, forward = translate(BUFFERS, sizes, specialised=True, mixtures=mixtures)
    assert "torch_moe" in forward
    assert "einsum" not in forward
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    head = BUFFERS[: BUFFERS.index("class Expert")]
    ours = _made("\n\n\n".join([head, *map(_written, parts), _written(state)]), sizes)
    theirs = _made(BUFFERS, sizes)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


NOTES = """
class Rope(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self._noted = [1.0]

    def forward(self, x, alpha=1.0):
        return x * self.size * alpha, x + alpha


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, tables):
        (cos, sin), = tables
        return x * cos + sin * self.size


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rope = Rope(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.dynamic = config.dynamic

    def forward(self, x):
        if not self.dynamic:
            alphas = [1.0]
        else:
            alphas = self.rope._noted
        self.rope._noted = alphas
        tables = [self.rope(x, alpha=alpha) for alpha in alphas]
        for layer in self.layers:
            x = layer(x, tables)
        return x
"""


def test_what_a_forward_notes_at_a_part_that_does_not_read_it_goes(translate: Translate) -> None:
    sizes = {"size": 0.5, "layers": 3, "dynamic": False}
    state, _, forward = translate(NOTES, sizes, specialised=True)
    assert "_noted" not in forward
    assert forward.index("self.rope(") < forward.index("for layer")  # once, not in every layer
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), sizes)
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), _made(NOTES, sizes)(x))


def test_what_a_part_reads_itself_is_not_dropped(translate: Translate) -> None:
    text = NOTES.replace("return x * self.size * alpha", "return x * self._noted[0] * alpha")
    with pytest.raises(Untranslatable, match="_noted"):
        translate(text, {"size": 0.5, "layers": 3, "dynamic": False}, specialised=True)


COUNTED = """
made = 0


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        global made
        made += 1
        self.number = made
        self.factor = config.factor

    def forward(self, x):
        return x * self.factor
"""


def test_what_a_constructor_counts_is_left_out_unless_it_is_read(translate: Translate) -> None:
    state, init, _ = translate(COUNTED, {"factor": 2.0}, specialised=True)
    assert "made" not in init
    x = torch.randn(3)
    assert torch.equal(_made(_written(state), {"factor": 2.0})(x), 2 * x)
    with pytest.raises(Untranslatable, match="the global made"):
        translate(
            COUNTED.replace("x * self.factor", "x * self.number"), {"factor": 2.0}, specialised=True
        )


NUMBERED = """
import onboard.ops


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.count, self.size = config.experts, config.size
        self.w1 = nn.Parameter(torch.randn(config.experts * 12, config.size))
        self.w2 = nn.Parameter(torch.randn(config.experts * 12, config.size))

    def forward(self, x, number):
        w1, w2 = (w.view(self.count, 12, self.size)[number] for w in (self.w1, self.w2))
        return nn.functional.silu(x @ w1.t()) @ w2


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = nn.Linear(config.size, config.experts)
        self.mlp = Experts(config)
        self.count, self.scale = config.experts, config.scale

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        y = torch.zeros_like(rows)
        for number in range(self.count):
            tokens, places = torch.where(chosen == number)
            if len(tokens) == 0:
                continue
            y[tokens] += self.mlp(rows[tokens], number) * weights[tokens, places, None] * self.scale
        return y.view(x.shape)
"""


HANDED = NUMBERED
for _before, _after in {
    "        w1, w2 = (w.view(self.count, 12, self.size)[number] for w in (self.w1, self.w2))\n": "",
    "x, number": "x, w1, w2",
    "        for number in": """
        both = [w.view(self.count, 12, -1).chunk(self.count) for w in (self.mlp.w1, self.mlp.w2)]
        for number in""",
    "(rows[tokens], number)": "(rows[tokens], both[0][number][0], both[1][number][0])",
}.items():
    HANDED = HANDED.replace(_before, _after)


@pytest.mark.parametrize("text", [NUMBERED, HANDED])
def test_experts_of_one_module_are_lists_of_its_weights(text: str, translate: Translate) -> None:
    sizes = {"size": 8, "experts": 5, "scale": random.uniform(1.5, 3.0)}
    print(sizes)
    x = torch.randn(2, 9, 8)
    state, _, _ = translate(text, sizes, specialised=True)
    toy = state.cls(SimpleNamespace(**sizes))
    found = probe_mixture(toy, [ModuleCall((x,), {}, toy(x))])
    assert found is not None
    mixtures = {"Toy": MixtureParameters.model_validate(found.parameters)}
    state, _, forward = translate(text, sizes, specialised=True, mixtures=mixtures)
    assert "[weight.T for weight in self.mlp.w2.chunk(self.mlp.count)]" in forward
    (experts,) = [e for cls, e in state.translator.states.items() if cls.__name__ == "Experts"]
    written = f"import onboard.ops\n\n\n{_written(experts)}\n\n\n{_written(state)}"
    ours, theirs = _made(written, sizes), _made(text, sizes)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))
