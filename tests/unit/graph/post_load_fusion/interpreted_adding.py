"""The back end of docs/adding.md beside float64; `test_adding.py` starts this in Triton's
interpreter.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from tests.support.document_examples import examples, write

PATH = "onboard/ops/linear/triton_softcap.py"


def test_a_back_end_computes_the_same(tmp_path: Path) -> None:
    write(tmp_path, {PATH: examples("adding.md")[PATH]})
    spec = importlib.util.spec_from_file_location("softcap", tmp_path / PATH)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for dtype, error in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        x = (torch.randn(3, 700) * 40).to(dtype)
        found = torch.ops.onboard.triton_softcap(x.T, 20.0)
        assert found.dtype == dtype
        expected = 20.0 * (x.T.double() / 20.0).tanh()
        torch.testing.assert_close(found.double(), expected, rtol=error, atol=error)
