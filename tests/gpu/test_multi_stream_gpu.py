"""Branches on a real second stream, made slow, with memory that is reused at once: eagerly and in a
replayed graph.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from onboard.experiments.side_branches import own_part, run_aside
from onboard.graph.compile.streams import begin_aux, wait_aux
from onboard.graph.fx import nodes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE, TOKENS, LAYERS, ROUNDS = 512, 256, 4, 60
CYCLES = 300_000
aten = torch.ops.aten


def slow(x: Tensor) -> Tensor:
    """Let the current stream wait a while."""
    torch.cuda._sleep(CYCLES)
    return x


def _weights() -> dict[str, Tensor]:
    return {f"w{i}": torch.randn(SIZE, SIZE, device="cuda") * SIZE**-0.5 for i in range(4 * LAYERS)}


def _graph(weights: dict[str, Tensor], slow_branch: bool, aside: bool) -> fx.GraphModule:
    """Return layers of a main path and a branch from one tensor, which are added up; one of the two
    is slow.
    """
    graph, root = fx.Graph(), nn.Module()
    for name, tensor in weights.items():
        root.register_buffer(name, tensor)
    x, branches = graph.placeholder("x"), []

    def product(node: Any, index: int) -> Any:
        hidden = graph.call_function(aten.mm.default, (node, graph.get_attr(f"w{index}")))
        return graph.call_function(aten.tanh.default, (hidden,))

    for layer in range(LAYERS):
        fork = graph.call_function(aten.mul.Tensor, (x, 1.5))
        paths = []
        for path in range(2):
            node = graph.call_function(slow, (fork,)) if slow_branch == bool(path) else fork
            paths.append(product(product(node, 4 * layer + 2 * path), 4 * layer + 2 * path + 1))
        x = graph.call_function(
            aten.add.Tensor, (x, graph.call_function(aten.add.Tensor, tuple(paths)))
        )
        branches.append((fork, paths))
    graph.output(x)
    gm = fx.GraphModule(root, graph)
    for fork, (main, branch) in branches:
        assert not aside or run_aside(gm, own_part([branch], [main], fork))
    gm.recompile()
    return gm


def _pair(slow_branch: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    weights = _weights()
    return _graph(weights, slow_branch, aside=True), _graph(weights, slow_branch, aside=False)


def _soil() -> None:
    """Write to whatever memory the main stream has free."""
    for _ in range(8):
        torch.full((TOKENS, SIZE), float("nan"), device="cuda")


def _differences(gm: fx.GraphModule, plain: fx.GraphModule, rounds: int = ROUNDS) -> int:
    wrong = 0
    for _ in range(rounds):
        x = torch.randn(TOKENS, SIZE, device="cuda")
        expected = plain(x)
        torch.cuda.synchronize()
        _soil()
        actual = gm(x.clone())
        _soil()
        wrong += not torch.equal(actual, expected)
    return wrong


@pytest.mark.parametrize("slow_branch", [True, False])
@torch.inference_mode()
def test_branches_compute_what_one_stream_does(slow_branch: bool) -> None:
    gm, plain = _pair(slow_branch)
    assert len(nodes_of(gm, begin_aux)) == LAYERS
    main = torch.cuda.current_stream()
    assert _differences(gm, plain) == 0
    assert torch.cuda.current_stream() == main


def unwaited(ended: Any, *kept: Tensor) -> tuple[Tensor, ...]:
    """Return a branch's results without waiting for it."""
    return ended[1]


@torch.inference_mode()
def test_a_missing_wait_would_be_seen() -> None:
    gm, plain = _pair(slow_branch=True)
    for node in nodes_of(gm, wait_aux):
        node.target = unwaited
    gm.recompile()
    assert _differences(gm, plain) > 0


@pytest.mark.parametrize("slow_branch", [True, False])
@torch.inference_mode()
def test_a_captured_graph_forks_and_joins_at_every_replay(slow_branch: bool) -> None:
    gm, plain = _pair(slow_branch)
    static = torch.randn(TOKENS, SIZE, device="cuda")
    for _ in range(2):
        gm(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = gm(static)
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, pool=graph.pool()):  # takes what the first has let go of
        second = gm(gm(static))
    for replay in range(ROUNDS):
        x = torch.randn(TOKENS, SIZE, device="cuda")
        static.copy_(x)
        expected = plain(x)
        _soil()
        (graph if replay % 3 else other).replay()
        _soil()
        assert torch.equal(output, expected) if replay % 3 else torch.equal(second, plain(expected))


@torch.inference_mode()
def test_the_branch_of_a_captured_graph_runs_beside_the_main_path() -> None:
    gm, plain = _pair(slow_branch=True)
    # The main path is slow, too: together they take twice as long
    for node in nodes_of(gm, aten.mm.default)[:1]:
        with gm.graph.inserting_before(node):
            node.replace_input_with(node.args[0], gm.graph.call_function(slow, (node.args[0],)))
    gm.recompile()
    times = []
    for module in (gm, plain):
        static = torch.randn(TOKENS, SIZE, device="cuda")
        module(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(static)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    aside, alone = times
    assert aside < alone + 0.5 * CYCLES / 1.98e6, (
        f"{aside:.3f} ms, and {alone:.3f} ms with one sleep less"
    )
