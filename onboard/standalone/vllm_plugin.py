"""`onboard export --to vllm-plugin`: a package that gives vLLM the model, through its registry for
models from outside.

Each call of the op `torch_attention` becomes a call of vLLM's attention layer; all else is the
model file as it is, over rows of one text: vLLM hands on the tokens of all requests one after the
other, and nothing else mixes tokens.
"""

from __future__ import annotations

import ast
import re

from onboard.codegen.format import format_python
from onboard.errors import OnboardError
from onboard.hub import read_config
from onboard.render import render
from onboard.standalone.attention_calls import ATTENTION, refuse_other_mixers
from onboard.standalone.exported_text import OpCall, insert_after, op_calls, with_functions
from onboard.standalone.package import bundled, package_name, project
from onboard.standalone.proven_model import Subject
from onboard.standalone.split_head import split_head
from onboard.standalone.statements import Edit, Module, edited

_LAYER = "paged_attention"
_IMPORT = "from .paged_attention import PagedAttention\n"


def vllm_export(subject: Subject) -> dict[str, str]:
    """Return the files of a package that registers the model with vLLM.

    Raises:
        OnboardError: something in the model has no counterpart in vLLM.
    """
    refuse_other_mixers(subject.factory.checkpoint, subject.root)
    name = package_name(subject, "_vllm")
    architectures = read_config(subject.factory.checkpoint).get("architectures") or []
    if not architectures:
        raise OnboardError(
            "config.json names no architectures, by which vLLM finds models",
            hint="Name its class there",
        )
    files = bundled(with_functions(with_paged_attention(subject.text))).files()
    for path in ("paged_attention.py", "causal_lm.py"):
        files[path] = format_python(render(f"export/vllm-plugin/{path}.j2", subject=subject))
    values = {"architectures": architectures, "entry_point": "register"}
    return project(subject, "vllm-plugin", name, files, **values)


def with_paged_attention(text: str) -> str:
    """Return a model file that attends through layers with pages, and whose head is a method of its
    own.
    """
    module = Module("onboard.model", text)
    calls = [call for call in op_calls(module) if call.name == ATTENTION]
    edits: list[Edit] = [(*module.span(call.function), f"self.{_LAYER}") for call in calls]
    edits += [_made_in_init(module, call) for call in {call.owner: call for call in calls}.values()]
    text = edited(text, [*edits, *split_head(module)])
    return re.sub(r"^(?=import onboard\.ops)", _IMPORT, text, count=1, flags=re.MULTILINE)


def _made_in_init(module: Module, call: OpCall) -> Edit:
    """Return the edit that makes the layer where the module is made."""
    if call.owner is None or call.method is None or not _has_self(call.method):
        raise OnboardError(
            f"{ATTENTION} is called outside of a module", hint="Export it --to plain"
        )
    made = next(
        (
            each
            for each in call.owner.body
            if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        ),
        None,
    )
    first = (
        next((each for each in made.body if ast.unparse(each) == "super().__init__()"), None)
        if made
        else None
    )
    if first is None:
        raise OnboardError(
            f"{call.owner.name} has no __init__ to make its attention in",
            hint="Export it --to plain",
        )
    return insert_after(module, first, f"self.{_LAYER} = PagedAttention()")


def _has_self(method: ast.FunctionDef) -> bool:
    return bool(method.args.args) and method.args.args[0].arg == "self"
