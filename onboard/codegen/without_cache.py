"""Whether a model file has the tokens of a text reach one another by an op that has a cache.

What is translated as it stands computes the same of a whole text, and could not go on with it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise.recorder import first_tensor
from onboard.analysis.source import class_node, module_source
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.errors import UntranslatableError
from onboard.ops import attention_ops, stateful_ops

_OP = re.compile(r"torch\.ops\.onboard\.(\w+)\(")
_WRITTEN = re.compile(r"softmax|scaled_dot_product_attention|conv1d|Conv1d|\.unfold\(|cumsum\(")
"""What the graph's transforms match where a model file has it written out."""
_DEFINED = ast.ClassDef | ast.FunctionDef
_NONE_OF_THE_FORMS = (
    "in {path} ({cls}{place}) tokens reach one another by none of the forms that have a cache here"
    " (softmax attention, the recurrences, convolutions)"
)


def check_mixing(text: str, model: nn.Module) -> None:
    """Refuse the text of a model file that has no such op where the model's tokens reach one
    another, in the class of the module in which they do and in what that uses: a router's softmax
    is no attention.
    """
    if (found := mixing_module(model)) is None:
        return
    code = _code_in(text, found[1])
    if _WRITTEN.search(code) or _known().intersection(_OP.findall(code)):
        return
    path, cls = found
    raise UntranslatableError(
        f"cannot translate {type(model).__name__}: {_none_of_the_forms(model, path)}",
        hint="Report this architecture; it needs a canonical op of its own",
        block=cls,
    )


def written_out(text: str, model: nn.Module) -> tuple[str, str] | None:
    """Return path and class of the module in which a model's tokens reach one another where the text
    of its file has no op with a cache; None where it has one, or they do nowhere.
    """
    return None if _known().intersection(_OP.findall(text)) else mixing_module(model)


def _known() -> set[str]:
    return {*stateful_ops(), *attention_ops()}


def unknown_mixing(model: nn.Module, known: Collection[str]) -> str | None:
    """Return why a model that could not be translated has no cache, whatever stopped it: in a
    class, none of the `known` ones, tokens reach one another, and its code has no known form
    written out. None: nothing says so.
    """
    try:
        found = mixing_module(model)
    except Exception:  # whatever a model's own code raises
        return None
    if found is None or found[1] in known:
        return None
    path = found[0]
    if _WRITTEN.search(_code_of(type(model.get_submodule(path)))):
        return None
    return _none_of_the_forms(model, path)


def _none_of_the_forms(model: nn.Module, path: str) -> str:
    """Return what is in the way in the module at a path, and where its code is."""
    cls = type(model.get_submodule(path))
    place = f" at {module_source(cls.__module__).location(class_node(cls))}"
    return _NONE_OF_THE_FORMS.format(path=path, cls=cls.__name__, place=place)


def _code_of(cls: type) -> str:
    """Return the code of a class, of those that it inherits from, and of the functions of its module
    that they name.
    """
    modules = [base for base in cls.__mro__ if issubclass(base, nn.Module)]
    own = [base for base in modules if not base.__module__.startswith("torch.")]
    code = "\n".join(dict.fromkeys(ast.unparse(class_node(base)) for base in own))
    return _with_named(code, module_source(cls.__module__).functions)


def _code_in(text: str, cls: str) -> str:
    """Return the code of a class of a model file and of the functions and classes there that it
    names, whatever these name included; all of it where it has no such class.
    """
    defined = {node.name: node for node in ast.parse(text).body if isinstance(node, _DEFINED)}
    own = defined.pop(cls, None)
    return text if own is None else _with_named(ast.unparse(own), defined)


def _with_named(code: str, defined: Mapping[str, ast.AST]) -> str:
    """Return code, and that of what is defined beside it and named in it."""
    texts, waiting = [code], dict(defined)
    while named := [name for name in waiting if re.search(rf"\b{name}\b", texts[-1])]:
        texts.append("\n".join(ast.unparse(waiting.pop(name)) for name in named))
    return "\n".join(texts)


@torch.no_grad()
def mixing_module(model: nn.Module) -> tuple[str, str] | None:
    """Return path and class of the first module, none of torch's, and there the innermost, whose output at later
    positions changes with a text's first token while its input there does not; None: no one's does.
    """
    inputs = from_zero(prompt(0, batch=1, seed=3, tokens=vocabulary(model)))
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, 0] = (other["input_ids"][:, 0] + 7) % vocabulary(model)
    seen = [_outputs(model, each) for each in (inputs, other)]
    for path, (given, made) in seen[0].items():
        again = seen[1].get(path)
        if again is None or again[0].shape != given.shape or again[1].shape != made.shape:
            continue
        if torch.equal(given[:, 1:], again[0][:, 1:]) and not torch.equal(
            made[:, 1:], again[1][:, 1:]
        ):
            return path, type(model.get_submodule(path)).__name__
    return None


def _outputs(
    model: nn.Module, inputs: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return hidden states [batch, sequence, size] that modules get and give, in the order in which
    they end.
    """
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given: Any = args[0] if args else kwargs.get("hidden_states")
        made = first_tensor(output)
        if not isinstance(given, torch.Tensor) or made is None:
            return
        if given.dim() == made.dim() == 3:
            found.setdefault(path, (given.clone(), made.clone()))

    hooks = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, path=path: note(path, args, kwargs, output),
            with_kwargs=True,
        )
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
