"""Checklist, part E: the limits of the tests are those of the dtype, and what may pass as rounding is
measured against transformers' own model in float64.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from onboard.review.checklist import Subject
from onboard.review.dataflow import Dataflow
from onboard.review.family_class import (
    added_tests,
    bindings,
    fact,
    literal,
    suite_methods,
    suite_value,
)
from onboard.review.python_source import Function, Outcome, Source, dotted, forbid, require
from onboard.verify.tolerances import ON_GPU, ON_GPU_ELSE, SAME

COMPARED = "pair.assert_close"
"""What a test compares with."""
LIMITS = ("cpu_float32", "gpu_bfloat16")
_LIMIT = "return self.suite.cpu_float32 if self.device == 'cpu' else self.suite.gpu_bfloat16[kind]"
_EXACT = "exact = exact if self.limit(kind) == SAME else None"


def within_limits(subject: Subject) -> Outcome:
    """The suite's limits are bounded by those of `onboard.verify.tolerances`; a file's are lower."""
    if loose := [*_own_limits(subject), *_free_limits(subject.test, added_tests(subject))]:
        return forbid(subject.test, loose)
    methods = suite_methods(subject)
    free = [*_free_limits(subject.suite, methods.values(), _of_float64)]
    if free := [*free, *_other_limits(subject.suite)]:
        return forbid(subject.suite, free)
    nodes = [suite_value(subject, name) for name in LIMITS]
    found = [node for node in nodes if node and node.value and _bounded(node.value, node.target)]
    missing = f"a limit is missing, or above {SAME:.0e} in float32 on the CPU"
    return require(subject.suite, found if len(found) == len(nodes) else [], missing)


def _bounded(value: ast.expr, target: ast.expr) -> bool:
    """Whether a limit is written out, and none is above that of `onboard.verify.tolerances`."""
    found: Any = literal(value)
    if dotted(target) == LIMITS[0]:
        return isinstance(found, float) and found <= SAME
    return isinstance(found, dict) and all(
        isinstance(limit, float) and limit <= ON_GPU.get(kind, ON_GPU_ELSE)
        for kind, limit in found.items()
    )


def _own_limits(subject: Subject) -> list[ast.AST]:
    """Where a test file gives a limit, unless once and within bounds, or might change one."""
    loose: list[ast.AST] = []
    for name in LIMITS:
        node = fact(subject, name)
        strict = node is not None and _bounded(node.value, node.targets[0])
        loose += [] if strict else bindings(subject.test, name)
    parts = [
        node
        for node in subject.test.all(ast.Subscript)
        if not isinstance(node.ctx, ast.Load) and dotted(node.value).endswith(LIMITS)
    ]
    changed = subject.test.calls(
        lambda name: "gpu_bfloat16." in name or name in ("setattr", "globals", "vars")
    )
    return [*loose, *parts, *changed]


def _free_limits(
    source: Source,
    tests: Iterable[Function],
    may_round: Callable[[Dataflow, ast.Call], bool] = lambda flow, call: False,
) -> list[ast.AST]:
    """Comparisons with another limit than that of the pair; by the rule of rounding they are made
    where one `may_round`.
    """
    flows = [(flow, call) for flow in map(Dataflow, tests) for call in flow.calls(COMPARED)]
    counted = [
        call
        for flow, call in flows
        if call.keywords or not (len(call.args) == 4 or may_round(flow, call))
    ]
    direct = [
        call
        for call in source.calls(lambda name: name == "assert_rmse_close")
        if len(call.args) < 3 or ast.unparse(call.args[2]) != "self.limit(kind)"
    ]
    return [*counted, *direct]


def _of_float64(flow: Dataflow, call: ast.Call) -> bool:
    """Whether the fifth value computes what transformers' model gives in float64."""
    return len(call.args) == 5 and flow.called(call.args[4]) == "pair.in_float64"


def _other_limits(suite: Source) -> list[ast.AST]:
    """What stands in the place of the pair's `limit` and of the comparison within it."""
    methods = suite.functions(suite.classes().get("Pair"))
    limit, compare = methods.get("limit"), methods.get("assert_close")
    right = limit and [ast.unparse(node) for node in _code(limit)] == [_LIMIT]
    compared = compare and Dataflow(compare).calls("assert_rmse_close")
    handed = [ast.unparse(arg) for call in compared or [] for arg in call.args[:2]]
    known = compare and _EXACT in [ast.unparse(node) for node in _code(compare)]
    same = known and handed == ["actual", "expected"]
    wrong = [*([] if right else [limit]), *([] if same else [compare])]
    return [node or suite.tree.body[0] for node in wrong]


def _code(function: Function) -> list[ast.stmt]:
    """The statements of a function but its docstring."""
    return function.body[ast.get_docstring(function) is not None :]
