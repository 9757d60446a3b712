"""Translate the classes that a model reaches.

Evaluation is monovariant: a class or helper has one translation, for all its uses. The arguments of
all uses are joined into argument facts; when a use changes the facts of something translated
already, the round is thrown away and repeated with the new facts.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import nn

from onboard.analysis.source import (
    ModuleSource,
    find_method,
    function_node,
    module_source,
    plain_class,
)
from onboard.analysis.tiny.tiny_prompts import counts_positions
from onboard.codegen.translate.language.args import Args, plain_call, spread
from onboard.codegen.translate.language.config_values import as_constants, gives_settings
from onboard.codegen.translate.language.expressions import multimodal_configs, objects
from onboard.codegen.translate.language.expressions.calls import call_value
from onboard.codegen.translate.language.expressions.decisions import decided_by_modules, switched
from onboard.codegen.translate.language.expressions.evaluate import evaluate
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.frame import Frame, Mechanism, Program
from onboard.codegen.translate.language.handed import changes, methods, plain_objects
from onboard.codegen.translate.language.handed.by_name import shared
from onboard.codegen.translate.language.handed.left_in_arguments import Path
from onboard.codegen.translate.language.object_values import (
    Config,
    Instance,
    Method,
    Repeated,
    Self,
)
from onboard.codegen.translate.language.program import (
    closures,
    supers,
    unused_modules,
    uses,
)
from onboard.codegen.translate.language.program.argument_facts import (
    all_bound,
    as_parameters,
    bind,
    default_fact,
    default_nodes,
    join_uses,
    receiver,
    sets_attributes,
)
from onboard.codegen.translate.language.program.base_parameters import as_written, method_of
from onboard.codegen.translate.language.program.constructors import construct, constructor_of
from onboard.codegen.translate.language.program.inline import (
    call_autograd,
    defaults,
    inline,
    with_rest,
)
from onboard.codegen.translate.language.program.plain_functions import or_as_it_is
from onboard.codegen.translate.language.program.results import (
    called,
    same_call,
)
from onboard.codegen.translate.language.program.routines import routine_of
from onboard.codegen.translate.language.program.supers import execute_inside, refuse_raise
from onboard.codegen.translate.language.program.without_arguments import given_always
from onboard.codegen.translate.language.sequences import fact_of
from onboard.codegen.translate.language.state import ClassState, Restart, Routine
from onboard.codegen.translate.language.statements.assignments import own_attributes
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.trees.function_names import FunctionNames
from onboard.codegen.translate.language.trees.local_lists import with_local_lists
from onboard.codegen.translate.language.trees.syntax import Untranslatable, attribute, name
from onboard.codegen.translate.language.values import NONE, Known, Value


class Translator(Program):
    """Translates everything that a causal language model class reaches.

    Args:
        model: a tiny instance; it decides branches of which only one side has a translation.
        findings: what the analysis says of the model's classes and functions.
        mechanisms: what modeling code has besides plain Python, as one.
        config: what the model was made with, where its constructors may have changed it.
        specialised: decide branches on the config from the start.
    """

    def __init__(
        self,
        model: nn.Module,
        findings: Findings | None = None,
        mechanisms: Mechanism | None = None,
        config: Any = None,
        specialised: bool = False,
    ) -> None:
        self.model = model
        self.config: Any = model.config if config is None else config
        self.findings = findings or Findings()
        self.mechanisms = mechanisms or Mechanism()
        self.knows_masks, self.implementation = True, "onboard"
        self.specialised = specialised
        self.changed: dict[str, Value] = {}
        self.calling: list[ast.FunctionDef] = []
        self.pairs_positions = self.writes_positions = False
        self.positions: str | None = None
        self.argument_facts: dict[tuple[str, str], dict[str, Value]] = {}
        self.straight: dict[type, tuple[ModuleSource, ast.FunctionDef]] = {}
        """Classes whose forward is translated from another definition than that of their code."""
        self.sizes: list[ast.expr] = []
        """What such definitions take for granted of the config."""
        self.shared: dict[tuple[type, str], set[str]] = {}
        """Parameters that a method takes since methods called in its place need them."""
        self.wanted: set[tuple[object, Path]] = set()
        self.reset()

    @cached_property
    def counts_positions(self) -> bool:
        """Whether transformers' model counts positions itself; its count is `position_ids` here."""
        return counts_positions(self.model)

    def reset(self) -> None:
        """Forget translations, keep argument facts."""
        self.states: dict[type, ClassState] = {}
        self.functions: dict[str, Routine] = {}
        self.names = FunctionNames()
        self.globals: dict[str, tuple[Any, ModuleSource]] = {}
        self.windowed: set[ClassState] = set()
        self.own_norms: set[str] = set()

    def translate(self) -> ClassState:
        """Translate the model's class and all that it reaches, for any config or else this one."""
        try:
            return self._fixed_point()
        except Untranslatable:
            self.argument_facts, self.shared = {}, {}
            self.writes_positions = self.pairs_positions
            self.specialised = self.specialised or not self.writes_positions
        try:
            return self._fixed_point()
        except Untranslatable:
            if self.specialised:
                raise
            self.argument_facts, self.shared = {}, {}
            self.specialised = True
        return self._fixed_point()

    def _fixed_point(self) -> ClassState:
        for _ in range(100):
            self.reset()
            try:
                return self._round()
            except Restart:
                continue
        raise Untranslatable("a program without a fixed point")

    def _round(self) -> ClassState:
        cls = type(self.model)
        config = Config(name("config"), self.config)
        (state,) = self.reached(self.construct(cls, Args([config], {}, [])))
        self._method(state, "forward", Args([], uses.given_to(cls, self.positions), []))
        unused_modules.reach(self)
        self.mechanisms.finish(self)
        state.guards += self.sizes
        return state

    def remember_global(self, identifier: str, obj: Any, source: ModuleSource) -> None:
        """Note that residual code may mention a global name."""
        self.globals.setdefault(identifier, (obj, source))

    def translates(self, cls: type) -> bool:
        """Whether a module class is translated from its source (and not PyTorch's own)."""
        return objects.is_module(cls) and not cls.__module__.startswith("torch.")

    def is_helper(self, obj: Any) -> bool:
        """Whether a function is translated from its source."""
        return inspect.isfunction(obj) and not obj.__module__.startswith("torch")

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """Return what is known of an expression's value."""
        return evaluate(node, frame)

    def reached(self, module: Instance) -> list[ClassState]:
        """Return the states of a module's classes; how it is made becomes facts of theirs."""
        states = []
        for made in module.made:
            found = constructor_of(made.cls, self.specialised)
            assert found is not None
            self._learn(
                ("init", made.cls.__qualname__), found[1], made.arguments, made.cls in self.states
            )
            if made.cls not in self.states:
                self.states[made.cls] = ClassState(made.cls)
                self._evaluate_init(self.states[made.cls])
            states.append(self.states[made.cls])
        return list(dict.fromkeys(states))

    def decide(self, node: ast.expr, test: Value, frame: Frame) -> bool:
        """Return what a static condition is in this config, in all modules of the class."""
        return decided_by_modules(node, test, frame, self.config)

    def modules_of(self, cls: type) -> list[nn.Module]:
        """Return the modules of a class in the small model."""
        return [module for module in self.model.modules() if plain_class(type(module)) is cls]

    def guard(self, condition: ast.expr, frame: Frame) -> None:
        """Have `__init__` assert what this translation takes for granted."""
        if frame.cls is None:
            raise Untranslatable("a branch of a helper function that depends on the config")
        if not any(ast.dump(item) == ast.dump(condition) for item in frame.cls.guards):
            frame.cls.guards.append(condition)

    def construct(self, cls: type, args: Args) -> Instance:
        """Return the module that `cls(*args)` makes."""
        return construct(self, cls, args)

    def has_method(self, cls: type, attr: str) -> bool:
        """Whether a class has a method that is translated from its source."""
        found = find_method(cls, attr) if self.translates(cls) else None
        return found is not None and not found[0].__module__.startswith(
            ("torch.", "transformers.modeling_")
        )

    def call_module(
        self, module: Instance, args: Args, frame: Frame, attr: str = "forward"
    ) -> Value:
        """Return the result of calling a submodule, or one of its methods."""
        torch_classes = [cls for cls in module.classes if not self.translates(cls)]
        if len(torch_classes) == len(module.classes):
            return uses.call_torch_module(module, args)
        own = replace(module, made=tuple(made for made in module.made if self.translates(made.cls)))
        states = uses.callable_so(self.reached(own), module, attr, args, frame)
        routines = [self._method(state, attr, args) for state in states]
        if torch_classes and not (
            {*torch_classes} <= uses.OF_ONE and all(item.keeps_one for item in routines)
        ):
            raise Untranslatable(
                f"{ast.unparse(module.expr)}, which may be a {torch_classes[0].__name__}"
            )
        uses.share_parameters(self.shared, states, attr, routines, args)
        keeps_order = attr == "forward" and uses.keeps_order(self.findings, own, args)
        function = module.expr if attr == "forward" else attribute(module.expr, attr)
        results = [
            called(function, r, all_bound(r.node, args), self, keeps_order) for r in routines
        ]
        if not all(same_call(results[0], result) for result in results) or not (
            changes.same_changes(routines)
        ):
            return uses.of_different_classes(results, states, own, frame)
        bound = all_bound(routines[0].node, args)
        result = changes.take_back(results[0], routines, bound, frame)
        return self.mechanisms.given(result, module) or result

    def call_own_method(self, attr: str, args: Args, frame: Frame) -> Value:
        """Return `self.attr(...)`."""
        state = frame.cls or frame.caller
        assert state is not None
        value = objects.attribute_of(state, attr, name("self"), frame)
        if not isinstance(value, Method):
            return call_value(value, args, frame)
        if (known_as := self.mechanisms.call_own_method(attr, args, frame)) is not None:
            return known_as
        if attr == "register_buffer" and frame.kind == "init":
            return supers.register_buffer(args, frame)
        if attr == "register_buffer" and self.specialised:
            match args.positional:
                case [Known(value=str() as key), made, *_]:
                    own_attributes.store_attribute(key, made, frame, None)
                    return NONE
        if (
            attr == "get_input_embeddings"
            and (embeddings := multimodal_configs.input_embeddings(frame)) is not None
        ):
            return embeddings
        found = as_written(state.cls, attr, self.specialised)
        if attr == "get_head_mask" and args.positional and args.positional[0].equals(NONE):
            return Repeated(NONE, ast.List([], ast.Load()))  # no head of any layer is masked
        if found is None or found[0].__module__.startswith("transformers.modeling_utils"):
            return NONE  # checks and bookkeeping of transformers' base class
        if found[0].__module__.startswith("torch."):
            return plain_call(attribute(name("self"), attr), args)
        if frame.kind == "init" and sets_attributes(found[1]):
            return execute_inside(self, *found, args, frame)
        if (inside := closures.run_method(*found, args, frame)) is not None:
            return inside
        own_attributes.refuse_growth(found[1], frame)
        routine = self._method(state, attr, args)
        if not routine.body:
            del state.methods[attr]  # nothing is left to call
            if routine.given is None:
                bound = all_bound(routine.node, args)
                return changes.take_back(routine.shape, [routine], bound, frame)
        static = "staticmethod" in {ast.unparse(item) for item in found[1].decorator_list}
        bound, rest = bind(routine.node, args, method=not static)
        function = attribute(name("self"), attr)
        value = called(function, routine, rest | bound, self)
        return changes.take_back(value, [routine], rest | bound, frame)

    def call_super(self, attr: str, args: Args, frame: Frame, base: type | None = None) -> Value:
        """Return `super().attr(...)`, or `Base.attr(self, ...)`."""
        return supers.call_super(self, attr, args, frame, base)

    def call_autograd(self, cls: type, args: Args, frame: Frame) -> Value:
        """Return `cls.apply(...)`."""
        return call_autograd(self, cls, args, frame)

    def call_function(self, function: Any, args: Args, frame: Frame) -> Value:
        """Return a helper's result: in its place where it is an expression, else as a call."""
        if (node := function_node(function)) is None:
            raise Untranslatable(f"the helper {function.__name__}")
        return self.call_source(node, module_source(function.__module__), args, frame)

    def call_source(
        self, node: ast.FunctionDef, source: ModuleSource, args: Args, frame: Frame
    ) -> Value:
        """Return the result of a helper whose definition is given."""
        if self.calling.count(node) > 1:
            raise Untranslatable(f"{node.name}, which calls itself")
        self.calling.append(node)
        try:
            called = partial(self._called, node, source, args, frame)
            return or_as_it_is(called, node, source, args, frame)
        except Untranslatable:
            if (given := given_always(node, source, args, frame)) is None:
                raise
            return given
        finally:
            self.calling.pop()

    def _called(
        self, node: ast.FunctionDef, source: ModuleSource, args: Args, frame: Frame
    ) -> Value:
        args = closures.modules_called_once(node, switched(as_constants(args, frame), frame), frame)
        kept = frame.kind == "init" and closures.makes_settings(node, source)
        inlined = None if kept else inline(self, node, source, args, frame.cls or frame.caller)
        if inlined is not None:
            return inlined
        call = partial(self._call_of, frame=frame)
        if frame.kind == "init" and closures.is_known_when_made(args):
            return closures.in_constructor(call, node, source, args, frame)
        if frame.kind == "forward" and (self.decides_switches or gives_settings(args)):
            return closures.inside_or(call, node, source, args, frame)
        return call(node, source, args)

    call_closure = staticmethod(closures.call_closure)
    make_object = staticmethod(plain_objects.make_object)
    call_object = staticmethod(methods.call_object)

    def _call_of(
        self, node: ast.FunctionDef, source: ModuleSource, args: Args, frame: Frame
    ) -> Value:
        """Return a call of a helper's translation."""
        key = self.names.of(node)
        if key in self.functions and self.functions[key].plain:
            raise Untranslatable(f"{node.name}, which is written as it is")
        bound, rest = bind(node, args, method=False)
        self._learn(("function", key), node, {**bound, **rest}, key in self.functions)
        if key not in self.functions:
            inner = Frame(self, source, "function")
            self.functions[key] = routine_of(
                self, node, inner, self.argument_facts["function", key]
            )
        value = called(name(key), self.functions[key], bound, self)
        return changes.take_back(value, [self.functions[key]], bound, frame)

    def _evaluate_init(self, state: ClassState) -> None:
        assert (found := constructor_of(state.cls, self.specialised)) is not None
        owner, node = found
        if owner.__module__.startswith("torch."):
            state.init = Routine(node, module_source(owner.__module__))
            state.inherits_init = True
            return
        frame = Frame(self, module_source(owner.__module__), "init", state, owner)
        frame.env.values["self"] = Self()
        facts = self.argument_facts["init", state.cls.__qualname__]
        frame.env.values.update(
            defaults(node, frame)
            | {key: shared(value) for key, value in as_parameters(facts).items()}
            | with_rest(node, facts)
        )
        if (
            not (recognised := self.findings.recognised.get(state.cls.__name__))
            or not recognised.own_init
        ):
            body = with_local_lists(node.body) if self.specialised else node.body
            refuse_raise(execute(body, frame), frame)
        own = {key: value for key, value in frame.env.values.items() if key.startswith("self.")}
        state.attributes = {key.removeprefix("self."): value for key, value in own.items()}
        written = self.mechanisms.init_body(state, frame.out, self)
        state.init = Routine(node, frame.source, body=frame.out if written is None else written)

    def _method(self, state: ClassState, attr: str, args: Args) -> Routine:
        """Return the translation of a method, made with the facts of all its uses."""
        found = method_of(state.cls, attr, self.specialised)
        if found is None or found[0].__module__.startswith("torch."):
            raise Untranslatable(f"{state.cls.__name__}.{attr}")
        owner, written = found
        recorded = self.straight.get(state.cls) if attr == "forward" else None
        source, node = recorded or (module_source(owner.__module__), written)
        static = "staticmethod" in {ast.unparse(item) for item in node.decorator_list}
        bound, rest = bind(node, args, method=not static)
        key = ("method", f"{state.cls.__qualname__}.{attr}")
        self._learn(key, node, {**bound, **rest}, attr in state.methods)
        if attr not in state.methods:
            frame = Frame(self, source, "forward", state, owner)
            known = attr == "forward" and recorded is None
            made = self.mechanisms.forward(state, node, frame) if known else None
            if made is not None:
                state.methods[attr] = made
                unused_modules.reach_parts(state, frame)
            else:
                frame.env.values |= receiver(node)
                state.methods[attr] = routine_of(self, node, frame, self.argument_facts[key])
            shared = self.shared.get((state.cls, attr), set())
            state.methods[attr].take(shared, spread(self.argument_facts[key]))
        return state.methods[attr]

    def want(self, function: object, path: Path) -> None:
        """Have a function return a part of an argument that it changes; what calls have said of their
        arguments may have been this part.
        """
        if (function, path) not in self.wanted:
            self.wanted.add((function, path))
            self.argument_facts.clear()
            raise Restart

    def _learn(
        self, key: tuple[str, str], node: ast.FunctionDef, bound: dict[str, Value], translated: bool
    ) -> None:
        """Join what a use passes into the facts of a function; a parameter that a use leaves out
        has its default.
        """
        defaults = {item: default_fact(default) for item, default in default_nodes(node).items()}
        new = {**defaults, **{item: fact_of(value) for item, value in bound.items()}}
        if (known := self.argument_facts.get(key)) is None:
            self.argument_facts[key] = new
            return
        if (joined := join_uses(known, new)) is not None:
            self.argument_facts[key] = joined
            if translated:
                raise Restart
