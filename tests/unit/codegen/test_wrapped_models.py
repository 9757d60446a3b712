"""Models of people's own inside wrappers: positions that nobody hands on, whole tables that are cut and
looked up, masks of truth values; and texts that change with their length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd

TABLES = """
class Tables(nn.Module):
    def __init__(self, size, length, theta):
        super().__init__()
        rates = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length, dtype=rates.dtype), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos()AXES, persistent=False)
        self.register_buffer("sin", angles.sin()AXES, persistent=False)

    def forward(self, x, length=None):
        return self.cos[CUT].to(x.dtype), self.sin[CUT].to(x.dtype)


def half_turned(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(q, k, cos, sin, position_ids):
    cos, sin = cosBARE[position_ids].unsqueeze(1), sinBARE[position_ids].unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
"""
ATTENTION = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size).transpose(1, 2)
k = k.view(b, t, self.heads, self.size).transpose(1, 2)
v = v.view(b, t, self.heads, self.size).transpose(1, 2)
cos, sin = self.tables(v, length=t)
q, k = turned(q, k, cos, sin, position_ids)
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
y = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
WHOLE = """
class Whole(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = OddModel(config)

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.inner(input_ids, position_ids=position_ids)
        if attention_mask is not None:
            x = x.masked_fill(~attention_mask.unsqueeze(-1), 0.0)
        return x


class OddForCausalLM(
"""
_SIZES = "self.size, config.max_position_embeddings, config.rope_theta"
_WRAPPED = {
    "self.theta = config.rope_theta": f"self.tables = Tables({_SIZES})",
    "class OddForCausalLM(": WHOLE.strip("\n"),
    "self.model = OddModel(config)": "self.model = Whole(config)",
    "self.model(input_ids, position_ids)": "self.model(input_ids, attention_mask)",
}


def _wrapped(folder: Path, axes: str, cut: str, bare: str) -> Path:
    """Save a model whose positions are counted inside a wrapper that hands none on."""
    head = TABLES.replace("AXES", axes).replace("CUT", cut).replace("BARE", bare)
    save_odd(folder, head=head, attention=ATTENTION)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    text = code.read_text()
    for old, new in _WRAPPED.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    code.write_text(text)
    text = config.read_text().replace("norm_eps=1e-5,", "norm_eps=1e-5, backward=False,")
    kept = "self.norm_eps = norm_eps\n"
    config.write_text(text.replace(kept, f"{kept}        self.backward = backward\n"))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of the models."""
    folder = tmp_path_factory.mktemp("wrapped")
    longer = "x = self.embed(input_ids) + input_ids.shape[1] / 50\nreturn self.norm(self.layers[0](x, position_ids))"
    folders = [
        _wrapped(folder / "plain_table", "", ":length", ""),
        _wrapped(folder / "wide_table", "[None, None]", ":, :, :length", ".squeeze(1).squeeze(0)"),
        save_odd(folder / "by_length", model=longer),
    ]
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("name", ["plain_table", "wide_table"])
def test_positions_that_a_wrapper_does_not_hand_on_are_looked_up_once(
    name: str, made: dict[str, Any]
) -> None:
    model = made[name]
    assert model.get("error") is None
    assert model["worst"] < 1e-5
    looked_up = "".join(model["text"].split()).count("[position_ids]")
    assert looked_up == 2  # of cos and sin, in the module alone


def test_a_mask_of_integers_is_given_as_truth_values_where_code_needs_these(
    made: dict[str, Any],
) -> None:
    (fact,) = [fact for fact in made["plain_table"]["facts"] if "truth values" in fact]
    assert fact.endswith("fails with an attention_mask of integers; it gets truth values")


def test_a_field_of_a_config_may_be_called_like_a_method_of_tensors(made: dict[str, Any]) -> None:
    assert "self.backward = backward" in made["plain_table"]["text"]


def test_a_text_that_changes_with_what_follows_it_is_refused(made: dict[str, Any]) -> None:
    assert "a text has other logits as the beginning of a longer one" in made["by_length"]["error"]
