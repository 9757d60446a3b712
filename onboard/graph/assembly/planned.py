"""Transforms whose keys are known and that are not there yet: what each waits for, and its fields.

A configuration that names one and leaves it off is right already; one that wants it is told what is
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import create_model

from onboard.errors import UsageError
from onboard.graph.transform import Stages, TransformConfig, validated

_ROTATING = "attention kernels that rotate queries and keys themselves"


@dataclass(frozen=True)
class Planned:
    """A transform that is not there yet."""

    stage: Stages
    waits_for: str
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Fields beyond the common ones: name -> type and default."""

    def config_class(self, key: str) -> type[TransformConfig]:
        """Return what the configuration of the transform is validated against."""
        return create_model(key, __base__=TransformConfig, **self.fields)  # type: ignore[call-overload, no-any-return]


def _fusion(waits_for: str, **fields: tuple[Any, Any]) -> Planned:
    return Planned(Stages.POST_LOAD_FUSION, waits_for, fields)


PLANNED: Mapping[str, Planned] = {
    "fuse_rope_into_trtllm_attention": _fusion(_ROTATING, fuse_qkv_passthrough=(bool, True)),
    "fuse_rope_into_trtllm_mla": _fusion(_ROTATING),
}
"""Every key, in the order in which it would run."""


def check_planned(named: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `UsageError` for a planned transform that is to run, or has fields that it will not
    have.
    """
    for key, fields in named.items():
        planned = PLANNED[key]
        config = validated(key, planned.config_class(key), {"stage": planned.stage.value, **fields})
        if config.enabled:
            raise UsageError(
                f"transform {key} is not there yet: it belongs to {planned.waits_for}",
                hint="Leave it out, or give it enabled: false",
            )


def by_reason() -> dict[str, list[str]]:
    """Return all keys by what they wait for."""
    reasons = dict.fromkeys(each.waits_for for each in PLANNED.values())
    return {
        reason: [key for key, each in PLANNED.items() if each.waits_for == reason]
        for reason in reasons
    }
