"""What a file is to say of a linear layer, from how ranks of every number divide it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Node

from onboard.codegen.hints.marked_sites import Site
from onboard.codegen.hints.output_blocks import Block, Sites, blocks_of
from onboard.codegen.hints.small_division import Division
from onboard.graph.fx import arguments, is_op
from onboard.graph.sharding.cuts import Cut
from onboard.graph.sharding.demands import is_linear
from onboard.graph.sharding.detect import VOCABULARY
from onboard.graph.sharding.file_hints import FileHint, weight_of
from onboard.graph.sharding.layer_work import mixer
from onboard.graph.sharding.signatures import shape, signature

aten = torch.ops.aten
_FEWER = {"key", "value", "q", "k", "B", "C"}
"""Operands of ops that do a layer's work which may have fewer heads than its result."""


@dataclass(frozen=True)
class LinearHint:
    """What is said of a layer: its values in the small model, and as code."""

    values: FileHint
    output_sizes: str = ""
    tp_min_local_shape: str = ""

    def arguments(self) -> str:
        """Return the keyword arguments behind `tp_mode`."""
        said = [f'layer_type="{self.values.layer_type}"']
        said += [f"output_sizes=[{self.output_sizes}]"] if self.output_sizes else []
        said += [f"tp_min_local_shape={self.tp_min_local_shape}"] if self.tp_min_local_shape else []
        return ", ".join(said)


class LinearHints:
    """Finds hints of linear layers."""

    def __init__(self, division: Division, sites: Sites, model: nn.Module) -> None:
        self.division, self.sites, self.model = division, sites, model
        self._fewer = set(_with_fewer_heads(division))

    def of(self, site: Site, node: Node) -> LinearHint | None:
        """Return the hint of a call, None where there is nothing to say, or nothing that would make
        the division that was found.
        """
        if not is_op(node, aten.linear) or not self._is_layer(site, node):
            return None
        if self.division.layouts[node][0].partial:
            return self._said("rowwise", self.division.kind(node))
        hint = self.division.fewest.get(node)
        if hint is not None and hint.layer_type == VOCABULARY:
            return None
        if hint is None and node not in self._fewer:
            kind = _kind_behind(self.division, node)
            whole = not any(node in hints for hints in self.division.hints.values())
            return self._said("none", kind) if kind and whole else None
        kind = hint.layer_type if hint is not None else _kind_behind(self.division, node)
        forms = list(self._column_wise(site, node, kind))
        fits = [self._fits(each, node) for each in forms]
        best = max((each for each in fits if each[0]), default=None)
        return None if best is None else forms[fits.index(best)]

    def _said(self, mode: str, layer_type: str) -> LinearHint | None:
        return LinearHint(FileHint(mode, layer_type)) if layer_type != VOCABULARY else None

    def _is_layer(self, site: Site, node: Node) -> bool:
        """Whether an expression calls a linear layer of PyTorch, or the function, with a weight."""
        call, name = site.expression, weight_of(arguments(node)["weight"])
        if not isinstance(call, ast.Call) or call.keywords or name is None:
            return False
        path, _, leaf = name.rpartition(".")
        if ast.unparse(call.func) in ("F.linear", "torch.nn.functional.linear"):
            return len(call.args) in (2, 3)
        is_own = type(self.model.get_submodule(path)) is nn.Linear and leaf == "weight"
        called = isinstance(call.func, ast.Attribute) and call.func.attr == path.rpartition(".")[2]
        return is_own and called and len(call.args) == 1 and "[" not in ast.unparse(call.func)

    def _column_wise(self, site: Site, node: Node, kind: str) -> Iterator[LinearHint]:
        size = shape(node)[-1]
        assert isinstance(size, int)
        blocks = blocks_of(node, size, site, self.sites)
        one = blocks[0] if len(blocks) == 1 else Block(size, "")
        forms = [LinearHint(FileHint("colwise", kind))]
        if one.unit > 1:
            least = FileHint("colwise", kind, (), (one.unit,))
            forms.append(LinearHint(least, "", one.unit_code))
        if node in self._fewer:
            forms.reverse()
        yield from forms
        if len(blocks) > 1 and all(each.code for each in blocks):
            yield from _by_blocks(blocks, kind)

    def _fits(self, found: LinearHint, node: Node) -> list[bool]:
        """Return among which numbers of ranks a hint cuts the outputs as was found out."""
        size, last = shape(node)[-1], len(shape(node)) - 1
        assert isinstance(size, int)
        fits = []
        for ranks, hints in self.division.hints.items():
            cut, hint = found.values.cut(size, ranks), hints.get(node)
            own = hint.results[0].cuts.get(last) if hint is not None and hint.results else None
            fits.append(_same(cut, own))
        return fits


def _same(one: Cut | None, other: Cut | None) -> bool:
    first = None if one is None or one.is_whole else one
    second = None if other is None or other.is_whole else other
    return first is second if first is None or second is None else first.same_as(second)


def _by_blocks(blocks: Sequence[Block], kind: str) -> Iterator[LinearHint]:
    """Yield hints with the sizes of blocks: in runs of one, of one unit for all, of units."""
    sizes, codes = tuple(each.size for each in blocks), ", ".join(each.code for each in blocks)
    units = {(each.unit, each.unit_code) for each in blocks if each.unit > 1}
    if len(units) == 1:
        [(unit, code)] = units
        if all(each.size % unit == 0 for each in blocks):
            yield LinearHint(FileHint("colwise", kind, sizes, (unit,)), codes, code)
    yield LinearHint(FileHint("colwise", kind, sizes), codes)
    if units:
        least = tuple(each.unit for each in blocks)
        each_code = ", ".join(each.unit_code for each in blocks)
        yield LinearHint(FileHint("colwise", kind, sizes, least), codes, f"[{each_code}]")


def _with_fewer_heads(division: Division) -> Iterator[Node]:
    """Yield the linear layers of which several query heads share what they give."""
    for node in division.gm.graph.nodes:
        found = signature(node) if mixer(node) is not None else None
        for operand in found.operands if found is not None else ():
            if operand.place[0] in _FEWER:
                yield from _nearest_linear(operand.node)


def _nearest_linear(node: Node) -> list[Node]:
    pending, seen, found = [node], set[Node](), list[Node]()
    while pending and len(seen) < 64:
        each = pending.pop()
        if each in seen or each.op != "call_function":
            continue
        seen.add(each)
        if is_linear(each):
            found.append(each)
        else:
            pending += _sources(each)
    return found


def _sources(node: Node) -> list[Node]:
    """Return what a value is made of: of one of several results, what goes into that one."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    own = signature(source) if node.target is operator.getitem and source is not None else None
    if own is None or len(own.outputs) < 2:
        return node.all_input_nodes[:1]
    letters = set(own.outputs[int(node.args[1])]) - {"."}  # type: ignore[arg-type]
    return [each.node for each in own.operands if letters & set(each.letters)]


def _kind_behind(division: Division, node: Node) -> str:
    """Return the kind of layer that a whole value is for; "" where that does not show."""
    pending, seen = list(node.users), set[Node]()
    while pending and len(seen) < 200:
        each = pending.pop(0)
        if each in seen:
            continue
        seen.add(each)
        if (found := mixer(each)) is not None:
            return found.layer_type
        partial = next((own.partial for own in division.layouts.get(each, ()) if own.partial), "")
        if partial or each in division.fewest:
            return partial or division.fewest[each].layer_type
        pending += each.users
    return ""
