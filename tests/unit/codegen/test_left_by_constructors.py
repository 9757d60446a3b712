"""A table that the first module of a class makes and leaves at the class, for the others to find."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
class Turned(nn.Module):
    _table: torch.Tensor | None = None

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size // config.num_attention_heads
        if Turned._table is None:
            Turned._table = self._made(config.max_position_embeddings, size, config.rope_theta)
        self.register_buffer("table", self._table, persistent=False)

    @classmethod
    def _made(cls, length, size, theta):
        rates = 1.0 / (theta ** (torch.arange(0, size, 2)[: size // 2].float() / size))
        angles = torch.outer(torch.arange(length), rates)
        return torch.polar(torch.ones_like(angles), angles)

    def rows(self, shape, first, last):
        rows = self.table[first:last]
        ndim = len(shape)
        sizes = [d if i == AXIS or i == ndim - 1 else 1 for i, d in enumerate(shape)]
        return rows.view(*sizes)

    def forward(self, q, k, first=0):
        q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        last = first + q_.shape[1]
        rows = self.rows(q_.shape, first, last)
        q, k = (torch.view_as_real(x * rows).flatten(3).type_as(x.real) for x in (q_, k_))
        return q, k
"""
_ATTENTION = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
q, k = self.rotary(q, k)
q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""


def test_each_module_makes_what_the_first_leaves_at_its_class(tmp_path: Path) -> None:
    head = _HEAD.replace("AXIS", "1")
    folder = save_odd(tmp_path / "odd_left_once", head=head, attention=_ATTENTION)
    found = run_apart(GENERATE, [with_rotary(folder, "Turned(config)")])["odd_left_once"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "Turned._table" not in found["text"]
    assert any(fact.startswith("Turned._table: of the first model") for fact in found["facts"])


def test_a_first_module_that_makes_another_table_is_refused(tmp_path: Path) -> None:
    """The second layer finds that of the first, which is not what it would make itself."""
    head = _HEAD.replace("AXIS", "1").replace(
        "config.rope_theta)", "config.rope_theta + 90 * layer)"
    )
    head = head.replace("def __init__(self, config)", "def __init__(self, config, layer)")
    folder = save_odd(tmp_path / "odd_left_first", head=head, attention=_ATTENTION)
    with_rotary(folder, "Turned(config, index)")
    file = folder / "modeling_odd.py"
    text = file.read_text().replace(
        "class Attention(nn.Module):\n    def __init__(self, config)",
        "class Attention(nn.Module):\n    def __init__(self, config, index)",
    )
    file.write_text(text.replace("Attention(config)", "Attention(config, index)"))
    found = run_apart(GENERATE, [folder])["odd_left_first"]
    assert "differs from" in found["error"]
