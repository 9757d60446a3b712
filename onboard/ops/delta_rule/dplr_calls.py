"""How functions of RWKV-7's code are called that compute `torch_dplr_delta_rule`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from onboard.ops.written_forms import CallForm

_DECAYS = ("-w.float().exp()", "w.float()", "w.float().log()")
"""The logarithm of the decays, where `w` is that of its negative, or that itself, or the decays."""
_SIZES = frozenset({"BATCH_SIZE", "SEQ_LEN", "N_HEAD", "xx"})
_STATES = frozenset({"state", "s", "s0", "wkv_state", "wkv_state_in", "initial_state"})


def _called_as() -> Iterator[CallForm]:
    """Yield how functions of RWKV-7 are called: with [batch, sequence, heads, size], or without the
    heads, which are of 64 channels, or HEAD_SIZE; they may be given the rates of what is taken away.
    """
    for query, decay, with_state in product("rq", _DECAYS, (True, False)):
        yield _called(f"{query}, k, v, a, b", decay, "", with_state)
    for query in "rq":
        yield _called(f"{query}, k, v, a, b", _DECAYS[0], "64", False)
    for rate, decay in product(("a", "iclr"), _DECAYS):
        yield _called(f"r, k, v, -kk, kk * {rate}", decay, "HEAD_SIZE", True)


def _called(tensors: str, decay: str, size: str, with_state: bool) -> CallForm:
    query, *others = (f"({item})" for item in (*tensors.split(", "), decay))
    if size:
        query, *others = (f"{item}.unflatten(-1, (-1, {size}))" for item in (query, *others))
    call = f"torch.ops.onboard.torch_dplr_delta_rule({query}, {', '.join(others)}, 1.0)"
    expression = f"{call}.flatten(2)" if size else call
    return CallForm(expression, ignored=_SIZES, empty=_STATES, with_state=with_state)


CALLS = tuple(_called_as())
"""The ways to call them."""
