"""The kernels of low-rank adapters against float64; `test_triton_kernels.py` starts this in Triton's
interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.graph.fx import arguments, nodes_of
from onboard.graph.lora.without_adapters import without_adapters
from onboard.runtime.sampling_params import SamplingParams
from tests.support.ops.lora import Adapted
from tests.support.ops.naive import relative_error
from tests.support.ops.ragged import DEVICE
from tests.support.runtime.adapters import make_adapter
from tests.support.runtime.tiny import make_tiny

# The interpreter truncates where hardware rounds, hence twice the usual error of bfloat16.
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2.5e-2}
ON_DEVICE = {"device": DEVICE, "compile_backend": "torch-simple"}
SHAPES = [
    (37, 40, [24, 8, 8], 3, 5),
    (5, 300, [150], 2, 16),
    (16, 520, [48, 48], 1, 80),
    (9, 40, [24, 8, 8, 40, 150], 19, 5),
    (8, 2100, [40, 40], 7, 16),
    (3, 40, [300], 1, 257),
]
"""Tokens, inputs, outputs of layers, adapters, rank."""


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_token_has_its_own_adapter(
    dtype: torch.dtype, shape: tuple[int, int, list[int], int, int]
) -> None:
    adapted = Adapted.drawn(*shape, dtype=dtype, device=DEVICE)
    actual = torch.ops.onboard.triton_lora(*adapted.arguments())
    assert actual.dtype == dtype
    assert relative_error(actual, adapted.expected()) < DTYPES[dtype]


@pytest.mark.drawn
@pytest.mark.parametrize("tokens", [1, 16, 17])
@pytest.mark.parametrize("sizes", [[40, 40], [140]])
def test_halves_are_activated_and_multiplied(tokens: int, sizes: list[int]) -> None:
    """Twice, as the second step finds what the first one has left."""
    adapted = Adapted.drawn(tokens, 150, sizes, 3, 20, dtype=torch.float32, device=DEVICE)
    for _ in range(2):
        actual = torch.ops.onboard.triton_lora(*adapted.arguments(), "silu")
        gate, up = adapted.expected().chunk(2, dim=-1)
        assert relative_error(actual, torch.nn.functional.silu(gate) * up) < 1e-6
        adapted.adapters = (adapted.adapters + 1) % 4


def test_outputs_may_have_gaps_and_no_token_an_adapter() -> None:
    adapted = Adapted.drawn(20, 40, [24, 8], 2, 16, dtype=torch.float32, device=DEVICE)
    wide = torch.randn(20, 64, device=DEVICE)
    adapted.outputs = wide[:, 16:48]
    adapted.adapters.zero_()
    actual = torch.ops.onboard.triton_lora(*adapted.arguments())
    torch.testing.assert_close(actual, wide[:, 16:48], rtol=0, atol=0)


def test_steps_without_adapters_have_the_gate_in_their_linear_layer(tmp_path: Path) -> None:
    base = make_tiny(tmp_path, hidden_size=32, num_hidden_layers=2)
    folder = make_adapter(tmp_path / "own", base, ["up_proj", "down_proj"]).folder
    backends = dict.fromkeys(("choose_lora_adapters", "fuse_linears"), {"backend": "triton"})
    transforms = {**backends, "call_ops_directly": {"enabled": False}}
    engine = base.engine(
        dtype="bfloat16", lora={"own": str(folder)}, transforms=transforms, **ON_DEVICE
    )
    plain, ops = without_adapters(engine.gm), torch.ops.onboard
    assert plain is not None
    for gm, op in ((engine.gm, ops.triton_lora), (plain, ops.triton_fused_linear)):
        found = [arguments(node)["activation"] for node in nodes_of(gm, op)]
        assert sorted(filter(None, found)) == ["silu", "silu"]
        assert not nodes_of(gm, ops.torch_silu_and_mul, ops.triton_silu_and_mul)


def test_a_batch_of_requests(tmp_path: Path) -> None:
    base = make_tiny(tmp_path, hidden_size=32, num_hidden_layers=1)
    layers = (["q_proj", "v_proj"], ["k_proj", "gate_proj", "down_proj"])
    adapters = {
        str(i): make_adapter(tmp_path / str(i), base, each) for i, each in enumerate(layers)
    }
    folders = {name: str(each.folder) for name, each in adapters.items()}
    transforms = {
        "choose_lora_adapters": {"backend": "triton"},
        "call_ops_directly": {"enabled": False},
    }
    engine = base.engine(lora=folders, transforms=transforms, **ON_DEVICE)
    targets = " ".join(str(node.target) for node in engine.gm.graph.nodes)
    assert "triton_lora" in targets
    assert "silu_and_mul" not in targets  # the call behind gate and up does that, too
    sources = {None: base, **adapters}
    asked = [
        engine.submit([3, 4, 5], SamplingParams(max_tokens=4, temperature=0, lora=name))[0]
        for name in sources
    ]
    engine.run()
    for request, source in zip(asked, sources.values(), strict=True):
        assert request.generated == source.greedy([3, 4, 5], 4)
