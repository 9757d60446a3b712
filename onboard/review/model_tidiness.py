"""Checklist, part T: a model file stands alone, has nothing dead in it, and reads well."""

from __future__ import annotations

import ast
import re

from onboard.codegen.format import run_ruff
from onboard.codegen.tidy.lines import LINE_LENGTH
from onboard.review.checklist import Subject, style
from onboard.review.python_source import Outcome, Source, dotted, forbid, own_name, parameters

_BASE_LINES, _LINES_PER_CLASS = 70, 35


def _config_reused(subject: Subject) -> Outcome:
    copies = [
        node
        for name, node in subject.model.classes().items()
        if name.endswith("Config") or any("Config" in ast.unparse(base) for base in node.bases)
    ]
    return forbid(subject.model, copies)


def _no_dead_definitions(subject: Subject) -> Outcome:
    source = subject.model
    used = {name for node in source.all(ast.AST) if (name := own_name(node))}
    return forbid(
        source,
        [
            node
            for name, node in (source.functions() | source.classes()).items()
            if name not in used
        ],
    )


def _no_dead_attributes(subject: Subject) -> Outcome:
    """What the checkpoint has weights of is there for these, though nothing runs it."""
    source = subject.model
    attributes = [node for node in source.all(ast.Attribute) if dotted(node.value) == "self"]
    read = {node.attr for node in source.all(ast.Attribute) if isinstance(node.ctx, ast.Load)}
    written = [
        node for node in attributes if isinstance(node.ctx, ast.Store) and node.attr not in read
    ]
    return forbid(source, [node for node in written if not subject.is_weight(node.attr)])


def _no_optional_branches(subject: Subject) -> Outcome:
    """A forward that asks whether an argument was given has a path that export never takes."""
    branches = [
        node
        for forward in subject.model.forwards().values()
        for node in subject.model.all(ast.AST, forward)
        if isinstance(node, ast.If | ast.IfExp)
        and _asks_for_none(node.test, {arg.arg for arg in parameters(forward)})
    ]
    return forbid(subject.model, branches)


def _asks_for_none(test: ast.expr, names: set[str]) -> bool:
    compares = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    return any(
        dotted(node.left) in names and ast.unparse(node.comparators[0]) == "None"
        for node in compares
    )


def _no_stacked_experts(subject: Subject) -> Outcome:
    """A parameter of three dimensions is a stack of experts, right only where the checkpoint has
    that stack.
    """
    stacks = {
        name.rpartition(".")[2]
        for name, shape in subject.expected_shapes.items()
        if len(shape) == 3
    }
    classes = subject.in_use().values()
    parameters = [
        c
        for node in classes
        for c in subject.model.calls(lambda name: name.endswith("Parameter"), node)
    ]
    found = [
        call
        for call in parameters
        if any(isinstance(arg, ast.Call) and len(arg.args) == 3 for arg in call.args)
    ]
    return forbid(
        subject.model, [call for call in found if subject.model.assigned(call) not in stacks]
    )


def _size(subject: Subject) -> Outcome:
    lines, classes = len(subject.model.lines), len(subject.model.classes())
    most = _BASE_LINES + _LINES_PER_CLASS * classes
    return Outcome(
        lines <= most,
        [f"{subject.model.path}:{lines}: {lines} lines, {most} for {classes} classes"],
    )


def _formatted(subject: Subject) -> Outcome:
    """Ask ruff for form (`ruff format`) and for pyflakes' findings (unused names,
    redefinitions).
    """
    source = subject.model
    check = _ruff(source, "check", "--select", "F", "--output-format", "concise", "--quiet")
    form = _ruff(source, "format", "--check", "--diff", "--quiet")
    lines = [line for line in check.splitlines() if line.startswith(source.path)]
    changed = [int(match[1]) for match in re.finditer(r"^@@ -(\d+)", form, re.MULTILINE)]
    bad = lines + [f"{source.path}:{line}: `ruff format` changes what follows" for line in changed]
    return Outcome(not bad, bad or [f"{source.path}:1-{len(source.lines)}: clean"])


def _ruff(source: Source, command: str, *options: str) -> str:
    words = [command, "--isolated", "--line-length", str(LINE_LENGTH), *options]
    return run_ruff(*words, "--stdin-filename", source.path, "-", text=source.text, codes=(0, 1))


def _header(subject: Subject) -> Outcome:
    source, spec = subject.model, subject.spec
    header = " ".join((ast.get_docstring(source.tree) or "").split())
    # The models of a family share the file, so it need not name one of them.
    wanted = {
        "the version of onboard": r"onboard \d+\.\d+",
        "the version of its template": r"template \d+",
        "the version of transformers": rf"transformers {re.escape(spec.transformers_version)}\b",
        "the source's hash": rf"\b{re.escape(spec.source_hash[:16])}",
    }
    missing = [what for what, pattern in wanted.items() if not re.search(pattern, header)]
    return Outcome(
        not missing,
        [f"{source.path}:1: the header lacks {what}" for what in missing] or [source.place(1)],
    )


MODEL_TIDINESS = [
    style(
        "T01",
        "the header names the versions and the hash of the source that it was made from",
        _header,
    ),
    style("T04", "the config class is reused, not copied", _config_reused),
    style("T05", "every function and class is used", _no_dead_definitions),
    style("T06", "every attribute is read", _no_dead_attributes),
    style("T07", "no forward branches on an argument that may be missing", _no_optional_branches),
    style("T08", "experts are modules, or the stacks that the checkpoint has", _no_stacked_experts),
    style("T10", "the file is as short as its classes need", _size),
    style("T11", "it is formatted, and pyflakes finds nothing", _formatted),
]
