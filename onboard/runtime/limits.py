"""Default limits: the context length, batch size and step size of a run whose configuration leaves
them out, from the model and the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onboard.config import RuntimeConfig, SettledConfig
from onboard.errors import UsageError

LIMITS = ("max_seq_len", "max_batch_size", "max_num_tokens")
ENDLESS = 32768
"""Default `max_seq_len` of a model without a limit of its own, such as a recurrent one."""
_POSITIONS = ("max_position_embeddings", "max_seq_len")
"""Names of the config field with the number of positions."""


@dataclass(frozen=True)
class Defaults:
    """Default limits of a device."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None = None
    """None: the model's own."""
    cached_tokens: int | None = None
    """Cached tokens for each sequence of a batch; None: as many as fit in memory."""


ON_GPU = Defaults(max_batch_size=256, max_num_tokens=8192)
ON_CPU = Defaults(max_batch_size=8, max_num_tokens=2048, cached_tokens=1024)
PROOF = Defaults(max_batch_size=8, max_num_tokens=2048, max_seq_len=512)
"""Limits of runs that compare with transformers: the prompts there are short, and longer sequences
would prove no more.
"""


def max_positions(config: Any) -> int | None:
    """Return the number of positions that a model's config allows, None if it names none.

    Scaled rotary embeddings are already included: transformers' tables end there. `model_kwargs`
    may raise the number.
    """
    found = (getattr(config, name, None) for name in _POSITIONS)
    return next((each for each in found if isinstance(each, int) and each > 0), None)


def settled(
    runtime: RuntimeConfig, config: Any, first_position: int, defaults: Defaults
) -> tuple[SettledConfig, frozenset[str]]:
    """Return the configuration with all limits set, and the names of those that are defaults.

    `config` is the text model's. A default may be lowered later to what fits in memory; a limit
    that the user set is kept. Raises `UsageError` if `max_seq_len` is more than the model allows.
    """
    chosen = {name for name in LIMITS if getattr(runtime, name) is None}
    batch = runtime.max_batch_size or defaults.max_batch_size
    numbers = {
        "max_seq_len": _longest(runtime.max_seq_len, config, first_position, defaults),
        "max_batch_size": batch,
        "max_num_tokens": runtime.max_num_tokens or max(defaults.max_num_tokens, batch),
    }
    values = runtime.model_dump() | numbers
    cache = runtime.kv_cache_config
    if (
        defaults.cached_tokens is not None
        and cache.max_tokens is None
        and chosen & {"max_seq_len", "max_batch_size"}
    ):
        chosen.add("max_tokens")
        tokens = max(batch * defaults.cached_tokens, runtime.max_seq_len or 0)
        values["kv_cache_config"] = cache.model_dump() | {"max_tokens": tokens}
    return SettledConfig.model_validate(values), frozenset(chosen)


def _longest(asked: int | None, config: Any, first_position: int, defaults: Defaults) -> int:
    """Return `max_seq_len`: what the user asked for, or the default, within the model's limit."""
    positions = max_positions(config)
    limit = None if positions is None else positions - first_position
    if asked is None:
        return min(each for each in (limit or ENDLESS, defaults.max_seq_len) if each is not None)
    if limit is None or asked <= limit:
        return asked
    if asked != positions:
        raise UsageError(
            f"max_seq_len is {asked} and the model has {limit} positions", hint="Lower it"
        )
    return limit
