from __future__ import annotations

import operator

import torch
from torch import fx

from onboard.graph.pattern_matcher.patterns import Either, Op, Through, Var, find, is_number

aten = torch.ops.aten


def _graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
    graph = fx.Graph()
    return graph, graph.placeholder("x"), graph.placeholder("y")


def test_a_variable_stands_for_one_thing() -> None:
    graph, x, y = _graph()
    same, other = (
        graph.call_function(aten.mul.Tensor, (x, x)),
        graph.call_function(aten.mul.Tensor, (x, y)),
    )
    pattern = Op(aten.mul, Var("a"), Var("a"))

    assert find(pattern, same) == {"a": x}
    assert find(pattern, other) is None
    assert find(pattern, x) is None


def test_operands_that_commute_are_tried_both_ways_until_the_whole_matches() -> None:
    graph, x, y = _graph()
    left, right = (
        graph.call_function(aten.neg.default, (x,)),
        graph.call_function(aten.neg.default, (y,)),
    )
    total = graph.call_function(aten.add.Tensor, (left, right))
    product = graph.call_function(aten.mul.Tensor, (total, x))
    # The first order binds a to x, and then the second factor must not be x.
    pattern = Op(
        aten.mul,
        Op(aten.add, Op(aten.neg, Var("a")), Op(aten.neg, Var("b")), commutes=True),
        Var("b"),
    )

    assert find(pattern, product) == {"a": y, "b": x}


def test_defaults_and_names_of_arguments_are_the_schemas() -> None:
    graph, x, _ = _graph()
    plain = graph.call_function(aten.add.Tensor, (x, 2))
    scaled = graph.call_function(aten.add.Tensor, (x, 2), {"alpha": 3})

    assert find(Op(aten.add, Var("x"), Var("n", where=is_number), alpha=1), plain) == {
        "x": x,
        "n": 2,
    }
    assert find(Op(aten.add, Var("x"), 2, alpha=1), scaled) is None
    assert find(Op(aten.add.Scalar, Var("x"), 2), plain) is None


def test_alternatives_lists_and_calls_to_look_through() -> None:
    graph, x, y = _graph()
    copied = graph.call_function(
        aten.clone.default, (graph.call_function(aten.contiguous.default, (x,)),)
    )
    joined = graph.call_function(aten.cat.default, ([copied, y], -1))
    first = graph.call_function(operator.getitem, (joined, 0))
    inner = Through(
        (aten.clone, aten.contiguous), Var("a", where=lambda value: value.op == "placeholder")
    )
    pattern = Op(
        operator.getitem, Either(Op(aten.stack, [inner]), Op(aten.cat, [inner, Var("b")])), 0
    )

    assert find(pattern, first) == {"a": x, "b": y}
    for other in ([x], [x, y, x], "xy"):
        assert find([Var("a"), Var("b")], other) is None
