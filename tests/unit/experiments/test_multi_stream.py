"""Branches on an auxiliary stream: what is moved, in what order, what is kept alive, and that
nothing else changes.

There are no streams on the CPU, where the markers pass values on; tests/gpu has the races.
"""

import random

import pytest
import torch
from torch import nn

from onboard.experiments.side_branches import is_product
from onboard.graph.canonicalise import clean_up
from onboard.graph.compile.streams import begin_aux, end_aux, in_one_stream, wait_aux
from onboard.graph.fx import arguments, nodes_of
from tests.support.graph.fusion import apply, exported
from tests.support.graph.harness import rmse

ops = torch.ops.onboard
SIZE = 16


class Mixture(nn.Module):
    """Routed experts, with or without shared ones, between two residual sums."""

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(SIZE))
        self.router = nn.Linear(SIZE, 4, bias=False)
        self.w1, self.w3 = (
            nn.ParameterList(torch.empty(8, SIZE) for _ in range(4)) for _ in range(2)
        )
        self.w2 = nn.ParameterList(torch.empty(SIZE, 8) for _ in range(4))
        self.shared = (
            nn.Sequential(nn.Linear(SIZE, 24), nn.SiLU(), nn.Linear(24, SIZE)) if shared else None
        )
        self.shared_gate = nn.Linear(SIZE, 1)

    def forward(self, x):
        hidden = ops.torch_rmsnorm(x, self.norm, 1e-6)
        tokens = hidden.reshape(-1, SIZE)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = ops.torch_moe(
            tokens, chosen, weights, list(self.w1), list(self.w2), list(self.w3)
        ).view(x.shape)
        if self.shared is not None:
            out = out + torch.sigmoid(self.shared_gate(hidden)) * self.shared(hidden)
        return x + out


class Latent(nn.Module):
    """Latent attention with a chain of two products for the queries; keys expanded by it, or by the
    operator.
    """

    def __init__(self, expanded: bool, queries_first: bool = False) -> None:
        super().__init__()
        self.expanded, self.queries_first = expanded, queries_first
        self.q_a, self.kv_a = nn.Linear(SIZE, 12, bias=False), nn.Linear(SIZE, 8 + 4, bias=False)
        self.q_b, self.kv_b = (
            nn.Linear(12, 2 * (6 + 4), bias=False),
            nn.Linear(8, 2 * (6 + 6), bias=False),
        )
        self.q_norm, self.kv_norm = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(8))
        self.o = nn.Linear(2 * 6, SIZE, bias=False)

    def forward(self, x):
        batch, length = x.shape[:2]
        residual, x = x, x.sin()
        if not self.queries_first:
            latent, kpe = self.kv_a(x).split([8, 4], -1)
        q = self.q_b(ops.torch_rmsnorm(self.q_a(x), self.q_norm, 1e-6)).view(batch, length, 2, 10)
        if self.queries_first:  # as transformers has it
            latent, kpe = self.kv_a(x).split([8, 4], -1)
        q_nope, q_pe = q.split([6, 4], -1)
        angle = torch.arange(length).float()[None, :, None].expand(batch, length, 4)
        q_pe, kpe = ops.torch_rope_with_explicit_cos_sin(
            q_pe, kpe.unsqueeze(2), angle.cos(), angle.sin(), 2
        )
        latent = ops.torch_rmsnorm(latent, self.kv_norm, 1e-6)
        if not self.expanded:
            return residual + self.o(
                ops.torch_mla(q_nope, q_pe, latent, kpe, self.kv_b.weight).flatten(2)
            )
        keys, value = self.kv_b(latent).view(batch, length, 2, 12).split([6, 6], -1)
        keys = torch.cat([keys, kpe.expand(-1, -1, 2, -1)], -1)
        return residual + self.o(
            ops.torch_attention(torch.cat([q_nope, q_pe], -1), keys, value).flatten(2)
        )


class Grouped(nn.Module):
    """Ordinary attention: three projections of one input and no latent."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))

    def forward(self, x):
        hidden = x.sin()
        q, k, v = (each(hidden).view(*x.shape[:2], 2, 8) for each in (self.q, self.k, self.v))
        return x + ops.torch_attention(q, k, v).flatten(2)


@torch.library.custom_op("onboard_test::torch_fp8_linear", mutates_args=())
def fp8_linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight)


@fp8_linear.register_fake
def _(input, weight):
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


class Products(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(size, SIZE) for size in sizes)

    def forward(self, x):
        return torch.cat([fp8_linear(x, weight) for weight in self.weights], -1)


def _graph(model: nn.Module):
    """Export a module with random weights."""
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    gm = exported(model, 2, 5, SIZE)
    for owner in gm.modules():
        for name, parameter in owner._parameters.items():
            owner._parameters[name] = nn.Parameter(
                torch.randn(parameter.shape) * 0.3, requires_grad=False
            )
    return gm


def _moved(gm) -> list[list[str]]:
    """Return the calls of each branch; check the order, and what is kept until it has been waited
    for.
    """
    order, branches = list(gm.graph.nodes), []
    for join in nodes_of(gm, wait_aux):
        end = join.args[0]
        begin, results = end.args[0], end.args[1:]
        assert (begin.target, end.target) == (begin_aux, end_aux)
        inside = order[order.index(begin) + 1 : order.index(end)]
        reads = {source for node in inside for source in node.all_input_nodes} - set(inside)
        assert {node for node in reads if node.op != "get_attr"} >= set(join.args[1:])
        assert {node for node in reads if isinstance(node.meta.get("val"), torch.Tensor)} <= {
            *join.args[1:],
            *(node for node in reads if node.op == "get_attr"),
        }
        assert all(set(node.users) <= {*inside, end} for node in inside), (
            "the main stream reads before it waits"
        )
        assert set(results) <= set(inside)
        beside = order[order.index(end) : order.index(join)]
        assert any(is_product(node) or "moe" in str(node.target) for node in beside), (
            "nothing runs beside the branch"
        )
        branches.append([str(node.target) for node in inside])
    return branches


def _check(key: str, gm) -> list[list[str]]:
    x = torch.randn(3, 7, SIZE)
    expected, before = gm(x), [str(node.target) for node in gm.graph.nodes]
    new, info, _ = apply(key, gm)
    moved = _moved(new)
    assert info.num_matches == len(moved)
    assert torch.equal(new(x), expected)
    assert in_one_stream(new) == len(moved)
    assert torch.equal(new(x), expected)
    assert sorted(str(node.target) for node in new.graph.nodes) == sorted(before)
    return moved


def test_shared_experts_run_beside_the_routed_ones():
    (moved,) = _check("multi_stream_moe", _graph(Mixture()))
    assert sum("linear" in name for name in moved) == 3
    assert sum("sigmoid" in name for name in moved) == 1
    assert not any("moe" in name or "softmax" in name or "rmsnorm" in name for name in moved)


def test_shared_experts_whose_last_product_takes_in_the_sum_run_beside_up_to_there():
    gm = _graph(Mixture())
    (mixture,) = nodes_of(gm, ops.torch_moe)
    total = next(node for node in nodes_of(gm, torch.ops.aten.add) if mixture < node)
    routed, shared = total.args
    with gm.graph.inserting_before(total):
        fused = gm.graph.call_function(fused_sum.default, (shared.args[0], shared.args[1], routed))
    fused.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(fused)
    clean_up(gm)
    (moved,) = _check("multi_stream_moe", gm)
    assert sum("linear" in name for name in moved) == 3


@torch.library.custom_op("onboard_test::gated_sum", mutates_args=())
def fused_sum_op(gate: torch.Tensor, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + gate * value


@fused_sum_op.register_fake
def _(gate, value, residual):
    return torch.empty_like(residual)


fused_sum = torch.ops.onboard_test.gated_sum


def test_a_mixture_alone_stays_in_one_stream():
    assert _check("multi_stream_moe", _graph(Mixture(shared=False))) == []


@pytest.mark.parametrize("expanded", [False, True])
def test_the_whole_path_of_the_keys_runs_beside_the_queries(expanded):
    (moved,) = _check("multi_stream_mla_attn", _graph(Latent(expanded)))
    assert sum("linear" in name for name in moved) == 1 + expanded
    assert sum("rmsnorm" in name for name in moved) == 1
    assert not any("rope" in name or "cat" in name for name in moved), (
        "what needs the queries' rotation, too"
    )


def test_the_expansion_of_the_keys_runs_beside_the_queries_when_the_latents_come_from_one_product():
    gm, info, _ = apply("fuse_gemms", _graph(Latent(True)))
    assert info.num_matches == 1
    (moved,) = _check("multi_stream_mla_attn", gm)
    assert sum("linear" in name for name in moved) == 1
    assert sum("rmsnorm" in name for name in moved) == 1


@pytest.mark.parametrize("queries_first", [False, True])
def test_the_norm_of_a_latent_that_the_operator_expands_runs_beside_the_queries(queries_first):
    gm, info, _ = apply("fuse_gemms", _graph(Latent(False, queries_first)))
    assert info.num_matches == 1
    (moved,) = _check("multi_stream_mla_attn", gm)
    assert [name for name in moved if "rmsnorm" in name] == moved
    gm, *_ = apply("multi_stream_mla_attn", gm)
    (end,), (wait,) = (nodes_of(gm, marker) for marker in (end_aux, wait_aux))
    order = list(gm.graph.nodes)
    beside = order[order.index(end) : order.index(wait)]
    assert sum(is_product(node) for node in beside) == 1, "the queries' own product"
    assert sum("rope" in str(node.target) for node in beside) == 1


class Plain(Latent):
    """Latent attention whose queries have no latent of their own, or whose latent has no norm."""

    def __init__(self, normed: bool) -> None:
        super().__init__(False)
        self.normed = normed

    def forward(self, x):
        batch, length = x.shape[:2]
        x = x.sin()
        latent, kpe = self.kv_a(x).split([8, 4], -1)
        q = (
            self.q_a(x)
            if self.normed
            else self.q_b(ops.torch_rmsnorm(self.q_a(x), self.q_norm, 1e-6))
        )
        q_nope, q_pe = q.view(batch, length, 2, -1).split([2, 4] if self.normed else [6, 4], -1)
        latent = ops.torch_rmsnorm(latent, self.kv_norm, 1e-6) if self.normed else latent
        weight = self.kv_b.weight[: 2 * (q_nope.shape[-1] + 6)]
        return self.o(ops.torch_mla(q_nope, q_pe, latent, kpe.unsqueeze(2), weight).flatten(2))


@pytest.mark.parametrize("normed", [True, False])
def test_with_one_product_and_no_work_on_either_path_there_is_nothing_to_overlap(normed):
    gm, info, _ = apply("fuse_gemms", _graph(Plain(normed)))
    assert info.num_matches == 1
    assert _check("multi_stream_mla_attn", gm) == []


def test_ordinary_attention_is_left_alone():
    assert _check("multi_stream_mla_attn", _graph(Grouped())) == []
    gm, *_ = apply("fuse_gemms", _graph(Grouped()))
    assert _check("multi_stream_mla_attn", gm) == []


@pytest.mark.parametrize(("sizes", "largest"), [((8, 24, 4), 24), ((8, 8), 8)])
def test_the_largest_fp8_product_runs_beside_the_others(sizes, largest):
    gm = _graph(Products(*sizes))
    (moved,) = _check("multi_stream_gemm", gm)
    assert moved == ["onboard_test.torch_fp8_linear.default"]
    gm, *_ = apply("multi_stream_gemm", gm)
    (end,) = nodes_of(gm, end_aux)
    assert gm.get_parameter(str(arguments(end.args[1])["weight"].target)).shape[0] == largest


def test_one_fp8_product_and_products_of_other_types_stay():
    assert _check("multi_stream_gemm", _graph(Products(8))) == []
    assert _check("multi_stream_gemm", _graph(Grouped())) == []


def test_a_branch_survives_clean_up_and_a_copy_of_the_graph():
    from onboard.graph.fx import copy_graphs

    gm, *_ = apply("multi_stream_moe", _graph(Mixture()))
    twin, x = copy_graphs(gm), torch.randn(1, 4, SIZE)
    clean_up(twin)
    assert len(_moved(twin)) == 1
    assert rmse(twin(x), gm(x)) == 0
