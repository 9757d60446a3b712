"""Rotary tables that the first call of a forward makes, as long as its text."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd
from tests.unit.codegen.test_wrapped_models import ATTENTION

_TABLES = """
class Tables(nn.Module):
    def __init__(self, size, theta):
        super().__init__()
        self.size, self.theta = size, theta
        self.longest = -1

    def _make(self, length, device, dtype):
        self.longest = length
        rates = 1.0 / (self.theta ** (torch.arange(0, self.size, 2).float().to(device) / self.size))
        angles = torch.einsum("i,j->ij", torch.arange(length, device=device, dtype=rates.dtype), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos()[None, None, :, :].to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin()[None, None, :, :].to(dtype), persistent=False)

    def forward(self, x, length=None):
        if length > self.longest:
            self._make(length, x.device, x.dtype)
        return self.cos[:, :, :length, ...].to(x.dtype), self.sin[:, :, :length, ...].to(x.dtype)


def half_turned(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def turned(q, k, cos, sin, position_ids):
    cos, sin = cos.squeeze(1).squeeze(0), sin.squeeze(1).squeeze(0)
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin
"""


def test_a_table_of_the_text_is_that_of_the_positions_which_look_it_up(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_lazy", head=_TABLES, attention=ATTENTION)
    file, made = folder / "modeling_odd.py", "self.theta = config.rope_theta"
    tables = "self.tables = Tables(self.size, config.rope_theta)"
    file.write_text(file.read_text().replace(made, tables))
    found = run_apart(GENERATE, [folder])["odd_lazy"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "torch.arange(length" not in found["text"]  # a step has tokens of several texts
    assert not found["recorded"]
