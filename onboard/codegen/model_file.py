"""`ModelSpec` -> `models/modeling_<family>.py`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

import onboard
from onboard.analysis.source import find_method, module_source
from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import Block
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import one_line, tiny_config
from onboard.analysis.tiny.tiny_model import build_small, made_with
from onboard.codegen.config_checks import check_same_values
from onboard.codegen.config_class import plain_config_class
from onboard.codegen.described import Code, described
from onboard.codegen.docstrings import class_docstring, method_docstring
from onboard.codegen.format import format_python
from onboard.codegen.model_imports import import_lines
from onboard.codegen.plain_names import with_plain_names
from onboard.codegen.spec_findings import findings_of
from onboard.codegen.straight.attempts import Prove, straightened, trusted, unproven
from onboard.codegen.straight.recorded_classes import doubt, with_origin
from onboard.codegen.translate.language.findings import Recognised
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import Untranslatable, with_place
from onboard.codegen.translate.mechanisms import experts
from onboard.codegen.translate.mechanisms.order import MECHANISMS
from onboard.codegen.translate.output.emit import ClassText, MethodText, emit, rope_default
from onboard.codegen.translate.output.tidied import config_of
from onboard.codegen.without_cache import check_mixing, unknown_mixing
from onboard.errors import OnboardError, ProofError, UntranslatableError
from onboard.hf.codebooks import places_of
from onboard.render import render

TEMPLATE_VERSION = 1

_MODELING_ERRORS = "Report this architecture; its model file has to be written by hand"


def generate_model_file(spec: ModelSpec, prove: Prove = trusted) -> str:
    """Return the text of the model file of a spec's family; the same spec gives the same text.

    Args:
        spec: the family's.
        prove: where a file of a repository's code fails it, what the forwards of its classes do is
            put in their place until one does not.

    Raises:
        OnboardError: the architecture has a construct without translation.
        ProofError: no text passes `prove`; it is the first one's error.
    """
    translator, model = make_translator(spec)
    try:
        text = _text_or_straight(translator, spec, prove)
    except OnboardError:
        raise
    except Exception as error:
        stopped = str(error) if isinstance(error, Untranslatable) else one_line(error)
        stopped = with_place(error, stopped)
        known = {block.class_name for block in spec.blocks if block.kind != "other"}
        mixing = unknown_mixing(model, known) if spec.repository else None
        reason = f"{mixing}; {stopped}" if mixing else stopped
        raise UntranslatableError(
            f"cannot translate {spec.architecture}: {reason}",
            hint=_MODELING_ERRORS,
            block=getattr(error, "block", ""),
        ) from error
    check_mixing(text, model)
    return text


def _text_or_straight(translator: Translator, spec: ModelSpec, prove: Prove) -> str:
    """Return a file's text; where code of a repository leads nowhere, or to what files may not have
    or what is not proven, with what the forwards of its classes do in their place.
    """
    text = ""
    try:
        text = _text(translator, spec)
        first = doubt(text, translator.model) if spec.repository else None
        if first is None:
            prove(text)
            return text
    except (Untranslatable, ProofError) as error:
        if spec.repository is None:
            raise
        first = unproven(error, translator.model)
    try:
        return straightened(
            lambda: _proven(translator, spec, prove), translator, load_config(spec.config), first
        )
    except Untranslatable as error:
        if isinstance(error.__cause__, ProofError):
            raise ProofError(str(error), hint=error.__cause__.hint) from error
        if not text:
            raise
        _prove_doubted(text, translator, prove, error)
    return text  # as it is written: its reader decides


def _prove_doubted(
    text: str, translator: Translator, prove: Prove, doubted: Untranslatable
) -> None:
    check_mixing(text, translator.model)
    try:
        prove(text)
    except ProofError as error:
        raise ProofError(f"{error.message}; {doubted}", hint=error.hint) from error


def _proven(translator: Translator, spec: ModelSpec, prove: Prove) -> str:
    text = _text(translator, spec)
    try:
        prove(text)
    except OnboardError as error:
        raise unproven(error, translator.model) from error
    return text


def _text(translator: Translator, spec: ModelSpec) -> str:
    functions, blocks, imports = _parts_either_way(translator, spec)
    plain = _own_config(type(translator.model.config), spec) if spec.repository else None
    text = render(
        "model/model.py.j2",
        plain_config=plain,
        architecture=spec.architecture,
        summary="prefill forward for export, in canonical ops",
        tool_version=onboard.__version__,
        template_version=TEMPLATE_VERSION,
        transformers_version=_plain(spec.transformers_version),
        source_name=" and ".join(map(_plain, spec.sources))
        or f"{spec.hf_module.rsplit('.', 1)[-1]}.py",
        source_hash=_plain(spec.source_hash)[:16],
        revision=_plain(spec.revision) if spec.revision else None,
        imports=imports,
        functions=functions,
        blocks=blocks,
        config_class=spec.config_class,
        first_position=first_position_expression(spec, "config"),
    )
    return format_python(with_plain_names(text))


def _own_config(config_class: type[PretrainedConfig], spec: ModelSpec) -> str:
    """Return the text of the config class of a model's own; it makes of the checkpoint's config
    what the repository's makes of it.
    """
    text = plain_config_class(config_class)
    check_same_values(config_class, text, spec.config)
    return text


def _parts_either_way(
    translator: Translator, spec: ModelSpec
) -> tuple[list[MethodText], list[str], list[str]]:
    """Return the parts of a file; where code of a repository leads nowhere with attention by a name
    that it does not know, by that of small models.
    """
    try:
        return _parts(translator, spec)
    except Untranslatable as error:
        if spec.repository is None:
            raise
        first = error
    translator.argument_facts.clear()
    translator.shared.clear()
    translator.knows_masks, translator.implementation = True, "eager"
    try:
        return _parts(translator, spec)
    except Untranslatable:
        raise first from None


def _parts(
    translator: Translator, spec: ModelSpec
) -> tuple[list[MethodText], list[str], list[str]]:
    """Return the functions, the classes and the imports of a file; where it would need what no file
    has (a class that this config leaves out), with this config's side of each branch.
    """
    top = _translated(translator)
    try:
        return _written(translator, spec, top)
    except Untranslatable:
        if translator.specialised:
            raise
    translator.specialised = True
    translator.argument_facts.clear()
    translator.shared.clear()
    return _written(translator, spec, _translated(translator))


def _written(
    translator: Translator, spec: ModelSpec, top: ClassState
) -> tuple[list[MethodText], list[str], list[str]]:
    classes, functions = emit(translator, top)
    norms = sorted(translator.own_norms & set().union(*(item.reads for item in classes)))
    blocks = [render(f"model/own_{name.lower()}.py.j2").strip() for name in norms]
    inits = "\n".join(
        method.body for item in classes for method in item.methods if method.name == "__init__"
    )
    codes = {item.name: _code(item, spec, inits) for item in classes}
    blocks += [_block(item, spec, translator, codes) for item in classes]
    names = set().union(*(item.reads for item in classes)) | _names_in(functions)
    if any(re.search(r"\bAny\b", method.signature) for item in classes for method in item.methods):
        names.add("Any")
    if spec.repository and "math." in plain_config_class(type(translator.model.config)):
        names.add("math")
    return functions, blocks, import_lines(names, translator, spec, blocks)


def _translated(translator: Translator) -> ClassState:
    """Translate with masks known as such; where that leads nowhere, with the code that makes them
    as it is written.
    """
    try:
        return translator.translate()
    except Untranslatable:
        if not translator.findings.masks:
            raise
    translator.knows_masks = False
    translator.argument_facts.clear()
    return translator.translate()


def make_translator(spec: ModelSpec) -> tuple[Translator, nn.Module]:
    """Return a translator of a spec's architecture and the tiny model that it looks at."""
    model = build_small(tiny_config(load_config(spec.config)))
    if type(model).__name__ != spec.architecture:
        raise OnboardError(f"the spec says {spec.architecture}, its config {type(model).__name__}")
    own_code = spec.repository is not None
    config = made_with(model) if own_code else None
    return Translator(model, findings_of(spec), MECHANISMS, config, specialised=own_code), model


def first_position_expression(spec: ModelSpec, config: str) -> str | None:
    """Return the expression for the position of a text's first token, of the variable `config`;
    None where it is 0.
    """
    if "first_position" not in spec.traits:
        return None
    value = str(spec.traits["first_position"].value)
    if not re.fullmatch(r"(pad_token_id \+ )?[0-9]{1,4}", value):
        raise OnboardError(
            f"the spec has first_position {value!r}", hint="It is a number, or 'pad_token_id + 1'"
        )
    return f"{config}.{value}" if value.startswith("pad") else value


def _plain(text: str | None) -> str:
    """Return text that cannot end a docstring."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text or "")


def _code(item: ClassText, spec: ModelSpec, inits: str) -> Code:
    """Return a class's code; where this config's model has no such module, its name is that in
    others' `__init__`.
    """
    block = next((b for b in spec.blocks if b.class_name == item.name), None)
    kept = re.search(rf"self\.(\w+) = {item.name}\(", inits)
    bodies = {method.name: method.body for method in item.methods}
    methods = "\n".join(body for name, body in bodies.items() if name != "__init__")
    attribute = block.path.rpartition(".")[2] if block else kept[1] if kept else ""
    return Code(bodies.get("__init__", ""), methods, attribute)


def _block(
    item: ClassText, spec: ModelSpec, translator: Translator, codes: Mapping[str, Code]
) -> str:
    recognised = translator.findings.recognised.get(item.name)
    if recognised is not None and recognised.kind == "rotary":
        return _rotary(item, recognised, spec, translator)
    block = next((b for b in spec.blocks if b.class_name == item.name), None)
    kind = _role(item, block, spec)
    methods = [
        {
            "name": method.name,
            "signature": method.signature,
            "body": method.body,
            "decorator": method.decorator,
            "docstring": method_docstring(
                kind,
                method.name,
                codebooks=places_of(translator.model) is not None,
                positions="position_ids" in method.signature,
            ),
        }
        for method in item.methods
    ]
    docstring = class_docstring(kind, block, item.name)
    if kind in ("attention", "other"):
        stacks = {b.class_name for b in spec.blocks if b.kind == experts.KIND}
        docstring = described(codes[item.name], codes, stacks) or docstring
    if not any(method.name == "forward" for method in item.methods) and item.weights_only:
        docstring = f"Weights of the {item.name} of transformers, which nothing here runs."
    elif item.weights_only:
        docstring += (
            f"\n\n    Not run, for checkpoints have them: {', '.join(item.weights_only)}.\n    "
        )
    docstring = with_origin(docstring, item.cls, translator.straight)
    eager = tuple(spec.eager) if item.name == spec.architecture else ()
    fields: dict[str, Any] = {
        "base": item.base,
        "docstring": docstring,
        "methods": methods,
        "eager": eager,
    }
    text = render("model/class.py.j2", name=item.name, **fields).strip()
    if recognised is not None and experts.is_separate(recognised):
        return f"{experts.expert_text(item.name, recognised.parameters)}\n\n\n{text}"
    return text


def _role(item: ClassText, block: Block | None, spec: ModelSpec) -> str:
    """Return what a class is, for its docstring: its block's kind or, where its attention is
    written out, its place.
    """
    forward = next((method for method in item.methods if method.name == "forward"), None)
    if block is None or forward is None or block.kind not in ("other", "decoder_layer", "model"):
        return block.kind if block else "other"
    layers = [kind.path for kind in spec.layer_kinds]
    if block.path in layers:
        return "decoder_layer"
    if "input_ids: torch.Tensor" in forward.signature:
        return "model" if any(path.startswith(f"{block.path}.") for path in layers) else "other"
    attends = any("torch.ops.onboard.torch_attention(" in method.body for method in item.methods)
    return "attention" if attends and "hidden_states" in forward.signature else "other"


_USUAL_ROTARY = {"own_kinds": False, "some_types": False, "partly": False, "own_sizes": False}


def _rotary(
    item: ClassText, recognised: Recognised, spec: ModelSpec, translator: Translator
) -> str:
    found = find_method(item.cls, "forward")
    assert found is not None
    return render(
        "model/rotary.py.j2",
        name=item.name,
        config_class=type(config_of(translator, item.cls)).__name__,
        default=rope_default(translator, item.cls),
        x=found[1].args.args[1].arg,
        reads=translator.states[item.cls].read_outside,
        **(_USUAL_ROTARY | recognised.parameters),
    ).strip()


def _names_in(functions: list[MethodText]) -> set[str]:
    trees = [
        ast.parse(
            f"def f{item.signature}:\n" + "\n".join("    " + x for x in item.body.splitlines())
        )
        for item in functions
    ]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


__all__ = ["generate_model_file", "make_translator", "module_source"]
