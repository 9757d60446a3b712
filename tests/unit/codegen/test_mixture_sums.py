"""The sum over experts that is compared in the analysis is the one that generated files have."""

from __future__ import annotations

import ast

from onboard.analysis.recognise.mixture_roles import summed
from onboard.analysis.source import function_node
from onboard.codegen.translate.mechanisms import experts


def test_the_sum_that_is_written_is_the_one_that_was_compared() -> None:
    names = ("number", "expert", "experts", "share", "indices", "x")
    given = {**{each: each for each in names}, "weights": "weights * "}
    text = experts._SUM.format(result="mixed", base="x.new_zeros(())", **given)
    definition = function_node(summed)
    assert definition is not None
    _, *compared, _ = definition.body  # without docstring and return
    written = ast.parse(text.replace("self.experts", "experts")).body
    assert [ast.dump(each) for each in written] == [ast.dump(each) for each in compared]
