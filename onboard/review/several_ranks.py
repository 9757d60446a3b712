"""Checklist, part E: what several ranks compute is compared with what one model computes."""

from __future__ import annotations

import ast

from onboard.review.checklist import Subject
from onboard.review.dataflow import Dataflow
from onboard.review.family_class import suite_methods
from onboard.review.python_source import Outcome, require


def ranks_compared(subject: Subject) -> Outcome:
    """What each rank has computed is compared with what one model has, its tokens as well."""
    test = suite_methods(subject).get("test_several_ranks")
    flow = Dataflow(test) if test else None
    compared = flow.calls("pair.assert_close") if flow else []
    right = [call for call in compared if flow and len(call.args) > 1 and _is_of_ranks(flow, call)]
    tokens = bool(flow and flow.calls("torch.equal"))
    found = right if len(right) == len(compared) and tokens else []
    return require(subject.suite, found, "no test_several_ranks against one model")


def _is_of_ranks(flow: Dataflow, call: ast.Call) -> bool:
    """Whether the first value is what the ranks gave, the second what one model gave."""
    actual, expected = (flow.sources(arg) for arg in call.args[:2])
    return "divided.logits" in actual and {"pair.actual", "pair.expected"} & expected != set()
