"""Scores that a function divides by a buffer without dimensions, before or after they are masked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_MASKED = "scores = torch.where(seen, scores, least)"
_DIVIDED = "scores = scores / scale"
_TIMES = "scores = scores * scale"
_FUNCTION = """
def attend(q, k, v, seen, least, scale):
    scores = q @ k.transpose(2, 3)
    {first}
    {second}
    return F.softmax(scores, dim=-1) @ v
"""
_CALL = """
y = attend(q, k, v, self.seen[:, :, :t, :t], self.least, self.scale)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_BUFFERS = """
        self.register_buffer("scale", torch.tensor(self.size**{power}))
        self.register_buffer("least", torch.tensor(-1e9))
        square = torch.ones(config.max_position_embeddings, config.max_position_embeddings)
        self.register_buffer("seen", torch.tril(square).bool()[None, None])
"""


@pytest.mark.parametrize(
    ("first", "second", "power"),
    [(_MASKED, _DIVIDED, 0.5), (_DIVIDED, _MASKED, 0.5), (_MASKED, _TIMES, -0.5)],
)
def test_are_those_of_queries_that_are_divided(
    first: str, second: str, power: float, tmp_path: Path
) -> None:
    head = _FUNCTION.format(first=first, second=second)
    folder = save_odd(
        tmp_path / "weighed", head=head, attention=ATTENTION.split("scores =")[0] + _CALL
    )
    file, theta = folder / "modeling_odd.py", "        self.theta = config.rope_theta\n"
    text = file.read_text().replace(theta, theta + _BUFFERS.format(power=power))
    file.write_text(text)
    found = run_apart(GENERATE, [folder])["weighed"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert found["recorded"] == []
    assert "torch_attention" in found["text"]
