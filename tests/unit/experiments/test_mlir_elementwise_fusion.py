"""Which operators are fused with which; what the kernels compute is tested in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import onboard
from onboard.content import content_path
from onboard.experiments.elementwise.program import parse_program, steps
from onboard.graph.transform import TransformInfo
from tests.support.apart import MARKS, run_apart
from tests.support.graph.fusion import apply, targets
from tests.support.graph.pointwise_graphs import context, kernels, without_kernels

KEY = "mlir_elementwise_fusion"
PACKAGE = Path(onboard.__file__).parent
TRANSFORMS = content_path("transforms")
NEEDING_XDSL = (
    "canonicalize",
    "dialect",
    "interpret",
    "fused_regions",
    "pointwise_programs",
    "program",
    "kernel_source",
)


@pytest.mark.parametrize("marks", MARKS)
def test_kernels_are_right_in_the_interpreter(marks: str, tmp_path: Path) -> None:
    folder, cache = Path(__file__).parent, str(tmp_path)
    run_apart(folder, "interpreted_pointwise.py", marks=marks, ONBOARD_CACHE=cache)


def fused(
    function: Callable[..., Any], *inputs: Tensor, **fields: Any
) -> tuple[fx.GraphModule, TransformInfo]:
    """Fuse a function's graph as on a GPU, and check what the graph then means."""
    plain = make_fx(function, tracing_mode="fake")(*inputs)
    on_gpu = context()
    on_gpu.device = torch.device("cuda")
    gm, info, _ = apply(KEY, plain, on_gpu, shapes=False, **fields)
    gm.graph.lint()
    meaning = without_kernels(copy.deepcopy(gm))(*inputs)
    assert torch.equal(meaning, function(*inputs))
    return gm, info


def operations(gm: fx.GraphModule) -> list[list[str]]:
    """Return the operations of each kernel."""
    return [
        [step.name.removeprefix("ew.") for step in steps(parse_program(str(node.args[1])))]
        for node in kernels(gm)
    ]


def test_a_chain_is_one_kernel() -> None:
    gm, info = fused(lambda x, y: torch.tanh((x + y) * 0.5) - y, torch.randn(3, 8), torch.randn(8))
    assert operations(gm) == [["add", "constant", "mul", "tanh", "sub"]]
    assert (info.num_matches, info.summary) == (1, "4 operators in 1 kernels")
    assert len(targets(gm)) == 2  # the kernel and its result


def test_no_kernel_needs_its_own_results() -> None:
    gm, _ = fused(lambda x: (a := x + 1).exp() * torch.cumsum(a, 0).neg(), torch.randn(3, 8))
    assert sorted(operations(gm)) == [["constant", "add", "exp"], ["neg", "mul"]]


def test_no_two_kernels_need_each_other() -> None:
    def function(x: Tensor, t: Tensor) -> Tensor:
        a, c = x + 1, t + 1
        total = a.sum(0)
        b = c * total
        return (a + c.expand(3, 8).cumsum(0)) * b.cumsum(0)

    gm, _ = fused(function, torch.randn(3, 8), torch.randn(8))
    assert operations(gm) == [["constant", "add", "mul"], ["add", "mul"]]


def test_a_small_producer_joins_when_nobody_else_reads_it() -> None:
    scale = torch.randn(8)
    gm, _ = fused(lambda x, s: x * (s + 1), torch.randn(3, 8), scale)
    assert operations(gm) == [["constant", "add", "mul"]]
    gm, info = fused(lambda x, s: (x * (t := s + 1)).sum(0) * t, torch.randn(3, 8), scale)
    assert info.num_matches == 0


def test_reductions_join_what_works_on_their_rows() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    gm, _ = fused(
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1) * w, x, weight
    )
    assert operations(gm) == [["mul", "row_mean", "constant", "add", "rsqrt", "mul", "mul"]]
    gm, _ = fused(lambda x, w: torch.rsqrt(x.mean(-1, keepdim=True) + 1.5).neg(), x.abs(), weight)
    # What leaves is smaller than the rows
    assert operations(gm) == [["constant", "add", "rsqrt", "neg"]]
    for others in (
        lambda x: x.mean(0, True),
        lambda x: x.mean(-1).sum(),
        lambda x: x.mean(-1, True, dtype=torch.double),
    ):
        gm, _ = fused(partial(_scaled_by, others), x, weight)
        assert not any("row" in name for names in operations(gm) for name in names)


def _scaled_by(function: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    return (x + weight) * function(x - weight).float()


def test_round_trips_need_no_kernel() -> None:
    gm, info = fused(lambda x: F.linear(x.float().bfloat16(), x), torch.randn(4, 4).bfloat16())
    assert info.num_matches == 0
    assert not any("to" in target for target in targets(gm))


def test_operators_to_bypass_and_the_least_number() -> None:
    inputs = torch.randn(3, 8), torch.randn(3, 8)
    gm, _ = fused(lambda x, y: F.gelu(x + y) * y + 1, *inputs, bypass_ops=["gelu"])
    assert operations(gm) == [["mul", "constant", "add"]]
    assert targets(gm).count("gelu.default") == 1
    _, info = fused(lambda x, y: F.gelu(x + y) * y, *inputs, min_ops=4)
    assert info.num_matches == 0


def test_what_cannot_be_said_exactly_stays() -> None:
    x, other = torch.rand(3, 8), torch.rand(3, 8)
    for function in (
        lambda x, y: torch.add(x, y, alpha=2) + 1,
        lambda x, y: torch.div(x, y, rounding_mode="floor") + 1,
        lambda x, y: (x.double() + 1).float() * y.pow(1.7),
        lambda x, y: F.softplus(x, beta=2) * F.softplus(y, threshold=5.0).to(torch.int32),
    ):
        _, info = fused(function, x, other)
        assert info.num_matches == 0


def test_without_a_gpu_the_graph_stays_and_a_fact_says_so() -> None:
    gm = make_fx(lambda x: (x + 1) * 2)(torch.randn(3))
    before = str(gm.graph)
    gm, info, run = apply(KEY, gm, shapes=False)
    assert info.skipped
    assert str(gm.graph) == before
    assert run.facts == [
        f"{KEY} was skipped: its kernels need triton and a GPU, and the run is on cpu"
    ]


def test_without_xdsl_the_graph_stays_and_a_fact_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "xdsl" else find(name, *rest),
    )
    gm, info, run = apply(KEY, make_fx(lambda x: (x + 1) * 2)(torch.randn(3)), shapes=False)
    assert info.skipped
    assert run.facts == [
        f"{KEY} was skipped: it needs the package xdsl. Install it with pip install 'onboard[mlir]'"
    ]


def test_xdsl_is_imported_where_it_is_needed_and_nowhere_else() -> None:
    needing = [PACKAGE / f"experiments/elementwise/{name}.py" for name in NEEDING_XDSL]
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in needing}
    for path in {*PACKAGE.rglob("*.py"), *TRANSFORMS.rglob("*.py")} - set(needing):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = {
                    getattr(node, "module", None) or "",
                    *(alias.name for alias in node.names),
                }
                assert not imported & names, path
                assert not any(name.split(".")[0] == "xdsl" for name in imported), path
