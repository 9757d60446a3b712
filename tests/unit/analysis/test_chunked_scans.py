"""Mamba 2's scan is found where a method writes it out, and written as the op that it is."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.analysis.recognise.scans.chunked_scans import match_stretch
from onboard.analysis.recognise.scans.scan_loops import Match
from onboard.analysis.recognise.scans.watch import LoopCall, loops_watched
from onboard.analysis.spec_blocks import LoopParameters
from onboard.testing import fresh_seed
from tests.unit.codegen.conftest import HEAD, translate
from tests.unit.codegen.test_own_code import _made, _written

__all__ = ["translate"]

SCAN = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_groups, self.heads, self.head_dim, self.chunk_size = 2, 4, 3, 8
        self.limit = config.limit
        self.in_proj = nn.Linear(6, 36)
        self.A_log = nn.Parameter(torch.linspace(-1, 1, 4))
        self.D = nn.Parameter(torch.linspace(1, 2, 4))
        self.dt_bias = nn.Parameter(torch.linspace(-0.5, 0.5, 4))

    def forward(self, x, cache=None):
        batch, length, _ = x.shape
        x, B, C, dt = self.in_proj(x).split([12, 10, 10, 4], dim=-1)
        A = -torch.exp(self.A_log.float())
        if cache is not None:
            dt = nn.functional.softplus(dt + self.dt_bias)
            y = cache * dt
        else:
            dt = nn.functional.softplus(dt + self.dt_bias)
            dt = torch.clamp(dt, self.limit[0], self.limit[1])
            x = x.reshape(batch, length, -1, self.head_dim).float()
            B, C = [each.reshape(batch, length, self.n_groups, -1) for each in (B, C)]
            B = B.repeat_interleave(self.heads // self.n_groups, dim=2)
            C = C.repeat_interleave(self.heads // self.n_groups, dim=2)
            total = torch.cumsum(A * dt, dim=1)
            kept = total[:, :, None] - total[:, None]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            kept = torch.exp(kept.masked_fill(later[None, :, :, None], -torch.inf))
            weights = kept * (C[:, :, None] * B[:, None]).sum(-1) * dt[:, None]
            y = torch.einsum("blsh,bshp->blhp", weights, x) + self.D[..., None] * x
            y = y.reshape(batch, length, -1)
            if cache is not None:
                cache.copy_(y)
        return y.tanh()
"""
FOUND = ("x", "A", "B", "C", "self.D", "dt", "self.dt_bias", "self.n_groups")


def _matched(text: str, folder: Path, limit: tuple[float, float]) -> Match | None:
    """Return what is found of the scan of a text's class in two calls."""
    seed = fresh_seed()
    torch.manual_seed(seed)
    path = folder / f"chunks_{seed}.py"
    path.write_text(HEAD + text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Toy(type("Config", (), {"limit": limit}))
    calls: list[LoopCall] = []
    with torch.no_grad(), loops_watched(nn.Sequential(model), calls):
        for shape in ((2, 9, 6), (1, 21, 6)):
            model(torch.randn(shape))
    assert [call.loop.index for call in calls] == [1, 1]
    return match_stretch(calls)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.4, 0.7)])
def test_a_stretch_is_the_scan_by_what_it_computes(
    limit: tuple[float, float], tmp_path: Path
) -> None:
    match = _matched(SCAN, tmp_path, limit)
    assert match is not None
    assert (match.op, match.arguments, match.result) == ("torch_ssm", FOUND, "y")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ self.D[..., None] * x", "+ self.D[..., None] * x.flip(1)"),
        ("torch.cumsum(A * dt", "torch.cumsum(A * dt * 1.01"),
        ("B.repeat_interleave(self.heads // self.n_groups, dim=2)", "B.repeat(1, 1, 2, 1)"),
        (
            "dt = torch.clamp(dt,",
            "dt = torch.clamp(dt, 0.6, 0.8)\n            dt = torch.clamp(dt,",
        ),
    ],
    ids=["skip", "decay", "groups", "bounds"],
)
def test_what_is_almost_the_scan_is_none(old: str, new: str, tmp_path: Path) -> None:
    assert SCAN.count(old) == 1
    assert _matched(SCAN.replace(old, new), tmp_path, (0.0, float("inf"))) is None


def test_a_stretch_is_written_as_the_op(translate: Callable[..., tuple[Any, str, str]]) -> None:
    found = LoopParameters(
        op="torch_ssm",
        arguments=list(FOUND),
        turned=[],
        result="y",
        joined=None,
        method="forward",
        index=1,
    )
    sizes = {"limit": (0.4, 0.7)}
    state, _, forward = translate(SCAN, sizes, specialised=True, loops={"Toy": [found]})
    assert "torch.ops.onboard.torch_ssm" in forward
    assert "cumsum" not in forward
    ours, theirs = _made(_written(state), sizes), _made(SCAN, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 13, 6, generator=torch.Generator().manual_seed(fresh_seed()))
    torch.testing.assert_close(ours(x), theirs(x))
