"""Recurrences that research code writes as loops over tokens, in methods and in functions beside its
classes, become the op; what is none is refused by its loop.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_HEADS = """
b, t, _ = x.shape
q, k, v = (part.view(b, t, self.heads, self.size) for part in self.qkv(x).chunk(3, dim=-1))
"""
_FUNCTION = """
def recurrence({names}):
    b, t, h, d = q.shape
    state, outs = torch.zeros(b, h, d, v.shape[-1], device=q.device), []
    for i in range(t):
{step}
    return torch.stack(outs, dim=1)
"""
_ADD = "torch.einsum('bhk,bhv->bhkv', k[:, i], {})"
_READ = "outs.append(torch.einsum('bhk,bhkv->bhv', q[:, i], state))"


def _attention(step: str, given: str, before: str = "") -> dict[str, str]:
    """Return an attention that calls a function with a loop, of which a step is given."""
    body = textwrap.indent(textwrap.dedent(step), " " * 8)
    call = f"return self.out(recurrence({given}).reshape(b, t, -1))"
    head = _FUNCTION.format(names=given, step=body)
    return {"head": head, "attention": f"{_HEADS}{before}\n{call}"}


def _mlp(loop: str) -> dict[str, str]:
    body = textwrap.dedent(loop)
    return {
        "mlp": "g, u = torch.sigmoid(self.gate(x)), self.up(x)\n"
        f"h, hs = torch.zeros_like(u[:, 0]), []\n{body}\nreturn self.down(torch.stack(hs, dim=1))"
    }


_DELTA = f"""
    old = torch.einsum('bhk,bhkv->bhv', k[:, i], state)
    state = state + {_ADD.format("(v[:, i] - old) * r[:, i, :, None]")}
    {_READ}
"""
_RATES = "k, r = F.normalize(k, dim=-1), q.mean(-1).sigmoid()"
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "gla_logs": (
        "torch_gated_linear_attention",
        _attention(
            f"""
    state = g[:, i, :, :, None].exp() * state + {_ADD.format("v[:, i]")}
    {_READ}
    """,
            "q, k, v, g",
            "g = F.logsigmoid(v)",
        ),
    ),
    "gla_scaled": (
        "torch_gated_linear_attention",
        _attention(
            f"""
    state = g[:, i, :, :, None] * state + {_ADD.format("v[:, i]")}
    {_READ.replace("q[:, i]", "q[:, i] * d ** -0.5")}
    """,
            "q, k, v, g",
            "g = v.sigmoid()",
        ),
    ),
    "of_heads": (
        "torch_gated_linear_attention",
        _attention(
            f"""
    state = g[:, i, :, None, None] * state + {_ADD.format("v[:, i]")}
    {_READ}
    """,
            "q, k, v, g",
            "g = (v.mean(-1) + 2).sigmoid()",
        ),
    ),
    "kept_whole": (
        "torch_gated_linear_attention",
        _attention(f"\n    state = state + {_ADD.format('v[:, i]')}\n    {_READ}\n", "q, k, v"),
    ),
    "bonus": (
        "torch_gated_linear_attention",
        _attention(
            f"""
    kv = {_ADD.format("v[:, i]")}
    outs.append(torch.einsum('bhk,bhkv->bhv', q[:, i], state + u[:, :, None] * kv))
    state = g[:, i, :, :, None] * state + kv
    """,
            "q, k, v, g, u",
            "g, u = (-v.exp()).exp(), self.out.weight[: self.heads, : self.size]",
        ),
    ),
    "retention": (
        "torch_lightning_attention",
        _attention(
            f"""
    state = g[:, None, None] * state + {_ADD.format("v[:, i]")}
    {_READ}
    """,
            "q, k, v, g",
            "g = 1 - 2.0 ** (-5 - torch.arange(self.heads, device=x.device).float())",
        ),
    ),
    "delta": ("torch_delta_rule", _attention(_DELTA, "q, k, v, r", _RATES)),
    "gated_delta": (
        "torch_gated_delta_rule",
        _attention(
            f"\n    state = state * g[:, i, :, None, None]{_DELTA}",
            "q, k, v, g, r",
            f"{_RATES}\ng = (v.mean(-1) + 2).sigmoid()",
        ),
    ),
    "delta_of_channels": (
        "torch_kda",
        _attention(
            f"\n    state = state * g[:, i, :, :, None]{_DELTA}",
            "q, k, v, g, r",
            f"{_RATES}\ng = (v + 2).sigmoid()",
        ),
    ),
    "shares": (
        "torch_linear_recurrence",
        _mlp(
            """
            for t in range(x.shape[1]):
                h = (1 - g[:, t]) * h + g[:, t] * u[:, t]
                hs.append(h)
            """
        ),
    ),
    "slices": (
        "torch_linear_recurrence",
        _mlp(
            """
            for g_t, u_t in zip(g.unbind(1), u.unbind(1)):
                h = g_t * h + u_t
                hs.append(h)
            """
        ),
    ),
    "average": (
        "torch_linear_recurrence",
        _mlp(
            """
            kept = torch.sigmoid(self.gate.weight[:, 0])
            for t in range(x.shape[1]):
                h = kept * h + (1 - kept) * u[:, t]
                hs.append(h)
            """
        ),
    ),
}
"""Name -> the op that a loop is, and a model's code."""
REFUSED = {
    "bounded": "h = (g[:, t] * h + u[:, t]).clamp(max=1e3)",
    "halved": "h = g[:, t] * h + u[:, t]; h = torch.where(h > 1e3, h / 2, h)",
    "begun_anew": "h = (0 * h if t == 4000 else g[:, t] * h) + u[:, t]",
    "not_linear": "h = g[:, t] * torch.tanh(h) + u[:, t]",
}
"""Name -> the step of a loop that is no op, three of them for values and texts alone that no probe has."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of all models, in one process."""
    root, folders = tmp_path_factory.mktemp("naive"), list[Path]()
    for key, (_, bodies) in FORMS.items():
        folders.append(save_odd(root / f"naive_{key}", **bodies))
    for key, step in REFUSED.items():
        loop = f"for t in range(x.shape[1]):\n    {step}\n    hs.append(h)"
        folders.append(save_odd(root / f"naive_{key}", **_mlp(loop)))
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("key", FORMS)
def test_a_recurrence_written_as_a_loop_is_the_op(made: dict[str, Any], key: str) -> None:
    found = made[f"naive_{key}"]
    assert_translated(found)
    assert f"torch.ops.onboard.{FORMS[key][0]}(" in found["text"]


@pytest.mark.parametrize("key", REFUSED)
def test_a_loop_that_is_no_op_is_named(made: dict[str, Any], key: str) -> None:
    error = made[f"naive_{key}"].get("error", "")
    assert "a loop with a turn for each token in Mlp (`for t in range(x.shape[1]):`)" in error, (
        error
    )
