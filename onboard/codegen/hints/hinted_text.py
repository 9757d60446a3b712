"""A model file with what it says of how ranks divide its layers, proven on its small model: it says
the division that is found where nothing is said, and one rank's graph is as it was.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import one_line, tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.codegen.format import format_python
from onboard.codegen.hints.linear_hints import LinearHints
from onboard.codegen.hints.marked_sites import Marked, marked
from onboard.codegen.hints.named_lines import with_named_lines
from onboard.codegen.hints.site_hints import left_out, op_hint, split_hint, sums, view_hint
from onboard.codegen.hints.small_division import Division, divided, graph_of, rewritten, small_model
from onboard.codegen.hints.spans import UNSAID, Edits
from onboard.graph.fx import arguments, is_op, op_name
from onboard.graph.sharding.cuts import Layout
from onboard.graph.sharding.detect import detect
from onboard.graph.sharding.distribution import Distribution
from onboard.graph.sharding.file_hints import FileHint, hints_of_file, weight_of

aten = torch.ops.aten
_LONGEST = 160
"""Characters of a reason."""
Layouts = Mapping[Node, Sequence[Layout]]


@dataclass
class Hinted:
    """A text with hints, and what they say of weights."""

    text: str
    said: dict[str, FileHint] = field(default_factory=dict)


def hinted(text: str, spec: ModelSpec) -> str:
    """Return a spec's model file with hints; where there can be none, its docstring says why.

    A file made of a repository's own code has none: it is not run here.
    """
    if spec.repository is not None:
        return text
    try:
        return with_hints(text, _reference(spec))
    except Exception as error:
        reason = re.sub(r"[^A-Za-z0-9 .,:;()_+-]", "_", one_line(error))[:_LONGEST]
        docstring_end = text.index('\n"""\n', 3)
        note = f"\n\n{UNSAID}{reason}"
        return format_python(text[:docstring_end] + note + text[docstring_end:])


def _reference(spec: ModelSpec) -> nn.Module:
    return build_small(tiny_config(load_config(spec.config)))


def with_hints(text: str, reference: nn.Module) -> str:
    """Return a model file's text with hints; `reference` is transformers' small model of it.

    A call that ranks do not divide alike wherever it is made has no hint, nor has a layer whose
    sizes the file does not name: what a file does not say is found out.

    Raises:
        Exception: the small model cannot be exported or divided.
        AssertionError: hints do not make the division that is found without them.
    """
    copy = marked(text)
    model = small_model(copy.text, reference)
    gm = graph_of(model, reference)
    copy.assign(gm)
    division = divided(gm)
    hinted = _written(text, copy, division, model)
    _prove(hinted, division, reference)
    return hinted.text


def _written(text: str, copy: Marked, division: Division, model: nn.Module) -> Hinted:
    sites, edits, said = copy.by_node(), Edits(text), dict[str, FileHint]()
    linear = LinearHints(division, sites, model)
    for site in copy.sites:
        nodes = [node for node in site.nodes if node in division.layouts]
        if (found := _alike(nodes, partial(linear.of, site))) is not None:
            edits.linear(site.expression, found.values.tp_mode, found.arguments())
            weights = [weight_of(arguments(node)["weight"]) for node in nodes]
            said |= {name: found.values for name in weights if name is not None}
        for hint, write in (
            (left_out, edits.leave_out),
            (view_hint, edits.view),
            (split_hint, edits.split),
            (op_hint, edits.op),
        ):
            if (code := _alike(nodes, partial(hint, division, site))) is not None:
                write(site.expression, code)
    for site, kind in sums(division, sites):
        edits.sum(site.expression, kind)
    edits.head()
    return Hinted(with_named_lines(format_python(edits.done(), closing=True)), said)


def _alike(nodes: list[Node], hint: Callable[[Node], Any]) -> Any:
    """Return the hint of an expression, None for one whose calls differ."""
    found = [hint(node) for node in nodes]
    return found[0] if found and all(each == found[0] for each in found) else None


def _prove(hinted: Hinted, division: Division, reference: nn.Module) -> None:
    """Check a text with hints against the division that it was made of."""
    gm = graph_of(small_model(hinted.text, reference), reference)
    assert _calls(gm) == _calls(division.gm), "the graph of one rank is another with hints"
    assert hints_of_file(gm) == hinted.said, "hints have other values than they were given"
    for ranks, found in division.hints.items():
        own = detect(division.gm, Distribution(ranks), hinted.said)
        first, second = (rewritten(division.gm, each)[0] for each in (own, found))
        others = differing(first, second)
        if found is not division.fewest:  # more ranks may divide what a norm needs whole
            others = [each for each in others if _cuts_columns(each, hinted.said)]
        names = ", ".join(each.name for each in others)
        assert not others, f"hints divide {names} otherwise among {ranks} ranks"


def _cuts_columns(node: Node, said: Mapping[str, FileHint]) -> bool:
    weight = weight_of(arguments(node)["weight"]) if is_op(node, aten.linear) else None
    return weight is not None and weight in said and said[weight].tp_mode != "rowwise"


def _calls(gm: GraphModule) -> Counter[str]:
    names = (op_name(node) for node in gm.graph.nodes if node.op == "call_function")
    return Counter("reshape" if name == "view" else name for name in names)


def differing(first: Layouts, second: Layouts) -> list[Node]:
    """Return the nodes that lie otherwise on the ranks."""
    return [node for node, layouts in first.items() if not all(map(_same, layouts, second[node]))]


def _same(first: Layout, second: Layout) -> bool:
    """Whether layouts are the same; what kind of layer a sum is of may be told by one alone."""
    return replace(first, partial="").same_as(replace(second, partial="")) and (
        bool(first.partial) == bool(second.partial)
    )
