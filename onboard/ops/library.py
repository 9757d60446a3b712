"""How an op gets into `torch.ops.onboard`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from onboard.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "onboard"


@dataclass(frozen=True)
class OpSource:
    """What is known of a registered op."""

    module: str
    """The module that it comes from."""
    mutates: tuple[str, ...]
    carries_state: bool
    function: Callable[..., Any]
    """What it computes, to be called without the dispatcher."""

    @property
    def ships(self) -> bool:
        """Whether the op is this package's own; others come from extensions."""
        return self.module.startswith("onboard.")


_SOURCES: dict[str, OpSource] = {}


def register_op(
    fake: Callable[..., Any] | None = None,
    *,
    mutates: tuple[str, ...] = (),
    schema: str | None = None,
    carries_state: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.onboard.<its name>`; the schema comes from its annotations.

    Args:
        fake: computes outputs of the right shape, dtype and strides from fake tensors. None: the function itself does,
            which is right for a composition of PyTorch operators that never reads a value.
        mutates: names of the arguments that the op writes to.
        schema: the schema where annotations cannot say it (an optional list of tensors), without the op's name.
        carries_state: it carries something from token to token and sees only the tokens of its own step, so that a
            cached op must take its place before a graph can generate.

    The function itself is returned, so that ops can be composed without a second trip through the dispatcher. Raises
    `UsageError` for a name that is taken: graphs that are there already call the op that has it.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        if function.__name__ in _SOURCES:
            raise UsageError(
                f"there is an op {function.__name__!r}", hint="Give it another name; after an edit start Python anew"
            )
        op = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=mutates, schema=schema)
        op.register_fake(fake or function)
        _SOURCES[function.__name__] = OpSource(function.__module__, mutates, carries_state, function)
        return function

    return register


def schema_of(name: str) -> str:
    """Return the schema of a registered op, for another one that is to have the same: for `register_op`."""
    return str(getattr(getattr(torch.ops, NAMESPACE), name).default._schema).partition(name)[2]


def plain_function(op: Any) -> Any:
    """Return the Python function behind an operator of ours, which costs less to call; any other one as it is."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    namespace, _, name = str(packet).partition(".")
    is_ours = isinstance(packet, OpOverloadPacket) and namespace == NAMESPACE and name in _SOURCES
    return _SOURCES[name].function if is_ours else op


def op_sources() -> dict[str, OpSource]:
    """Return what is known of every registered op, by name."""
    return dict(_SOURCES)
