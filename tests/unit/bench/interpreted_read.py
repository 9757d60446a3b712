"""The kernel that reads memory, in Triton's interpreter; `test_bench_tune.py` starts this in its
own process.
"""

from __future__ import annotations

import pytest
import torch

from onboard.ops.triton.read import read_all


@pytest.mark.parametrize(
    ("size", "block", "programs"), [(1000, 64, 7), (4096, 128, 8), (5, 16, 3), (1 << 14, 2048, 2)]
)
def test_every_element_is_read_once(size: int, block: int, programs: int) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    data = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    sums = read_all(data, block, programs)
    each = -(-size // programs)
    for program, found in enumerate(sums.tolist()):
        part = data[program * each : (program + 1) * each].double()
        assert found == pytest.approx(
            float(part.sum()), abs=1e-6 * max(1.0, float(part.abs().sum()))
        )
