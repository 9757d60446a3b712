"""Turn translated classes into the text of their definitions."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import nn

from onboard.analysis.behaviour.left_at_classes import BETWEEN_LAYERS
from onboard.analysis.source import find_method, module_source
from onboard.codegen.tidy.choices import only_called, with_joined_choices
from onboard.codegen.tidy.known_modules import with_known_modules
from onboard.codegen.tidy.module_calls import asked_of, with_plain_modules
from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.forms import ANY_TUPLE, SEVERAL_ROWS, SHARED, TUPLE_OR_NOT
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import Output, declared
from onboard.codegen.translate.language.holes import Hole
from onboard.codegen.translate.language.object_values import Config, Instance
from onboard.codegen.translate.language.partial_classes import parameter_of
from onboard.codegen.translate.language.program.argument_facts import default_nodes
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.records import Record
from onboard.codegen.translate.language.state import ClassState, Routine
from onboard.codegen.translate.language.statements.assignments.between_methods import (
    BETWEEN_METHODS,
)
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.trees import cleanup
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name, renamed
from onboard.codegen.translate.language.values import NONE, Code, Value
from onboard.codegen.translate.mechanisms import experts
from onboard.codegen.translate.output import argument_types, codebooks
from onboard.codegen.translate.output.hidden_functions import rename_hidden
from onboard.codegen.translate.output.hoisted import routines_of
from onboard.codegen.translate.output.prune import ReplaceAttribute, prune
from onboard.codegen.translate.output.tidied import config_of, tidy
from onboard.codegen.translate.output.tidy_text import norms_of, tidy_text
from onboard.codegen.translate.output.ties import add_ties, declared_ties
from onboard.hf.codebooks import places_of


@dataclass
class MethodText:
    """A method or function: name, signature with parentheses and return type, body."""

    name: str
    signature: str
    body: str
    decorator: str = ""


@dataclass
class ClassText:
    """A class, ready for the template of the file."""

    name: str
    base: str
    kind: str
    cls: type
    methods: list[MethodText]
    reads: set[str]
    """Global names that the code mentions."""
    weights_only: list[str]
    """Modules that nothing runs."""


def emit(translator: Translator, top: ClassState) -> tuple[list[ClassText], list[MethodText]]:
    """Return the model's classes, what others are made of first, and its helper functions."""
    tidy(translator)
    prune(translator)
    add_ties(translator)
    rename_hidden(translator, routines_of(translator))
    calls = _constructor_calls(translator)
    order = _order(translator, top)
    classes = [_class_text(state, translator, top, calls) for state in order]
    return classes, [_function_text(key, routine) for key, routine in translator.functions.items()]


def _order(translator: Translator, top: ClassState) -> list[ClassState]:
    """Return the classes in reading order: every class after those that it constructs."""
    by_name = {state.cls.__name__: state for state in translator.states.values()}
    out: list[ClassState] = []

    def visit(state: ClassState) -> None:
        if state in out:
            return
        assert state.init is not None
        for statement in state.init.body:
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Name)
                    and node.id in by_name
                    and by_name[node.id] is not state
                ):
                    visit(by_name[node.id])
        if state not in out:
            out.append(state)

    visit(top)
    leaves = ("rmsnorm", "layernorm", "l2norm", "rotary")
    kinds = [
        getattr(translator.findings.recognised.get(state.cls.__name__), "kind", "") for state in out
    ]
    front = [state for kind in leaves for state, own in zip(out, kinds, strict=True) if own == kind]
    return front + [state for state in out if state not in front]


def _constructor_calls(translator: Translator) -> dict[str, list[ast.Call]]:
    calls: dict[str, list[ast.Call]] = {
        state.cls.__name__: [] for state in translator.states.values()
    }
    for state in translator.states.values():
        assert state.init is not None
        for statement in state.init.body:
            for node in ast.walk(statement):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in calls
                ):
                    # A local variable's value may stand in several places
                    known = calls[node.func.id]
                    known.extend([] if any(node is other for other in known) else [node])
    for class_name, nodes in calls.items():
        state = next(item for item in translator.states.values() if item.cls.__name__ == class_name)
        assert state.init is not None
        defaults = _kept_defaults(state.init, nodes)
        for node in nodes:
            given = {item.arg: item.value for item in node.keywords}
            node.args = [given[key] for key in state.init.parameters if key not in defaults]
            node.keywords = [
                ast.keyword(key, given[key])
                for key in state.init.parameters
                if key in defaults and key in given
            ]
    return calls


def _kept_defaults(init: Routine, calls: list[ast.Call]) -> dict[str, ast.expr]:
    """Return the defaults of `__init__` worth keeping: those that a call relies on, and constants
    other than None.
    """
    defaults = {
        key: node for key, node in default_nodes(init.node).items() if key in init.parameters
    }
    given = [
        {item.arg for item in call.keywords} | set(init.parameters[: len(call.args)])
        for call in calls
    ]
    omitted = {key for key in defaults if any(key not in names for names in given)}
    plain = {
        key
        for key, node in defaults.items()
        if isinstance(node, ast.Constant) and node.value is not None
    }
    kept = {key: node for key, node in defaults.items() if key in omitted or key in plain}
    tail = init.parameters[-len(kept) :] if kept else []
    return kept if set(tail) == set(kept) or omitted else {}


def _class_text(
    state: ClassState, translator: Translator, top: ClassState, calls: dict[str, list[ast.Call]]
) -> ClassText:
    recognised = translator.findings.recognised.get(state.cls.__name__)
    init = (
        []
        if state.inherits_init
        else [_init_text(state, translator, top, calls[state.cls.__name__])]
    )
    methods = [method for method in init if not _says_nothing(method)]
    for key, routine in state.methods.items():
        methods.append(_method_text(key, routine, translator, state, state is top))
    if state is top and (places := places_of(translator.model)) is not None:
        methods.insert(1, MethodText("codebooks", *codebooks.property_of(*places), "property"))
    assert state.init is not None
    read = [_read(state.init.body), _read(state.guards)]
    reads = {"torch", "nn"}.union(*read, *(_read(each.body) for each in state.methods.values()))
    kind = recognised.kind if recognised else ""
    unrun = [attr for attr in state.weights_only if isinstance(state.attributes[attr], Instance)]
    base = "nn.ModuleList" if experts.is_separate(recognised) else _base(state.cls)
    return ClassText(state.cls.__name__, base, kind, state.cls, methods, reads, unrun)


def _read(body: Sequence[ast.AST]) -> set[str]:
    """Return the names that statements read and do not bind themselves, as a loop does."""
    names = [node for tree in body for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - bound


def _says_nothing(init: MethodText) -> bool:
    """Whether an `__init__` does what that of `nn.Module` does by itself."""
    return (init.signature, init.body) == ("(self) -> None", "super().__init__()")


def _base(cls: type) -> str:
    base = next(item for item in cls.__mro__ if item.__module__.startswith("torch."))
    return "nn.Module" if base is nn.Module else f"nn.{base.__name__}"


def _init_text(
    state: ClassState, translator: Translator, top: ClassState, calls: list[ast.Call]
) -> MethodText:
    init = state.init
    assert init is not None
    facts = translator.argument_facts["init", state.cls.__qualname__]
    defaults, known = _kept_defaults(init, calls), spread(facts)
    parameters = ["self"]
    for key in init.parameters:
        fact = known.get(key)
        kind = _config_type(fact, translator) or _module_type(fact)
        kind = kind or declared(facts, key)
        kind = kind or argument_types.of_module(*parameter_of(key, facts, init.node))
        if any(isinstance(value, ast.Tuple) for value in _passed(key, init.parameters, calls)):
            kind += " | tuple[int, ...]"
        if (
            isinstance(default := defaults.get(key), ast.Constant)
            and default.value is None
            and "None" not in kind
        ):
            kind += " | None"
        parameters.append(
            f"{key}: {kind}" + (f" = {ast.unparse(defaults[key])}" if key in defaults else "")
        )
    code = _code(translator)
    made = with_plain_modules(with_joined_choices(init.body, only_called(code)), asked_of(code))
    configs = (key for key in init.parameters if isinstance(known.get(key), Config | Record))
    config = name(next(configs, "config"))
    body = [*made, *(_guard(item, config) for item in state.guards)]
    if state is top:
        body.extend(declared_ties(state, translator, config))
    head = f"({', '.join(parameters)}) -> None"
    return MethodText("__init__", head, tidy_text(body, init.source, _constructors(translator)))


def _config_type(fact: Value | None, translator: Translator) -> str:
    """Return the class of a config that a constructor is given, or "" where it is given none."""
    made = translator.config if isinstance(fact, Record) else getattr(fact, "obj", None)
    return type(made).__name__ if isinstance(fact, Record | Config) else ""


def _constructors(translator: Translator) -> dict[str, list[str]]:
    """Return the parameters of the constructors of a model's classes."""
    states = translator.states.values()
    return {item.cls.__name__: item.init.parameters for item in states if item.init is not None}


def _code(translator: Translator) -> list[ast.stmt]:
    """Return the statements of all classes of a model."""
    routines = [
        routine
        for state in translator.states.values()
        for routine in (state.init, *state.methods.values())
        if routine is not None
    ]
    return [statement for routine in routines for statement in routine.body]


def _module_type(fact: Value | None) -> str | None:
    """Return the type of a parameter that is a module."""
    if not isinstance(fact, Instance):
        return None
    (cls, *others) = fact.classes
    return (
        "nn.Module"
        if others
        else f"nn.{cls.__name__}"
        if cls.__module__.startswith("torch.")
        else cls.__name__
    )


def _passed(key: str, parameters: list[str], calls: list[ast.Call]) -> list[ast.expr]:
    """Return what constructor calls pass for a parameter."""
    position = parameters.index(key)
    positional = [call.args[position] for call in calls if position < len(call.args)]
    return positional + [item.value for call in calls for item in call.keywords if item.arg == key]


def _guard(condition: ast.expr, config: ast.Name) -> ast.stmt:
    """Return the assertion of a condition that the translation takes for granted."""
    condition = ReplaceAttribute("config", name("config")).visit(deepcopy(condition))
    condition = renamed(condition, "config", config.id)
    denied = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
    said = condition.operand if isinstance(condition, ast.UnaryOp) and denied else condition
    text = ast.unparse(said).replace(f"{config.id}.", "").replace("self.", "")
    message = f"not covered: {text}" if denied else f"covered only with {text}"
    return ast.Assert(condition, ast.Constant(message))


def _method_text(
    key: str, routine: Routine, translator: Translator, state: ClassState, is_top: bool
) -> MethodText:
    if is_top and key == "forward":
        return _top_forward(routine, translator)
    static = any(ast.unparse(item) == "staticmethod" for item in routine.node.decorator_list)
    types = {
        item: _tensor_annotation(item, routine, translator, state) for item in routine.parameters
    }
    given = argument_types.last_defaults(routine) if translator.specialised else {}
    parameters = [
        f"{item}: {argument_types.or_none(item, kind, routine, given)}{given.get(item, '')}"
        for item, kind in types.items()
    ]
    head = ", ".join(([] if static else ["self"]) + parameters)
    decorator = "staticmethod" if static else ""
    assert state.init is not None
    known = with_known_modules(routine.body, state.init.body)
    body = tidy_text(known, routine.source, norms=norms_of(state, translator))
    return MethodText(key, f"({head}) -> {_return_annotation(routine)}", body, decorator)


def _top_forward(routine: Routine, translator: Translator) -> MethodText:
    """Return the forward of the causal language model: the contract of generated files."""
    logits = routine.shape.fields.get("logits") if isinstance(routine.shape, Output) else None
    if not (isinstance(logits, Hole) and routine.holes == 1):
        raise Untranslatable("the model's output: logits alone must be left of it")
    several = places_of(translator.model) is not None
    body = codebooks.on_tokens(routine.body) if several else deepcopy(routine.body)
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Return):
                assert node.value is not None
                node.value = ast.Call(
                    name("CausalLMOutput"), [], [ast.keyword("logits", node.value)]
                )
    check = [ast.Assert(ast.Compare(name("position_ids"), [ast.IsNot()], [ast.Constant(None)]))]
    signature = "(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput"
    return MethodText("forward", signature, tidy_text([*check, *body], routine.source))


def _tensor_annotation(
    parameter: str, routine: Routine, translator: Translator, state: ClassState
) -> str:
    key = ("method", f"{state.cls.__qualname__}.{routine.node.name}")
    facts = translator.argument_facts.get(key, {})
    fact, said = spread(facts).get(parameter), declared(facts, parameter)
    if fact is not None and fact.annotation is not None:
        return fact.annotation
    if parameter == BETWEEN_LAYERS:
        return "dict[str, torch.Tensor]"
    if parameter == BETWEEN_METHODS:
        return argument_types.ANY_DICT
    if isinstance(fact, Code) and fact.form == SHARED:
        return "dict[str, tuple[torch.Tensor, torch.Tensor]]"
    if isinstance(fact, Code) and fact.static and not _unpacked(parameter, routine):
        named = _is_named(routine.node, parameter)
        return argument_types.of_module(routine.node, parameter) if named else said or "int"
    count = _unpacked(parameter, routine)
    if (
        not count
        and parameter == "position_embeddings"
        and not (isinstance(fact, Code) and fact.form not in (None, SEVERAL_ROWS, *ANY_TUPLE))
    ):
        count = 2
    kind = f"tuple[{', '.join(['torch.Tensor'] * count)}]" if count else "torch.Tensor"
    if not count and isinstance(fact, Code) and fact.form in ANY_TUPLE:
        kind = "tuple[torch.Tensor, ...]"
    if not count and isinstance(fact, Code) and fact.form == TUPLE_OR_NOT:
        kind = "torch.Tensor | tuple[torch.Tensor, ...]"
    return f"{kind} | None" if isinstance(fact, Code) and fact.optional else kind


def _unpacked(parameter: str, routine: Routine) -> int:
    """Return into how many parts a method unpacks a parameter; 0: it does not."""
    for statement in routine.body:
        if _assigns(statement, parameter):
            break  # what is unpacked later is something else
        for node in ast.walk(statement):
            match node:
                case ast.Assign(targets=[ast.Tuple(elts=parts)], value=ast.Name(id=unpacked)) if (
                    unpacked == parameter
                ):
                    return len(parts)
    return 0


def _assigns(statement: ast.stmt, variable: str) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == variable for target in statement.targets
    )


def _is_named(node: ast.FunctionDef, parameter: str) -> bool:
    return any(item.arg == parameter for item in (*node.args.args, *node.args.kwonlyargs))


def _return_annotation(routine: Routine) -> str:
    if routine.holes == 0:
        return "None"
    return (
        "torch.Tensor"
        if routine.holes == 1
        else f"tuple[{', '.join(['torch.Tensor'] * routine.holes)}]"
    )


def _function_text(key: str, routine: Routine) -> MethodText:
    facts = routine.argument_facts.items()
    static = {item for item, fact in facts if isinstance(fact, Code) and fact.static}
    types = {
        item: argument_types.in_use(routine.node, item)
        for item in static
        if _is_named(routine.node, item)
    }
    types |= {item: "torch.device" for item in routine.parameters if item == "device"}
    types |= {item: kind for item, fact in facts if (kind := _module_type(fact)) is not None}
    parameters = [f"{item}: {types.get(item, 'torch.Tensor')}" for item in routine.parameters]
    kind = (
        argument_types.returned(routine.node, types)
        if routine.static
        else _return_annotation(routine)
    )
    return MethodText(
        key, f"({', '.join(parameters)}) -> {kind}", tidy_text(routine.body, routine.source)
    )


def rope_default(translator: Translator, cls: type) -> MethodText:
    """Return the translation of a rotary class's own formula for the inverse frequencies."""
    found = find_method(cls, "compute_default_rope_parameters")
    if found is None:
        raise Untranslatable(f"{cls.__name__}, which has no default frequencies")
    owner, node = found
    frame = Frame(translator, module_source(owner.__module__), "function")
    parameters = [item.arg for item in node.args.args if item.arg in ("config", "layer_type")]
    config = config_of(translator, cls)
    values = {
        "config": Config(name("config"), config),
        "layer_type": Code(name("layer_type"), static=True),
    }
    frame.env.values.update({item.arg: values.get(item.arg, NONE) for item in node.args.args})
    execute(node.body, frame)
    for statement, value in frame.returns:
        statement.value = value.code()
    types = {"config": type(config).__name__, "layer_type": "str"}
    if not any(isinstance(each, dict) for each in (config.rope_parameters or {}).values()):
        types["layer_type"] = "str | None = None"  # all kinds of layers have the same
    head = ", ".join(f"{item}: {types[item]}" for item in parameters)
    body = tidy_text(cleanup.clean(frame.out), frame.source)
    return MethodText("plain_rope", f"({head}) -> tuple[torch.Tensor, float]", body, "staticmethod")
