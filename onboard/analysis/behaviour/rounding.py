"""Whether a model rounds what it computes of a text, as quantised activations are.

Which way a number is rounded hangs on the last bit of the sum that it is: the same text gives other
logits in another order of sums, step by step say, and no comparison to 1e-5 holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onboard.analysis.tiny.tiny_prompts import from_zero, prompt, vocabulary
from onboard.errors import OnboardError

_ROUNDS = {torch.ops.aten.round, torch.ops.aten.floor, torch.ops.aten.ceil, torch.ops.aten.trunc}


def check_rounding(model: nn.Module) -> None:
    """Refuse a model of repositories' code that rounds activations, by the module that does."""
    if (path := rounds_in(model)) is not None:
        raise OnboardError(
            f"{type(model).__name__} rounds what it computes of a text (in {path or 'its forward'}): the last"
            " bit of a sum decides which way a number goes, so that no other program has these logits",
            hint="Use a checkpoint of the model whose activations are not quantised",
        )


@torch.no_grad()
def rounds_in(model: nn.Module) -> str | None:
    """Return the path of the first module that rounds floating-point numbers which differ between
    two texts of one length; None where none does.
    """
    found: list[list[tuple[str, torch.Tensor]]] = []
    for seed in (3, 4):
        inputs = from_zero(prompt(0, seed=seed, tokens=vocabulary(model)))
        with _entered(model) as inside:
            rounded = _Rounded(inside)
            with rounded:
                model(**inputs, use_cache=False)
        found.append(rounded.seen)
    return next(
        (path for (path, one), (_, two) in zip(*found, strict=False) if _differ(one, two)), None
    )


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape != other.shape or not torch.equal(one, other)


class _Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is rounded, and where."""

    def __init__(self, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside = inside
        self.seen: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at each operation."""
        rounds = func.overloadpacket in _ROUNDS and isinstance(args[0], torch.Tensor)
        if rounds and args[0].is_floating_point():
            self.seen.append((self.inside[-1], args[0].detach().clone()))
        return func(*args, **(kwargs or {}))


@contextmanager
def _entered(model: nn.Module) -> Iterator[list[str]]:
    """Yield the paths of the modules whose forward runs, the innermost last."""
    inside = [""]

    def enter(path: str) -> None:
        inside.append(path)

    def leave(*_: object) -> None:
        inside.pop()

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, path=path: enter(path)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()
