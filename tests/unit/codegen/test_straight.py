"""Forwards that the translation refuses: recorded and proven, or refused for what cannot be recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from onboard.codegen.straight.torch_calls import OPERATORS, TURNED, UNARY, named
from tests.support.drawing import asked_for, some_of
from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_MISTAKEN = """
import ast, json, sys
from pathlib import Path
from unittest import mock
from onboard.analysis.analyze import analyze
from onboard.analysis.repository import install
from onboard.codegen.straight.recorded_classes import recorded_classes
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.codegen.straight.straighten import Recordings
from onboard.codegen.translate.language.in_order import Mechanisms
from onboard.errors import OnboardError
from onboard.workflow.remote import tasks
right = Mechanisms.forward
def wrong(self, state, node, frame):
    for each in ast.walk(node) if state.cls.__name__ == "Mlp" else ():
        if isinstance(each, ast.Attribute):
            each.attr = wrong.changes.get(each.attr, each.attr)
    return right(self, state, node, frame)
def no_forward(self, cls):
    raise NotStraight("it is odd")
found = {}
with mock.patch.object(Mechanisms, "forward", wrong):
    for folder in map(Path, sys.argv[1:]):
        config = json.loads((folder / "config.json").read_text())
        install(folder, config)
        spec = analyze(config, folder, model=folder.name, trust_remote_code=True).to_yaml()
        made = no_forward if folder.name.endswith("never") else Recordings.straight_forward
        wrong.changes = {"silu": "glu" if folder.name.startswith("stops") else "relu"}
        with mock.patch.object(Recordings, "straight_forward", made):
            try:
                done = tasks.generate(folder, config, spec)
                found[folder.name] = {"recorded": recorded_classes(done["text"]), **done}
            except OnboardError as error:
                found[folder.name] = {"error": str(error)}
print("FOUND" + json.dumps(found))
"""
_RECORD = """
import ast, json, sys
from pathlib import Path
from onboard.analysis.repository import install
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.codegen.straight.straighten import Recordings
found = {}
for folder in map(Path, sys.argv[1:]):
    config = json.loads((folder / "config.json").read_text())
    install(folder, config)
    whole = load_config(config)
    model = build_tiny(whole)
    name = "Block" if folder.name.startswith("layer") else "Mlp"
    cls = next(type(module) for module in model.modules() if type(module).__name__ == name)
    try:
        found[folder.name] = ast.unparse(Recordings(model, whole, [], True).straight_forward(cls)[1])
    except NotStraight as error:
        found[folder.name] = f"refused: {error}"
print("FOUND" + json.dumps(found))
"""


HELPERS = r"""
import re
import numpy as np
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial, reduce
from typing import NamedTuple

_scale = ContextVar("scale", default=1.0)


class Tables:
    held = {}

    @classmethod
    def get(cls, key, make):
        if key not in cls.held:
            cls.held[key] = make()
        return cls.held[key]


@lru_cache(maxsize=None)
def rates(size, theta):
    return 1.0 / theta ** (torch.arange(0, size, 2).float() / size)


@contextmanager
def scaled(by):
    token = _scale.set(by)
    try:
        yield
    finally:
        _scale.reset(token)


class Pair(NamedTuple):
    gate: torch.Tensor
    up: torch.Tensor

    def mixed(self):
        return self.gate * self.up


class Heads:
    def __init__(self, x):
        self.x = x

    @classmethod
    def split(cls, x, n):
        return cls(x.unflatten(-1, (n, -1)).transpose(1, 2))

    def __matmul__(self, other):
        return Heads(self.x @ other.x.transpose(-1, -2))

    def map(self, f):
        return Heads(f(self.x))


def power(x, n):
    return torch.ones_like(x) if n == 0 else x * power(x, n - 1)


def rearranged(x, pattern, **sizes):
    left, right = (re.findall(r"[a-z]", side) for side in pattern.split("->"))
    if len(left) < len(right):
        return x.reshape(*x.shape[:-1], sizes[right[-2]], -1)
    return x.reshape(*x.shape[:-2], -1)
"""
ODD_ATTENTION = ATTENTION
for old, new in (
    ("q = q.view(b, t, self.heads, self.size).transpose(1, 2)", "q = Heads.split(q, self.heads)"),
    ("k = k.view(b, t, self.heads, self.size).transpose(1, 2)", "k = Heads.split(k, self.heads)"),
    (
        "v = v.view(b, t, self.heads, self.size).",
        'v = rearranged(v, "b t c -> b t h d", h=self.heads).',
    ),
    (
        "1.0 / self.theta ** (torch.arange(0, self.size, 2, device=x.device).float() / self.size)",
        "rates(self.size, self.theta)",
    ),
    ("q, k = turn(q), turn(k)", "q, k = q.map(turn), k.map(turn)"),
    ("q @ k.transpose(2, 3) / math.sqrt(self.size)", "(q @ k).x / np.sqrt(self.size)"),
    (
        "torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)",
        "Tables.get(t, lambda: torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1))[:t, :t]",
    ),
):
    assert old in ODD_ATTENTION
    ODD_ATTENTION = ODD_ATTENTION.replace(old, new)
ODD_MLP = """
f = next(f for n, f in (("relu", F.relu), ("silu", F.silu)) if n.startswith("si"))
pair = Pair(*(getattr(self, f"{name}")(x) for name in ("gate", "up")))
with scaled(0.5):
    pair = pair._replace(gate=reduce(lambda h, g: g(h), [f, partial(torch.mul, _scale.get())], pair.gate))
with torch.no_grad():
    pair = Pair(*pair)
match pair.gate:
    case torch.Tensor() as gate if (rank := gate.ndim) == 3:
        h = power(pair.mixed(), rank - 1)
    case _:
        raise TypeError
try:
    h = F.not_there(h)
except AttributeError:
    h.mul_(2.0)
return self.down(h)
"""
ODD_HEAD = f"""
{HELPERS}

def run(x, layers, position_ids):
    return x if not layers else run(layers[0](x, position_ids), layers[1:], position_ids)
"""
ODD_MODEL = "return self.norm(run(self.embed(input_ids), list(self.layers), position_ids))"


SCALED_ATTENTION = """
match x.shape:
    case (b, t, _):
        pass
q, k, v = self.qkv(x).view(b, t, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
cos, sin = self.cos[:t], self.sin[:t]
cos, sin = cos[..., 0:t, :], sin[..., 0:t, :]
def turn(y):
    first, second = y.chunk(2, -1)
    return y * cos + torch.cat((-second, first), -1) * sin
q, k = turn(q).reshape(b * self.heads, t, -1), turn(k).reshape(b * self.heads, t, -1)
scores = torch.zeros(b * self.heads, t, t, dtype=q.dtype, device=q.device)
scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=1.0, alpha=torch.tensor(1.0) / self.norm)
mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
scores = scores.view(b, self.heads, t, t).masked_fill(mask, float("-inf"))
y = F.softmax(scores, dim=-1) @ v
return (self.out(y.transpose(1, 2).reshape(b, t, -1)), None), self.bias
"""
SCALED_BLOCK = """
(y, _), bias = self.attn(self.norm1(x), position_ids)
x = x + (y if bias is None else y + bias)
return x + self.mlp(self.norm2(x))
"""
SCALED_INIT = {
    "self.theta = config.rope_theta": """
        inv = 1.0 / config.rope_theta ** (torch.arange(0, self.size, 2).float() / self.size)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inv)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.norm = torch.sqrt(torch.tensor(self.size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size)) if is_last else None""",
    "Attention(config)": "Attention(config, index == config.num_hidden_layers - 1)",
}


def _save_scaled(folder: Path) -> Path:
    """Save a model whose attention keeps a number as a tensor, and a bias in its last layer only."""
    path = save_odd(folder, attention=SCALED_ATTENTION, block=SCALED_BLOCK) / "modeling_odd.py"
    text = path.read_text()
    for old, new in SCALED_INIT.items():
        assert old in text
        text = text.replace(old, new)
    before, _, after = text.partition("class Attention(nn.Module):")
    after = after.replace("(self, config)", "(self, config, is_last)", 1)
    path.write_text(f"{before}class Attention(nn.Module):{after}")
    return folder


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of the models that are refused as they are written."""
    folder = tmp_path_factory.mktemp("odd")
    odd = {"attention": ODD_ATTENTION, "mlp": ODD_MLP, "model": ODD_MODEL}
    scaled = _save_scaled(folder / "odd_scaled")
    return run_apart(GENERATE, [save_odd(folder / "odd_all", head=ODD_HEAD, **odd), scaled])


def test_forwards_that_cannot_be_read_are_recorded_and_proven(generated: dict[str, Any]) -> None:
    made = generated["odd_all"]
    assert made.get("error") is None
    assert made["recorded"] == ["Attention", "Mlp", "OddModel"]
    assert made["worst"] < 1e-5
    text = made["text"]
    assert "torch.ops.onboard.torch_attention(" in text
    assert "for layer in self.layers:" in text
    assert "self.theta" in text  # though all models have the same number there
    assert not any(word in text for word in ("Tables", "_scale", "rearranged", "lru_cache"))


def test_numbers_kept_as_tensors_and_parts_that_some_layers_have(generated: dict[str, Any]) -> None:
    made = generated["odd_scaled"]
    assert made.get("error") is None
    assert made["recorded"] == ["Attention"]
    assert made["worst"] < 1e-5
    assert "torch.ops.onboard.torch_attention(" in made["text"]
    assert ", self.bias" in made["text"]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of models of which a class is translated wrongly."""
    folder = tmp_path_factory.mktemp("mistaken")
    return run_apart(
        _MISTAKEN, [save_odd(folder / name) for name in ("differs", "stops", "differs_never")]
    )


@pytest.mark.parametrize("name", ["differs", "stops"])
def test_a_class_whose_translation_is_not_proven_is_recorded(
    name: str, mistaken: dict[str, Any]
) -> None:
    assert mistaken[name].get("error") is None
    assert mistaken[name]["recorded"] == ["Mlp"]
    assert mistaken[name]["worst"] < 1e-5


def test_where_no_recording_is_proven_the_first_error_is_said(mistaken: dict[str, Any]) -> None:
    error = mistaken["differs_never"]["error"]
    assert error.startswith("model.layers.0.mlp.down (Linear) differs from transformers: rmse")
    assert error.endswith("; Mlp cannot be recorded: it is odd")


POWER = """
CALLS = []


def rec(x, n):
    return x if n == 0 else rec(x * 1.5, n - 1)
"""
BRANCH = """
h = rec(self.gate(x), 2)
if {test}:
    h = h * 2
return self.down(F.silu(h) * self.up(x))
"""
END = "return self.down(F.silu(h) * self.up(x))"
IN_BLOCK = """
x = x + self.attn(self.norm1(x), position_ids)
h = rec(self.norm2(x), 2)
if {test}:
    h = h * 2
return x + self.mlp(h)
"""
FOOLING = {
    "length": ({"mlp": BRANCH.format(test="x.shape[1] > 64")}, "for some sizes (s.* <= 64)"),
    "rows": ({"mlp": BRANCH.format(test="x.shape[0] > 7")}, "for some sizes (s.* <= 7)"),
    "both": (
        {"mlp": BRANCH.format(test="x.shape[0] == x.shape[1]")},
        "for some sizes",
    ),
    "tokens": (
        {
            "mlp": "h = torch.stack([self.gate(x[:, t]) for t in range(x.shape[1])], 1)\n"
            f"h = torch.relu(h)\n{END}"
        },
        "a size of its input as a number, as a loop over tokens does, at ",
    ),
    "one": ({"mlp": BRANCH.format(test="x.shape[1] == 1")}, "for 1 texts of 1 tokens"),
    "batch": ({"mlp": BRANCH.format(test="x.shape[0] == 1")}, "for 1 texts of"),
    "value": ({"mlp": BRANCH.format(test="x.abs().max() > 1e4")}, "reads values of a tensor"),
    "caught": (
        {
            "mlp": f"try:\n    h = self.gate(x) * float(x.max() > 1e4)\nexcept Exception:\n"
            f"    h = self.gate(x)\n{END}"
        },
        "reads values of a tensor",
    ),
    "calls": ({"mlp": BRANCH.format(test="CALLS.append(1) or len(CALLS) > 4000")}, "counts its"),
    "layers": ({"block": IN_BLOCK.format(test="self.index == 1")}, "different numbers of steps"),
    "layers_later": (
        {"block": IN_BLOCK.format(test="self.index == 4")},
        "different numbers of steps",
    ),
    "layers_number": (
        {"block": IN_BLOCK.replace("h * 2", "h * (self.index + 0.5)").format(test="True")},
        None,
    ),
    "luck": (
        {"mlp": f"h = self.gate(x) * (len(str(self.gate.out_features)) + 0.25)\n{END}"},
        "a number that nothing explains",
    ),
    "random": ({"mlp": f"h = self.gate(x) + torch.rand_like(self.up(x))\n{END}"}, "random"),
    "view": (
        {
            "mlp": f"h = rec(self.gate(x), 1)\npart = h[:, :, :8]\nh.mul_(2.0)\n"
            f"h = h + part.sum(-1, keepdim=True)\n{END}"
        },
        "changed in place by another name",
    ),
    "given": ({"mlp": f"h = self.gate(x)\nx += 1.0\n{END}"}, "changes in place what it is given"),
    "part": ({"mlp": f"h = self.gate(x) * 1\nh[:, :, :3] = 0\n{END}"}, "in place"),
    "half": (
        {"mlp": BRANCH.format(test="x.dtype == torch.bfloat16")},
        "different numbers of steps",
    ),
}


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the definition of each forward, or why there is none."""
    folder = tmp_path_factory.mktemp("fooling")
    made = [
        save_odd(folder / name, head=POWER, **FOOLING[name][0])
        for name in asked_for(request, "fooling")
    ]
    for each in made:
        if not each.name.startswith("layers"):
            config = json.loads((each / "config.json").read_text())
            (each / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return run_apart(_RECORD, made)


@pytest.mark.parametrize(
    "fooling", some_of(FOOLING, ("length", "value", "layers", "view"), by_chance=5)
)
def test_what_depends_on_more_than_sizes_is_refused(fooling: str, recorded: dict[str, Any]) -> None:
    reason, made = FOOLING[fooling][1], recorded[fooling]
    if reason is None:
        assert "self.index + 0.5" in made or "refused" in made
        return
    assert made.startswith("refused: ")
    assert all(part in made for part in reason.split("(s.*"))


_SIGNS = ("+", "-", "*", "/", "//", "%", "**")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *[(f"x {sign} {other}", sign) for sign in _SIGNS for other in "2x"],
        *[(f"2 {sign} x", sign) for sign in _SIGNS],
        ("x @ x", "@"),
        ("-x", "-"),
    ],
)
def test_operators_of_tensors_are_told_by_what_they_call(code: str, expected: str) -> None:
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.eye(2) + 1
    with Watch():
        eval(code, {"x": x})
    kind, name = named(seen[0])
    assert (kind, ({**OPERATORS, **TURNED, **UNARY})[name]) == ("method", expected)
