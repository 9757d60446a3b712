"""A sum over the ranks, the residual addition and the norm behind it as one op."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import onboard.ops  # noqa: F401  (registers torch.ops.onboard)
from onboard.parallel.ranks import current_ranks
from onboard.verify.error import rmse_ratio
from tests.support.ranks import Group
from tests.support.sharding.sharded_runs import FUSION, run
from tests.support.sharding.zoo import save_family

OP = "fused_allreduce_residual_rmsnorm"
EPS = 1e-3


def _summand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _normed(dtype: torch.dtype, cast: torch.dtype | None, wide: bool) -> list[torch.Tensor]:
    x, residual = _summand(current_ranks().rank, dtype), _summand(7, torch.float32)
    weight = torch.linspace(0.5, 2, 8).to(dtype)
    op = getattr(torch.ops.onboard, f"torch_{OP}")
    return list(op(x, residual, weight, EPS, cast, wide, "mlp"))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("dtype", "cast"), [(torch.float32, None), (torch.bfloat16, torch.bfloat16)]
)
def test_all_ranks_have_the_norm_of_the_whole_sum(
    two_ranks: Group, dtype: torch.dtype, cast: torch.dtype | None, wide: bool
) -> None:
    both = _summand(0, dtype).double() + _summand(1, dtype).double()
    total = both.to(dtype).double() + _summand(7, torch.float32).double()
    scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = total * scale * torch.linspace(0.5, 2, 8).double()
    for normed, found in two_ranks.run(_normed, dtype, cast, wide):
        limit = 1e-6 if dtype == torch.float32 else 0.02
        assert normed.dtype == dtype
        assert found.dtype == torch.float32
        assert rmse_ratio(normed.double(), expected) < limit
        assert rmse_ratio(found.double(), total) < (1e-6 if dtype == torch.float32 else 0.01)


def test_each_residual_addition_of_a_model_takes_its_sum_in(
    two_ranks: Group, tmp_path: Path
) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    folder = save_family(tmp_path, "llama", seed)
    alone = run(folder, 1, seed, {FUSION: {"enabled": True}})
    assert alone.matches[FUSION] == 0
    assert not alone.fused[f"torch_{OP}"]
    for own in two_ranks.run(run, folder, 2, seed, {FUSION: {"enabled": True}}):
        assert own.matches[FUSION] == alone.matches["fuse_add_rms_norm"] == 4
        assert not own.matches["fuse_add_rms_norm"]
        assert own.fused[f"torch_{OP}"] == 4
        assert own.calls["dist_all_reduce"] == own.fused["dist_all_reduce"] + 4
        assert not own.fused["torch_fused_add_rmsnorm"]
        assert rmse_ratio(own.logits, alone.logits) < 1e-5
        assert own.tokens == alone.tokens


def test_sums_take_in_additions_that_no_norm_has_taken(two_ranks: Group, tmp_path: Path) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    folder = save_family(tmp_path, "llama", seed)
    apart = dict.fromkeys(("fuse_add_rms_norm", FUSION), {"enabled": False})
    alone = run(folder, 1, seed, apart)
    assert alone.matches["fuse_allreduce_residual"] == 0
    for own in two_ranks.run(run, folder, 2, seed, apart):
        assert own.matches["fuse_allreduce_residual"] == 4
        assert rmse_ratio(own.logits, alone.logits) < 1e-5
        assert own.tokens == alone.tokens
