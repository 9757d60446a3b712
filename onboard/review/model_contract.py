"""Checklist, part M: what the rest of the engine relies on in a model file."""

from __future__ import annotations

import ast
from contextlib import suppress

from onboard.codegen.model_file import first_position_expression
from onboard.review.checklist import Subject, contract, style
from onboard.review.python_source import (
    Function,
    Outcome,
    dotted,
    forbid,
    parameters,
    require,
    required,
)

_RUNTIME_ARGUMENTS = {
    "attention_mask",
    "cache_position",
    "head_mask",
    "inputs_embeds",
    "labels",
    "output_attentions",
    "output_hidden_states",
    "past_key_value",
    "past_key_values",
    "return_dict",
    "use_cache",
}
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)


def _top_forward(subject: Subject) -> list[Function]:
    """The forward of the causal LM, alone in a list; none when the file has none."""
    forward = subject.model.forwards().get(subject.spec.architecture)
    return [forward] if forward else []


def _class(subject: Subject) -> Outcome:
    found = subject.model.classes().get(subject.spec.architecture)
    is_module = found is not None and any(ast.unparse(base) == "nn.Module" for base in found.bases)
    return require(
        subject.model,
        [found] if found and is_module else [],
        f"no class {subject.spec.architecture}(nn.Module)",
    )


def _inputs(subject: Subject) -> Outcome:
    def names_them(forward: Function) -> bool:
        names = [arg.arg for arg in parameters(forward)]
        return names[:2] == ["input_ids", "position_ids"] and not forward.args.defaults

    forwards = [forward for forward in _top_forward(subject) if names_them(forward)]
    return require(
        subject.model, forwards, "no forward(self, input_ids, position_ids) without defaults"
    )


def _position_ids_asserted(subject: Subject) -> Outcome:
    asserts = [
        node
        for forward in _top_forward(subject)
        for node in subject.model.all(ast.Assert, forward)
        if _mentions(node.test, "position_ids")
    ]
    return require(subject.model, asserts, "the forward does not assert position_ids")


def _no_position_fallback(subject: Subject) -> Outcome:
    """What computes has its positions from its caller; a constructor may count how many there can
    be.
    """
    made_up = [
        node
        for function in subject.model.all(ast.FunctionDef)
        if function.name != "__init__"
        for node in subject.model.all(ast.AST, function)
        if isinstance(node, _ASSIGNMENTS)
        and _binds(node, "position_ids")
        and not _mentions(node, "position_ids")
    ]
    return forbid(subject.model, made_up)


def _output(subject: Subject) -> Outcome:
    returns = [
        node for forward in _top_forward(subject) for node in subject.model.all(ast.Return, forward)
    ]
    wrong = [node for node in returns if not _is_output(node.value)]
    if wrong:
        return forbid(subject.model, wrong)
    return require(subject.model, returns, "the forward returns nothing")


def _is_output(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "CausalLMOutput"


def _registered(subject: Subject) -> Outcome:
    last = subject.model.tree.body[-1]
    first = first_position_expression(subject.spec, "config")
    wanted = f"register_causal_lm({subject.spec.config_class!r}, {subject.spec.architecture}"
    wanted += f", first_position=lambda config: {first})" if first is not None else ")"
    found = isinstance(last, ast.Expr) and ast.unparse(last) == wanted
    return require(subject.model, [last] if found else [], f"the last statement is not {wanted}")


def _no_runtime_arguments(subject: Subject) -> Outcome:
    return forbid(
        subject.model,
        [arg for forward in _top_forward(subject) for arg in _runtime_arguments(forward)],
    )


def _no_inner_runtime_arguments(subject: Subject) -> Outcome:
    """Embeddings that a caller has to give are what a multimodal model's text model begins with, no
    choice of inputs.
    """
    inner = [f for name, f in subject.model.forwards().items() if name != subject.spec.architecture]
    return forbid(
        subject.model,
        [
            a
            for f in inner
            for a in _runtime_arguments(f)
            if a.arg != "inputs_embeds" or a not in required(f)
        ],
    )


def _runtime_arguments(forward: Function) -> list[ast.arg]:
    starred = (forward.args.vararg, forward.args.kwarg)
    return [arg for arg in parameters(forward) if arg.arg in _RUNTIME_ARGUMENTS or arg in starred]


def _buffers(subject: Subject) -> Outcome:
    persistent = [
        call
        for call in subject.model.calls(
            lambda name: name.endswith(("register_buffer", "nn.Buffer"))
        )
        if not any(
            key.arg == "persistent" and ast.unparse(key.value) == "False" for key in call.keywords
        )
    ]
    return forbid(
        subject.model, [call for call in persistent if not _is_in_checkpoint(subject, call)]
    )


def _is_in_checkpoint(subject: Subject, call: ast.Call) -> bool:
    """Whether the checkpoint has the tensor that a buffer is registered or assigned under, or the
    model has it not.
    """
    registered = (
        call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    )
    name = registered or subject.model.assigned(call)
    if any(key.rpartition(".")[2] == name for key in subject.expected_shapes):
        return True
    with suppress(Exception):  # a model that cannot be built may have it
        return isinstance(name, str) and all(
            key.rpartition(".")[2] != name for key in subject.actual_shapes()[0]
        )
    return False


def _sliced_once(subject: Subject) -> Outcome:
    """Positions may scale a layer's queries; its tables are those that it is given."""
    inner = {block.class_name for block in subject.blocks("attention", "decoder_layer", "mlp")}
    forwards = subject.model.forwards()
    rotary = {
        name
        for name in forwards.keys() - inner
        if "position_ids" in {a.arg for a in parameters(forwards[name])}
    }
    made = [node for node in subject.model.all(ast.Assign) if _makes(node.value, rotary)]
    modules = {
        f"self.{target.attr}"
        for node in made
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }
    found = [
        node
        for name, forward in forwards.items()
        if name in inner
        for node in subject.model.all(ast.AST, forward)
        if _slices(node, modules)
    ]
    return forbid(subject.model, found)


def _makes(value: ast.expr, classes: set[str]) -> bool:
    return isinstance(value, ast.Call) and dotted(value.func) in classes


def _slices(node: ast.AST, tables: set[str]) -> bool:
    """Whether a node looks positions up, by itself or through a module that has tables."""
    match node:
        case ast.Subscript(slice=index):
            return _mentions(index, "position_ids")
        case ast.Call(func=function, args=args):
            known = dotted(function) in tables or dotted(function).endswith(
                ("gather", "index_select")
            )
            return known and any(_mentions(arg, "position_ids") for arg in args)
    return False


def _module_tree(subject: Subject) -> Outcome:
    """Build the file's model without memory and compare names and shapes with the checkpoint's."""
    try:
        found, parameters = subject.actual_shapes()
    except (
        Exception
    ) as error:  # whatever the file under review raises is its failure, not the reviewer's
        return Outcome(
            False, [f"{subject.model.path}:1: it cannot be built: {type(error).__name__}: {error}"]
        )
    expected = subject.expected_shapes
    wrong = sorted(
        {name for name in expected if found.get(name) != expected[name]}
        | (parameters - expected.keys())
    )
    shown = [
        f"{name}: {found.get(name)}, in the checkpoint {expected.get(name)}" for name in wrong[:5]
    ]
    return Outcome(
        not wrong,
        [f"{subject.model.path}:1: {line}" for line in shown or [f"{len(found)} tensors alike"]],
    )


def _binds(node: ast.AST, name: str) -> bool:
    """Whether an assignment, or one inside an expression, binds a name."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = (part for target in targets if target is not None for part in ast.walk(target))
    return any(isinstance(part, ast.Name) and part.id == name for part in parts)


def _mentions(node: ast.AST, name: str) -> bool:
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == name)
    return any(isinstance(part.ctx, ast.Load) for part in names)


MODEL_CONTRACT = [
    contract("M01", "{spec.architecture} is a torch module", _class),
    contract("M02", "its forward takes input_ids and position_ids, both required", _inputs),
    contract("M03", "it asserts that position_ids are given", _position_ids_asserted),
    contract("M04", "position_ids are never made up", _no_position_fallback),
    contract("M05", "it returns a CausalLMOutput", _output),
    contract("M06", "the last line registers it for {spec.config_class}", _registered),
    contract(
        "M07", "it takes no masks, caches, labels, output flags or **kwargs", _no_runtime_arguments
    ),
    contract("M08", "buffers that the checkpoint lacks are not persistent", _buffers),
    style("M09", "RoPE tables are sliced by position_ids once, not in each layer", _sliced_once),
    contract("M10", "the module tree has the checkpoint's names and shapes", _module_tree),
    style(
        "M11",
        "no inner forward takes masks, caches, labels, output flags or **kwargs",
        _no_inner_runtime_arguments,
    ),
]
