"""Triton decides when it is imported whether kernels are interpreted, so they are tested in a
process of their own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import onboard.ops
from onboard.errors import OnboardError
from onboard.ops.library import op_sources
from tests.support.apart import MARKS, run_apart

ops = torch.ops.onboard

INTERPRETED = tuple(
    f"interpreted_{name}.py"
    for name in (
        "kernels",
        "fused",
        "linear",
        "many_tokens",
        "fp8",
        "codes",
        "four_bits",
        "int8",
        "mixers",
        "recurrences",
        "moe",
        "quantised_moe",
        "invariant",
        "lora",
        "peer_sum",
        "long_sum",
        "rope_attention",
        "sampling",
    )
)


@pytest.mark.slow
@pytest.mark.parametrize("files", [INTERPRETED[::2], INTERPRETED[1::2]], ids=["one", "other"])
@pytest.mark.parametrize("marks", MARKS)
def test_kernels_are_right_in_the_interpreter(marks: str, files: Sequence[str]) -> None:
    run_apart(Path(__file__).parent, *files, marks=marks)


def test_a_tensor_on_the_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(OnboardError, match="Use the torch op of the same name"):
        ops.triton_rmsnorm(torch.randn(2, 8), torch.ones(8), 1e-6)


@pytest.mark.parametrize(
    "name", sorted(name for name in op_sources() if name.startswith("triton_"))
)
def test_both_back_ends_have_the_same_signature(name: str) -> None:
    names = name.replace("triton_", "torch_"), name
    schemas = [str(getattr(ops, each).default._schema) for each in names]
    assert schemas[0].replace("torch_", "triton_") == schemas[1]


@pytest.mark.parametrize(
    "name", sorted(name for name in op_sources() if name.startswith("invariant_"))
)
def test_what_is_invariant_takes_the_place_of_a_kernel(name: str) -> None:
    schema = str(getattr(ops, name.replace("invariant_", "triton_")).default._schema)
    assert schema.replace("triton_", "invariant_") == str(getattr(ops, name).default._schema)


def test_without_triton_the_reference_ops_remain() -> None:
    script = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else find(name, *rest)
sys.modules["triton"] = None
import torch, onboard.ops
assert not onboard.ops.has_triton()
assert not hasattr(torch.ops.onboard, "triton_rmsnorm")
torch.ops.onboard.torch_rmsnorm(torch.ones(2, 4), torch.ones(4), 1e-6)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_triton_is_here() -> None:
    assert onboard.ops.has_triton()
