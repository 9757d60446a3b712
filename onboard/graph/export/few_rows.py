"""Mixtures whose experts' weights are stacked, with a few experts: for a graph of which the size
alone is wanted.

Each parameter of such a module has a row an expert, and the model takes the rows apart into lists.
A graph of a few rows then says what that of all of them is like.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import fx, nn

from onboard.graph.export.layer_kinds import ExpertStack, UnlikeError
from onboard.graph.fx import arguments, is_op

aten = torch.ops.aten


def find_stacks(model: nn.Module, kept: int) -> tuple[ExpertStack, ...]:
    """Return the modules that look like stacked experts, where a multiple of `kept` are stacked:
    all of their parameters have as many rows, and two of them a matrix each row.
    """
    found = []
    for name, module in model.named_modules():
        own = [each for each in module._parameters.values() if each is not None]
        rows = {each.shape[0] for each in own if each.dim()}
        matrices = sum(each.dim() == 3 for each in own)
        if matrices >= 2 and len(rows) == 1 and all(n > kept and n % kept == 0 for n in rows):
            found.append(ExpertStack(name, rows.pop(), kept))
    return tuple(found)


@contextmanager
def few_rows(model: nn.Module, stacks: Sequence[ExpertStack]) -> Iterator[None]:
    """Let the parameters of stacked experts have the rows that are exported alone, on the meta
    device.
    """
    tables = [model.get_submodule(stack.name)._parameters for stack in stacks]
    originals = [dict(table) for table in tables]
    for stack, table in zip(stacks, tables, strict=True):
        for name, each in table.items():
            if each is not None:
                few = each.new_empty((stack.kept, *each.shape[1:]), device="meta")
                table[name] = nn.Parameter(few, requires_grad=False)
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)


def check_stacks(gm: fx.GraphModule, stacks: Sequence[ExpertStack]) -> None:
    """Raise `UnlikeError` where a graph does anything with stacked weights but take the rows apart
    into lists with an entry an expert, maybe transposed or cut in other dimensions.
    """
    kept = {stack.name: stack.kept for stack in stacks}
    for node in gm.graph.find_nodes(op="get_attr"):
        owner = str(node.target).rpartition(".")[0]
        for user in node.users if owner in kept else ():
            _check_use(user, kept[owner])


def _check_use(node: fx.Node, rows: int) -> None:
    if is_op(node, aten.unbind) and arguments(node)["dim"] == 0:
        _check_lists(node, rows)
    elif _leaves_rows(node):
        for user in node.users:
            _check_use(user, rows)
    else:
        raise UnlikeError(f"{node.name} reads the weights of stacked experts together")


def _leaves_rows(node: fx.Node) -> bool:
    """Whether a node transposes or cuts each row of its input."""
    if not is_op(node, aten.transpose, aten.slice):
        return False
    given = arguments(node)
    dims = (given[name] for name in ("dim", "dim0", "dim1") if name in given)
    return all(dim % node.meta["val"].dim() for dim in dims)


def _check_lists(node: fx.Node, rows: int) -> None:
    """Check that what is taken apart is only ever read as a list of all rows."""
    entries = sorted(node.users, key=lambda user: user.args[1] if len(user.args) > 1 else -1)  # type: ignore[arg-type,return-value]
    places = [user.args[1] for user in entries if user.target is operator.getitem]
    read = [
        [*value] if isinstance(value, list | tuple) else [value]
        for reader in {user for entry in entries for user in entry.users}
        for value in (*reader.args, *reader.kwargs.values())
    ]
    apart = [value for value in read if value != entries and any(each in value for each in entries)]
    if places != list(range(rows)) or apart:
        raise UnlikeError(f"{node.name} takes stacked experts apart, and not into a list")
