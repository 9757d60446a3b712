"""Generated kernels against the operators that they replace.

Run by test_mlir_elementwise_fusion.py in a process with TRITON_INTERPRET=1; on a GPU the same tests
run as they are (tests/gpu/test_pointwise_kernels.py).
"""

from __future__ import annotations

import copy
import random
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.experiments.elementwise import triton_pointwise as pointwise
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import Stages
from tests.support.drawing import some_of
from tests.support.graph.fusion import apply
from tests.support.graph.harness import make_context, random_inputs, randomize, rmse
from tests.support.graph.pointwise_graphs import (
    DEVICE,
    RandomGraph,
    context,
    kernels,
    launches,
    without_kernels,
)

ops = torch.ops.onboard
KEY = "mlir_elementwise_fusion"
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
BEFORE_CACHES = list(Stages)[: list(Stages).index(Stages.CACHE_INIT)]
PATTERNS = ("match_rmsnorm_pattern", "match_rope_pattern", "match_swiglu_pattern")


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("turn", some_of([str(turn) for turn in range(5)], always=(), by_chance=2))
def test_random_graphs(turn: str, kind: int) -> None:
    seed = 6 * int(turn) + kind
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    smooth = seed % 2 == 0  # functions that devices compute to the last bit or so
    module = RandomGraph(seed, smooth=smooth, dtype=dtype)
    plain = module.graph(4)
    gm, info, run = apply(KEY, copy.deepcopy(plain), context(), shapes=False)
    assert run.facts == []
    assert info.num_matches == len(kernels(gm)) > 0
    assert launches(gm) < launches(plain)
    meaning = without_kernels(copy.deepcopy(gm))
    torch.manual_seed(seed)
    for tokens in (1, 7):
        inputs = module.inputs(tokens)
        for actual, meant, expected in zip(
            gm(*inputs), meaning(*inputs), module(*inputs), strict=True
        ):
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            assert torch.equal(meant, expected)
            assert torch.equal(actual, expected) or (
                smooth and rmse(actual, expected) <= TOLERANCE[dtype]
            )


def test_what_is_inexact_rounds_results_alone() -> None:
    module = RandomGraph(7, smooth=False, dtype=torch.bfloat16)
    inputs = module.inputs(5)
    wide = [each.float() for each in inputs]
    module.dtype = torch.float32
    gm, _, _ = apply(KEY, module.graph(4), context(), shapes=False)
    module.dtype = torch.bfloat16
    rounded, _, _ = apply(KEY, module.graph(4), context(), shapes=False, exact=False)
    for actual, expected in zip(rounded(*inputs), gm(*wide), strict=True):
        assert rmse(actual, expected) <= 4e-3


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", ["layer", "rms", "added", "bare"])
def test_rows(norm: str, dtype: torch.dtype) -> None:
    def layer(x, y, weight):
        total = (x + y).float()
        centred = total - total.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return (centred * torch.rsqrt(variance + 1e-5)).to(dtype) * weight, total.sum(-1, True) * x

    def rms(x, y, weight):
        return ops.torch_rmsnorm(x, weight, 1e-6) * torch.sigmoid(y)

    def added(x, y, weight):
        normed, total = ops.torch_fused_add_rmsnorm(x, y.neg(), weight, 1e-6)
        return normed * 2, total

    def bare(x, y, weight):
        return x / (x.abs().sum(-1, keepdim=True) + 1)

    function = {"layer": layer, "rms": rms, "added": added, "bare": bare}[norm]

    def inputs(tokens: int) -> list[torch.Tensor]:
        heads = torch.randn(3, tokens, 24, device=DEVICE, dtype=dtype).transpose(0, 1)
        heads = heads.contiguous() if norm in ("added", "bare") else heads
        return [
            heads,
            torch.randn(tokens, 1, 24, device=DEVICE, dtype=dtype),
            torch.randn_like(heads[0, 0]),
        ]

    plain = make_fx(function, tracing_mode="fake")(*inputs(4))
    gm, info, _ = apply(KEY, copy.deepcopy(plain), context(), shapes=False)
    assert (info.num_matches, launches(gm)) == (1, 1)
    for tokens in (4, 1, 70):
        given = inputs(tokens)
        actual, expected = (
            each if isinstance(each, tuple) else (each,) for each in (gm(*given), function(*given))
        )
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert rmse(one, other) <= TOLERANCE[dtype]


def test_mixed_dtypes() -> None:
    """A whole number is rounded to the dtype that an operator computes in; one without dimensions
    does not promote.
    """

    def function(whole, x, wide, scale):
        return (
            whole * x + 1,
            (whole + 3) * 2 - whole,
            whole * scale,
            x + scale,
            x * wide,
            wide / whole,
            whole < wide,
        )

    whole = torch.randint(1, 5000, (6, 8), device=DEVICE)
    x, wide = torch.randn(6, 8, device=DEVICE).bfloat16(), torch.randn(8, device=DEVICE)
    scale = torch.tensor(0.3, device=DEVICE)
    inputs = [whole, x, wide, scale]
    gm, info, _ = apply(
        KEY, make_fx(function, tracing_mode="fake")(*inputs), context(), shapes=False
    )
    assert info.num_matches > 0
    for actual, expected in zip(gm(*inputs), function(*inputs), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_special_values() -> None:
    def function(x, y):
        kept = torch.where(x > 0, F.relu(x).clamp(max=3.0), torch.minimum(x, y))
        return kept * 2 + torch.maximum(kept, y), (x / y).clamp(-2, 2) - x, (x != y) & ~(x < 1)

    values = torch.tensor(
        [0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 65504.0, 1e-8], device=DEVICE
    )
    inputs = torch.cartesian_prod(values, values).unbind(1)
    gm, info, _ = apply(
        KEY, make_fx(function, tracing_mode="fake")(*inputs), context(), shapes=False
    )
    assert info.num_matches > 0
    for actual, expected in zip(gm(*inputs), function(*inputs), strict=True):
        assert torch.allclose(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "model_type",
    some_of(["llama", "gemma2", "gpt_neox", "cohere"], always=("llama",), by_chance=1),
)
def test_exported_models(tmp_path, model_type: str) -> None:
    patterns = model_type != "llama"  # its norms and rotations as they were exported
    run = make_context(tmp_path, model_type, mode="hf")
    run.device = torch.device(DEVICE)
    config = AutoConfig.from_pretrained(run.factory.checkpoint)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, random.randrange(10**6))
    model.save_pretrained(run.factory.checkpoint)
    pipeline = [
        each
        for each in load_pipeline({KEY: {"enabled": True}})
        if each.config.stage in BEFORE_CACHES
    ]
    gm = Pipeline([each for each in pipeline if patterns or each.key not in PATTERNS]).run(run)

    entry = next(entry for entry in run.history if entry.key == KEY)
    assert entry.num_matches == len(kernels(gm)) > 1
    assert entry.summary.endswith(f"operators in {entry.num_matches} kernels")
    assert run.facts == []
    ids, positions = random_inputs(2, 9)
    rows = torch.tensor([8, 0, 3])
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits[:, rows]
        actual = gm(ids.to(DEVICE), positions.to(DEVICE), rows.to(DEVICE)).cpu()
    assert rmse(actual, expected) <= (1e-6 if DEVICE == "cpu" else 1e-3)


def test_what_runs_is_what_was_generated(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    x = torch.randn(4, 8, device=DEVICE)

    def run() -> None:
        gm = make_fx(lambda x: (x + 17) * 3 - 2, tracing_mode="fake")(x)
        pointwise._kernel.cache_clear()
        gm, _, _ = apply(KEY, gm, context(), shapes=False)
        assert torch.equal(gm(x), (x + 17) * 3 - 2)

    run()
    (file,) = (tmp_path / "kernels").iterdir()
    source = file.read_text("utf-8")
    assert re.fullmatch(r"pointwise_[0-9a-f]{32}\.py", file.name)
    file.write_text(source.replace("x0", "0 * x0"), "utf-8")
    run()
    assert file.read_text("utf-8") == source
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder", "utf-8")  # nothing can be kept
    run()
    monkeypatch.setenv("ONBOARD_CACHE", "")  # nothing is to be kept
    run()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_kernels_are_captured() -> None:
    module = RandomGraph(3, dtype=torch.bfloat16)
    gm, _, _ = apply(KEY, module.graph(4), context(), shapes=False)
    inputs = module.inputs(6)
    gm(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gm(*inputs)
    for kept, fresh in zip(inputs, module.inputs(6), strict=True):
        kept.copy_(fresh)
    graph.replay()
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(captured, gm(*inputs), strict=True)
    )
