"""Checklist, part E: the equivalence tests prove what they claim."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from typing import Any

from onboard.review.checklist import Subject, contract
from onboard.review.dataflow import Dataflow
from onboard.review.python_source import Function, Outcome, dotted, forbid, require
from onboard.verify.limits import ON_GPU, ON_GPU_ELSE, SAME

_MOST = {"hidden_size": 256, "vocab_size": 2000, "num_hidden_layers": 10}
_TESTED_KINDS = ("rotary", "rmsnorm", "layernorm", "mlp", "attention")


def _constant(subject: Subject, name: str) -> tuple[ast.Assign | None, Any]:
    """The module-level assignment of a name, alone or in a tuple, and its literal value; None where
    there is none.
    """
    for node in subject.test.tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        else:
            pairs = [(target, node.value)]
        for left, right in pairs:
            if dotted(left) == name:
                return node, _literal(right)
    return None, None


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of the keyword arguments of a call as a dict; None for anything
    else.
    """
    try:
        if isinstance(node, ast.Call):
            return {
                key.arg: ast.literal_eval(_WithoutFloatCalls().visit(deepcopy(key.value)))
                for key in node.keywords
            }
        return ast.literal_eval(node)
    except ValueError:
        return None


class _WithoutFloatCalls(ast.NodeTransformer):
    """Writes `float("inf")`, which has no literal, as the text that it is made from."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        is_float = (
            dotted(node.func) == "float"
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Constant)
        )
        return node.args[0] if is_float else node


def _tests(subject: Subject) -> dict[str, Function]:
    return {
        name: node for name, node in subject.test.functions().items() if name.startswith("test_")
    }


def _calls(subject: Subject, *names: str, inside: ast.AST | None = None) -> list[ast.Call]:
    return subject.test.calls(lambda name: name in names, inside)


def _tiny(subject: Subject) -> Outcome:
    node, config = _constant(subject, "CONFIG")
    small = isinstance(config, dict) and all(
        config.get(key, 0) <= most for key, most in _MOST.items()
    )
    return require(
        subject.test, [node] if node and small else [], f"no literal CONFIG within {_MOST}"
    )


def _model_file(subject: Subject) -> Outcome:
    wanted = f"modeling_{subject.spec.family}.py"
    nodes = [node for node in subject.test.all(ast.Constant) if node.value == wanted]
    roots = [node for node in subject.test.all(ast.Name) if node.id == "__file__"]
    return require(
        subject.test, nodes if roots else [], f"it does not find {wanted} from its own path"
    )


def _hf_imported(subject: Subject) -> Outcome:
    found = [
        node
        for node in subject.test.all(ast.ImportFrom)
        if node.module == subject.spec.hf_module
        and any(a.name == subject.spec.architecture for a in node.names)
    ]
    return require(
        subject.test,
        found,
        f"{subject.spec.architecture} is not imported from {subject.spec.hf_module}",
    )


def _no_second_reference(subject: Subject) -> Outcome:
    found = [
        node
        for node in subject.test.all(ast.ClassDef)
        if any("Module" in ast.unparse(b) for b in node.bases)
    ]
    return forbid(subject.test, found)


def _random_weights(subject: Subject) -> Outcome:
    return require(
        subject.test,
        _calls(subject, "hf_causal_lm", "randomize_"),
        "the weights are not randomized",
    )


def _same_weights(subject: Subject) -> Outcome:
    """From Hugging Face's model to the generated one, and what is compared are these two."""
    fixture = subject.test.functions().get("pair")
    flow = Dataflow(fixture) if fixture else None
    pairs = (
        [call for call in flow.calls("copy_weights", "Pair") if not _are_the_two(flow, call)]
        if flow
        else []
    )
    if pairs:
        return forbid(subject.test, pairs)
    missing = "the models do not get the same weights"
    return require(subject.test, flow.calls("copy_weights") if flow else [], missing)


def _are_the_two(flow: Dataflow, call: ast.Call) -> bool:
    made = [flow.called(arg) for arg in call.args[:2]]
    return made[1:] == ["generated_causal_lm"] and made[0] not in ("", "generated_causal_lm")


def _fresh_seed(subject: Subject) -> Outcome:
    fixed = subject.test.calls(lambda name: name.endswith("manual_seed"))
    if fixed:
        return forbid(subject.test, fixed)
    return require(subject.test, _calls(subject, "fresh_seed"), "no fresh, printed seed")


def _inputs(subject: Subject) -> Outcome:
    """Positions are counted here only where the model's own first one is what they begin with."""
    node, batch = _constant(subject, "BATCH")
    counted = {
        part
        for sum_ in subject.test.all(ast.BinOp)
        if isinstance(sum_.op, ast.Add) and dotted(sum_.left) == "FIRST_POSITION"
        for part in ast.walk(sum_.right)
    }
    made_here = subject.test.calls(lambda name: name.endswith((".arange", ".zeros")))
    made_here = [call for call in made_here if call not in counted]
    if made_here:
        return forbid(subject.test, made_here)
    found = _calls(subject, "random_prompt") if node and batch and batch >= 2 else []
    return require(
        subject.test,
        found,
        "no random prompts in a batch of two or more with positions of their own",
    )


def _no_smoke(subject: Subject) -> Outcome:
    """A test that compares nothing, or a thing with itself, proves nothing."""
    flows = {node: Dataflow(node) for node in _tests(subject).values()}
    empty = [node for node, flow in flows.items() if not flow.calls("assert_rmse_close")]
    same = [
        call
        for flow in flows.values()
        for call in flow.calls("assert_rmse_close")
        if len(call.args) < 2 or flow.same(call.args[0], call.args[1])
    ]
    others = [node for node in subject.test.all(ast.AST) if _redefines(node, "assert_rmse_close")]
    return forbid(subject.test, [*empty, *same, *others])


def _redefines(node: ast.AST, name: str) -> bool:
    """Whether a name that is imported from onboard's own helpers is bound in some other way."""
    match node:
        case (
            ast.Name(id=bound, ctx=ast.Store())
            | ast.FunctionDef(name=bound)
            | ast.ClassDef(name=bound)
        ):
            return bound == name
        case ast.ImportFrom(module=module, names=aliases) if module != "onboard.testing":
            return any((alias.asname or alias.name) == name for alias in aliases)
        case ast.ImportFrom(names=aliases):
            return any(alias.asname == name and alias.name != name for alias in aliases)
    return False


def _no_skips(subject: Subject) -> Outcome:
    """Hardware alone may be a reason."""
    skips = subject.test.named("^(skip|xfail|importorskip)$")
    conditions = [call.args[0] for call in subject.test.calls(lambda name: name.endswith("skipif"))]
    return forbid(
        subject.test,
        [
            *skips,
            *(node for node in conditions if ast.unparse(node) != "not torch.cuda.is_available()"),
        ],
    )


def _limits(subject: Subject) -> Outcome:
    node, cpu = _constant(subject, "CPU_FLOAT32")
    gpu_node, gpu = _constant(subject, "GPU_BFLOAT16")
    strict = isinstance(cpu, float) and cpu <= SAME
    bounded = isinstance(gpu, dict) and all(
        limit <= ON_GPU.get(kind, ON_GPU_ELSE) for kind, limit in gpu.items()
    )
    if loose := [*_second_limits(subject), *_free_limits(subject)]:
        return forbid(subject.test, loose)
    found = [node, gpu_node] if node and gpu_node and strict and bounded else []
    return require(
        subject.test, found, f"a limit is missing, or above {SAME:.0e} in float32 on the CPU"
    )


def _second_limits(subject: Subject) -> list[ast.AST]:
    """Where a limit is given once more, as a whole or in part."""
    constants = ("CPU_FLOAT32", "GPU_BFLOAT16", "limit")
    stores = [
        node
        for node in subject.test.all(ast.expr)
        if isinstance(getattr(node, "ctx", None), ast.Store)
    ]
    names = [node for node in stores if dotted(node).rpartition(".")[2] in constants]
    first = {next((node for node in names if dotted(node) == name), None) for name in constants[:2]}
    parts = [
        node
        for node in stores
        if isinstance(node, ast.Subscript) and dotted(node.value) in constants
    ]
    changed = subject.test.calls(
        lambda name: name.startswith("GPU_BFLOAT16.") or name in ("setattr", "globals", "vars")
    )
    return [*(node for node in names if node not in first), *parts, *changed]


def _free_limits(subject: Subject) -> list[ast.AST]:
    """Comparisons with another limit than the pair's, and a `limit` that does not return the
    constants.
    """
    method = subject.test.functions(subject.test.classes().get("Pair")).get("limit")
    wanted = "CPU_FLOAT32 if self.device == 'cpu' else GPU_BFLOAT16[kind]"
    free = (
        []
        if method and [ast.unparse(node) for node in _code(method)] == [f"return {wanted}"]
        else [method]
    )
    calls = [
        call
        for node in _tests(subject).values()
        for call in Dataflow(node).calls("assert_rmse_close")
    ]
    loose = [
        call
        for call in calls
        if len(call.args) != 4 or not ast.unparse(call.args[2]).startswith("pair.limit(")
    ]
    return [*(node or subject.test.tree.body[0] for node in free), *loose]


def _code(function: Function) -> list[ast.stmt]:
    """The statements of a function but its docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def _blocks(subject: Subject) -> Outcome:
    """Each block of the spec is tested in some layer."""
    node, tested = _constant(subject, "BLOCKS")
    places = {_anywhere(path) for path in tested or {}}
    missing = [
        block.path
        for block in subject.blocks(*_TESTED_KINDS)
        if _anywhere(block.path) not in places
    ]
    used = _parametrized(subject, "test_block", "BLOCKS") and _replays(subject, "test_block")
    return require(
        subject.test,
        [node] if node and used and not missing else [],
        f"no test_block of {', '.join(missing) or 'BLOCKS'}",
    )


def _anywhere(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _parametrized(subject: Subject, test: str, constant: str) -> bool:
    function = _tests(subject).get(test)
    return function is not None and any(
        f", {constant})" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def _replays(
    subject: Subject, test: str, what: str = "pair.actual.get_submodule(path)"
) -> list[ast.Call]:
    """The calls by which a test gives the generated model what Hugging Face's was given."""
    function = _tests(subject).get(test)
    flow = Dataflow(function) if function else None
    calls = flow.calls("call.replay") if flow else []
    replayed = [
        call
        for call in calls
        if flow and call.args and ast.unparse(flow.origin(call.args[0])) == what
    ]
    return replayed if len(replayed) == len(calls) else []


def _layers(subject: Subject) -> Outcome:
    node, tested = _constant(subject, "LAYERS")
    kinds = {kind.name for kind in subject.spec.layer_kinds}
    missing = kinds - set((tested or {}).values())
    used = _parametrized(subject, "test_layer", "LAYERS") and _replays(subject, "test_layer")
    found = [node] if node and used and not missing else []
    return require(
        subject.test, found, f"no test_layer of {', '.join(sorted(missing)) or 'LAYERS'}"
    )


def _whole_model(subject: Subject) -> Outcome:
    """The path "" is the whole model: its recorded call has Hugging Face's logits."""
    test = _tests(subject).get("test_model")
    calls = subject.test.all(ast.Subscript, test) if test else []
    recorded = [node for node in calls if ast.unparse(node) == "pair.calls['']"]
    replayed = _replays(subject, "test_model", "pair.actual") if recorded else []
    return require(subject.test, replayed, "no test_model that compares both models' logits")


def _export(subject: Subject) -> Outcome:
    """Exported with a dynamic batch and sequence."""
    test = _tests(subject).get("test_export")
    exports = _calls(subject, "torch.export.export", inside=test) if test else []
    dynamic = (
        [node for node in subject.test.all(ast.Dict, test) if _dynamic_dimensions(node) >= {0, 1}]
        if test
        else []
    )
    shapes = [call for call in exports if any(key.arg == "dynamic_shapes" for key in call.keywords)]
    return require(
        subject.test, shapes if dynamic else [], "no export with dynamic batch and sequence"
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
    test = _tests(subject).get("test_export")
    loops = (
        [node for node in subject.test.all(ast.For, test) if _distinct_shapes(node) >= 2]
        if test
        else []
    )
    return require(subject.test, loops, "the exported graph does not run on a second shape")


def _distinct_shapes(loop: ast.For) -> int:
    """How many different pairs a loop over a list of pairs visits."""
    shapes = loop.iter.elts if isinstance(loop.iter, ast.List) else []
    return len({ast.unparse(shape) for shape in shapes})


def _cached_decode(subject: Subject) -> Outcome:
    """What the cached graph generates is compared with Hugging Face's logits of the whole text."""
    test = _tests(subject).get("test_cached_decode")
    flow = Dataflow(test) if test else None
    compared = flow.calls("assert_rmse_close") if flow else []
    right = [call for call in compared if flow and len(call.args) > 1 and _is_decode(flow, call)]
    missing = "no test_cached_decode against whole texts"
    return require(subject.test, right if len(right) == len(compared) else [], missing)


def _is_decode(flow: Dataflow, call: ast.Call) -> bool:
    """Whether the first value is what the cached graph gave, the second what Hugging Face's model
    gave.
    """
    actual, expected = (flow.sources(arg) for arg in call.args[:2])
    cached = bool(actual & {"llm.generate", "continue_distinct"}) and "pair.expected" not in actual
    return cached and "pair.expected" in expected and "all_logprobs" not in expected


EQUIVALENCE_CHECKS = [
    contract("E01", "the config is small and written out", _tiny),
    contract(
        "E02", "the file under test is modeling_{spec.family}.py of the same root", _model_file
    ),
    contract("E03", "the reference is transformers' own {spec.architecture}", _hf_imported),
    contract("E04", "there is no second implementation of it", _no_second_reference),
    contract("E05", "all weights are random", _random_weights),
    contract("E06", "both models get the same weights", _same_weights),
    contract("E07", "the seed is fresh and printed", _fresh_seed),
    contract(
        "E08",
        "prompts are random, two or more in a batch, and do not begin at position zero",
        _inputs,
    ),
    contract("E09", "every test compares numbers: no smoke tests", _no_smoke),
    contract("E10", "only missing hardware skips a test", _no_skips),
    contract("E11", "the limits are those of the dtype: 1e-5 in float32", _limits),
    contract("E12", "every kind of block is tested", _blocks),
    contract("E13", "every kind of layer is tested", _layers),
    contract("E14", "the whole model's logits are compared", _whole_model),
    contract("E15", "it is exported with dynamic batch and sequence", _export),
    contract("E16", "the exported graph runs on a second shape", _second_shape),
    contract("E17", "cached decode is compared with whole texts", _cached_decode),
]
