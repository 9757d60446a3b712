"""Checklist, part E: the equivalence tests prove what they claim.

A test file says what is its family's own; how that is tested stands in the suite, whose source is
read here like the file. What a file puts in the place of something of the suite fails the item that
speaks of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from onboard.analysis.spec import in_any_layer
from onboard.review.checklist import Item, Subject, contract
from onboard.review.dataflow import Dataflow
from onboard.review.family_class import (
    added_tests,
    bindings,
    fact,
    family_class,
    inherits_plainly,
    literal,
    said,
    suite_methods,
    suite_value,
    tests_of,
)
from onboard.review.limit_checks import COMPARED, within_limits
from onboard.review.python_source import Function, Outcome, Source, dotted, forbid, require
from onboard.review.several_ranks import ranks_compared

_MOST = {"hidden_size": 256, "vocab_size": 2000, "num_hidden_layers": 10}
_TESTED_KINDS = ("rotary", "rmsnorm", "layernorm", "mlp", "attention")
_ROOT = "Path(__file__).resolve().parents[2]"
_NO_CUDA = "not torch.cuda.is_available()"

OWNED = {
    "E06": ("pair",),
    "E08": (
        "batch",
        "length",
        "starts",
        "prompt",
        "vocabulary",
        "told",
        "test_first_position",
        "prompts",
        "clear_prompts",
        "alone",
    ),
    "E09": ("assert_close", "assert_rmse_close", "files"),
    "E10": ("pytestmark", "pytest_generate_tests", "__init__", "__test__"),
    "E11": ("limit", "in_float64", "exact_model"),
    "E12": ("test_block",),
    "E13": ("test_layer",),
    "E14": ("test_model",),
    "E15": ("test_export",),
    "E17": (
        "test_cached_decode",
        "save_config",
        "continued",
        "log_probabilities",
        "cache_config",
        "prompt_lengths",
    ),
    "E20": ("test_several_ranks", "greedy", "divided_tokens"),
}
"""Names of the suite that a test file may not bind, by the item that speaks of them."""


def _tiny(subject: Subject) -> Outcome:
    config = said(subject, "config")
    small = isinstance(config, dict) and all(
        isinstance(size := config.get(key, 0), int) and size <= most for key, most in _MOST.items()
    )
    return _require_fact(subject, "config", small, f"no literal config within {_MOST}")


def _require_fact(subject: Subject, name: str, right: bool, missing: str) -> Outcome:
    node = fact(subject, name)
    return require(subject.test, [node] if node and right else [], missing)


def _model_file(subject: Subject) -> Outcome:
    wanted = f"modeling_{subject.spec.family}.py"
    node, roots = fact(subject, "model_file"), bindings(subject.test, "ROOT")
    values = [ast.unparse(each.value) for each in subject.test.all(ast.Assign) if _is_root(each)]
    named = node is not None and ast.unparse(node.value) == f"ROOT / 'models' / '{wanted}'"
    right = named and len(roots) == 1 and values == [_ROOT]
    missing = f"it does not find {wanted} from its own path"
    return _require_fact(subject, "model_file", right, missing)


def _is_root(node: ast.Assign) -> bool:
    return [dotted(target) for target in node.targets] == ["ROOT"]


def _hf_imported(subject: Subject) -> Outcome:
    wanted, module = subject.spec.architecture, subject.spec.hf_module
    found = [
        node
        for node in subject.test.all(ast.ImportFrom)
        if node.module == module and any(a.name == wanted and not a.asname for a in node.names)
    ]
    node = fact(subject, "reference")
    right = len(bindings(subject.test, wanted)) == 1 and node and dotted(node.value) == wanted
    missing = f"the reference is not {wanted}, imported from {module}"
    return require(subject.test, found if right else [], missing)


def _no_second_reference(subject: Subject) -> Outcome:
    return _forbid_in_both(
        subject,
        lambda source: [
            node
            for node in source.all(ast.ClassDef)
            if any("Module" in ast.unparse(base) for base in node.bases)
        ],
    )


def _forbid_in_both(subject: Subject, find: Callable[[Source], Iterable[ast.AST]]) -> Outcome:
    """Pass when `find` finds nothing in the test file, nor in the suite."""
    outcome = forbid(subject.test, find(subject.test))
    return forbid(subject.suite, find(subject.suite)) if outcome.passed else outcome


def _fixture(subject: Subject) -> Dataflow | None:
    fixture = suite_methods(subject).get("pair")
    return Dataflow(fixture) if fixture else None


def _random_weights(subject: Subject) -> Outcome:
    """Of the class and the config that the test file says."""
    flow = _fixture(subject)
    calls = [
        call
        for call in (flow.calls("hf_causal_lm") if flow else [])
        if [ast.unparse(arg) for arg in call.args[:2]] == ["cls.reference", "cls.config"]
    ]
    return require(subject.suite, calls, "the weights are not randomized")


def _same_weights(subject: Subject) -> Outcome:
    """From Hugging Face's model to the generated one, and what is compared are these two."""
    flow = _fixture(subject)
    pairs = (
        [call for call in flow.calls("copy_weights", "Pair") if not _are_the_two(flow, call)]
        if flow
        else []
    )
    if pairs:
        return forbid(subject.suite, pairs)
    missing = "the models do not get the same weights"
    return require(subject.suite, flow.calls("copy_weights") if flow else [], missing)


def _are_the_two(flow: Dataflow, call: ast.Call) -> bool:
    made = [flow.called(arg) for arg in call.args[:2]]
    return made[1:] == ["generated_causal_lm"] and made[0] not in ("", "generated_causal_lm")


def _fresh_seed(subject: Subject) -> Outcome:
    fixed = _forbid_in_both(
        subject, lambda source: source.calls(lambda name: name.endswith("manual_seed"))
    )
    if not fixed.passed:
        return fixed
    flow = _fixture(subject)
    calls = flow.calls("fresh_seed") if flow else []
    return require(subject.suite, calls, "no fresh, printed seed")


def _inputs(subject: Subject) -> Outcome:
    """Positions are counted here only where the model's own first one is what they begin with."""
    made_here = _forbid_in_both(subject, _made_here)
    if not made_here.passed:
        return made_here
    node, method = suite_value(subject, "batch"), suite_methods(subject).get("prompt")
    several = node is not None and node.value is not None and (literal(node.value) or 0) >= 2
    calls = Dataflow(method).calls("random_prompt") if method else []
    missing = "no random prompts in a batch of two or more with positions of their own"
    return require(subject.suite, calls if several else [], missing)


def _made_here(source: Source) -> list[ast.Call]:
    counted = {
        part
        for sum_ in source.all(ast.BinOp)
        if isinstance(sum_.op, ast.Add) and dotted(sum_.left) == "self.first_position"
        for part in ast.walk(sum_.right)
    }
    calls = source.calls(lambda name: name.endswith((".arange", ".zeros")))
    return [call for call in calls if call not in counted]


def _no_smoke(subject: Subject) -> Outcome:
    """A test that compares nothing, or a thing with itself, proves nothing; nor does a file without
    the suite.
    """
    tests = list(tests_of(suite_methods(subject)).values())
    outcome = forbid(subject.suite, _smoke(tests))
    if not outcome.passed:
        return outcome
    owner = family_class(subject)
    if owner is None or not inherits_plainly(subject.test, owner):
        return require(subject.test, [], "no class that inherits the suite, and it alone")
    added = _smoke(added_tests(subject))
    return forbid(subject.test, added) if added else require(subject.test, [owner], "")


def _smoke(tests: list[Function]) -> list[ast.AST]:
    flows = {node: Dataflow(node) for node in tests}
    empty = [node for node, flow in flows.items() if not flow.calls(COMPARED)]
    same = [
        call
        for flow in flows.values()
        for call in flow.calls(COMPARED)
        if len(call.args) < 2 or flow.same(call.args[0], call.args[1])
    ]
    return [*empty, *same]


def _no_skips(subject: Subject) -> Outcome:
    """Hardware alone may be a reason."""
    return _forbid_in_both(subject, _skips)


def _skips(source: Source) -> list[ast.AST]:
    conditions = [call.args[0] for call in source.calls(lambda name: name.endswith("skipif"))]
    return [
        *source.named("^(skip|xfail|importorskip)$"),
        *(node for node in conditions if ast.unparse(node) != _NO_CUDA),
    ]


def _blocks(subject: Subject) -> Outcome:
    """Each block of the spec that is called as a module is tested in some layer."""
    places = {in_any_layer(path) for path in said(subject, "blocks") or {}}
    places |= {in_any_layer(path) for path in subject.spec.never_called}
    missing = [
        block.path
        for block in subject.blocks(*_TESTED_KINDS)
        if in_any_layer(block.path) not in places and not subject.spec.runs_together(block.path)
    ]
    return _tested(subject, "test_block", "blocks", missing)


def _layers(subject: Subject) -> Outcome:
    kinds = {kind.name for kind in subject.spec.layer_kinds if not kind.written_out}
    missing = sorted(kinds - set((said(subject, "layers") or {}).values()))
    return _tested(subject, "test_layer", "layers", missing)


def _tested(subject: Subject, test: str, name: str, missing: list[str]) -> Outcome:
    """Whether the file names what there is of a kind, and the suite has a test of each."""
    if not (_parametrized(subject, test, name) and _replays(subject, test)):
        return require(subject.suite, [], f"no {test} of {name}")
    what = ", ".join(missing) or name
    return _require_fact(subject, name, not missing, f"no {test} of {what}")


def _parametrized(subject: Subject, test: str, name: str) -> bool:
    function = suite_methods(subject).get("pytest_generate_tests")
    wanted = (
        f"if metafunc.function.__name__ == '{test}':\n    metafunc.parametrize('path', self.{name})"
    )
    return function is not None and wanted in [ast.unparse(node) for node in function.body]


def _replays(
    subject: Subject, test: str, what: str = "pair.actual.get_submodule(path)"
) -> list[ast.Call]:
    """The calls by which a test gives the generated model what Hugging Face's was given."""
    function = suite_methods(subject).get(test)
    flow = Dataflow(function) if function else None
    calls = flow.calls("call.replay") if flow else []
    replayed = [
        call
        for call in calls
        if flow and call.args and ast.unparse(flow.origin(call.args[0])) == what
    ]
    return replayed if len(replayed) == len(calls) else []


def _whole_model(subject: Subject) -> Outcome:
    """The path "" is the whole model: its recorded call has Hugging Face's logits."""
    test = suite_methods(subject).get("test_model")
    calls = subject.suite.all(ast.Subscript, test) if test else []
    recorded = [node for node in calls if ast.unparse(node) == "pair.calls['']"]
    replayed = _replays(subject, "test_model", "pair.actual") if recorded else []
    return require(subject.suite, replayed, "no test_model that compares both models' logits")


def _export(subject: Subject) -> Outcome:
    """Exported with a dynamic batch and sequence."""
    test = suite_methods(subject).get("test_export")
    exports = Dataflow(test).calls("torch.export.export") if test else []
    dynamic = (
        [node for node in subject.suite.all(ast.Dict, test) if _dynamic_dimensions(node) >= {0, 1}]
        if test
        else []
    )
    shapes = [call for call in exports if any(key.arg == "dynamic_shapes" for key in call.keywords)]
    return require(
        subject.suite, shapes if dynamic else [], "no export with dynamic batch and sequence"
    )


def _dynamic_dimensions(node: ast.Dict) -> set[Any]:
    """The dimensions that a dict maps to something dynamic."""
    pairs = zip(node.keys, node.values, strict=True)
    return {
        key.value
        for key, value in pairs
        if isinstance(key, ast.Constant) and dotted(value).startswith("Dim")
    }


def _second_shape(subject: Subject) -> Outcome:
    test = suite_methods(subject).get("test_export")
    loops = (
        [node for node in subject.suite.all(ast.For, test) if _distinct_shapes(node) >= 2]
        if test
        else []
    )
    return require(subject.suite, loops, "the exported graph does not run on a second shape")


def _distinct_shapes(loop: ast.For) -> int:
    """How many different pairs a loop over a list of pairs visits."""
    shapes = loop.iter.elts if isinstance(loop.iter, ast.List) else []
    return len({ast.unparse(shape) for shape in shapes})


def _cached_decode(subject: Subject) -> Outcome:
    """What the cached graph generates is compared with Hugging Face's logits of the whole text."""
    methods = suite_methods(subject)
    test, ways = methods.get("test_cached_decode"), methods.get("continued")
    flow = Dataflow(test) if test else None
    compared = flow.calls(COMPARED) if flow else []
    right = [call for call in compared if flow and len(call.args) > 1 and _is_decode(flow, call)]
    generated = bool(ways and Dataflow(ways).calls("llm.generate"))
    found = right if len(right) == len(compared) and generated else []
    return require(subject.suite, found, "no test_cached_decode against whole texts")


def _is_decode(flow: Dataflow, call: ast.Call) -> bool:
    """Whether the first value is what the cached graph gave, the second what Hugging Face's model
    gave.
    """
    actual, expected = (flow.sources(arg) for arg in call.args[:2])
    cached = "self.continued" in actual and "pair.expected" not in actual
    return cached and "pair.expected" in expected and "all_logprobs" not in expected


def _item(id: str, title: str, check: Callable[[Subject], Outcome]) -> Item:
    """Return an item that fails, too, where the test file has something in the suite's place."""

    def judge(subject: Subject) -> Outcome:
        found = [node for name in OWNED.get(id, ()) for node in bindings(subject.test, name)]
        return forbid(subject.test, found) if found else check(subject)

    return contract(id, title, judge)


EQUIVALENCE_CHECKS = [
    _item("E01", "the config is small and written out", _tiny),
    _item("E02", "the file under test is modeling_{spec.family}.py of the same root", _model_file),
    _item("E03", "the reference is {spec.whose} {spec.architecture}", _hf_imported),
    _item("E04", "there is no second implementation of it", _no_second_reference),
    _item("E05", "all weights are random", _random_weights),
    _item("E06", "both models get the same weights", _same_weights),
    _item("E07", "the seed is fresh and printed", _fresh_seed),
    _item(
        "E08",
        "prompts are random, two or more in a batch, and do not begin at position zero",
        _inputs,
    ),
    _item("E09", "every test compares numbers: no smoke tests", _no_smoke),
    _item("E10", "only missing hardware skips a test", _no_skips),
    _item("E11", "the limits are those of the dtype: 1e-5 in float32", within_limits),
    _item("E12", "every kind of block is tested", _blocks),
    _item("E13", "every kind of layer is tested", _layers),
    _item("E14", "the whole model's logits are compared", _whole_model),
    _item("E15", "it is exported with dynamic batch and sequence", _export),
    _item("E16", "the exported graph runs on a second shape", _second_shape),
    _item("E17", "cached decode is compared with whole texts", _cached_decode),
    _item("E20", "several ranks are compared with one model", ranks_compared),
]
