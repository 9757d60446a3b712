"""What can be tuned: the choices that the configuration's and the transforms' fields offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from onboard.config import RuntimeConfig, deep_merge
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.backends import FOREIGN_BACKENDS
from onboard.graph.context import HistoryEntry
from onboard.graph.transform import TransformConfig

_SUFFIX = "backend"
_COMPILE = "compile_model"


@dataclass(frozen=True)
class Choice:
    """One setting to try: a name for people, and what it changes in a run's configuration."""

    knob: str
    value: Any
    changes: dict[str, Any]

    def applied(self, runtime: RuntimeConfig) -> RuntimeConfig:
        """Return the configuration with this choice."""
        return RuntimeConfig.model_validate(deep_merge(runtime.model_dump(), self.changes))


def choices(
    runtime: RuntimeConfig, history: Sequence[HistoryEntry], *, gpu: bool, root: Path | None = None
) -> list[Choice]:
    """Return what is worth trying in place of a run that has this history, one setting changed
    each.

    These are back ends of attention and of transforms that found something to do, and on a GPU CUDA
    graphs of prefill in pieces. What torch.compile does is not among them: it takes minutes.
    """
    busy = {
        entry.key for entry in history if entry.enabled and not entry.skipped and entry.num_matches
    }
    found = list(_attention(runtime))
    for transform in load_pipeline(runtime.transforms, runtime.mode, root):
        if transform.key in busy and transform.key != _COMPILE:
            found.extend(_backends(transform.key, transform.config))
        if transform.key == _COMPILE and gpu:
            found.extend(_pieces(transform.config, history))
    return found


def plain(runtime: RuntimeConfig, root: Path | None = None) -> RuntimeConfig:
    """Return the configuration without kernels of our own and without any compilation: what all
    must agree with.
    """
    torch_only = {
        transform.key: {
            name: "torch" for name, values in _fields(transform.config) if "torch" in values
        }
        for transform in load_pipeline(runtime.transforms, runtime.mode, root)
        if transform.key != _COMPILE
    }
    changes = {key: fields for key, fields in torch_only.items() if fields}
    return runtime.model_copy(
        update={
            "attn_backend": "torch",
            "compile_backend": "torch-simple",
            "transforms": deep_merge(
                deep_merge(runtime.transforms, changes), {_COMPILE: _PLAIN_COMPILE}
            ),
        }
    )


_PLAIN_COMPILE = {
    "backend": "torch-simple",
    "piecewise_enabled": False,
    "piecewise_num_tokens": None,
}


def _attention(runtime: RuntimeConfig) -> Iterator[Choice]:
    for value in _literals(RuntimeConfig.model_fields["attn_backend"].annotation):
        if value not in ("auto", runtime.attn_backend):
            yield Choice("attn_backend", value, {"attn_backend": value})


def _backends(key: str, config: TransformConfig) -> Iterator[Choice]:
    for name, values in _fields(config):
        for value in values:
            if value not in ("auto", getattr(config, name)):
                yield Choice(f"{key}.{name}", value, {"transforms": {key: {name: value}}})


def _fields(config: TransformConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields that name a back end, and which there are here."""
    for name, field in type(config).model_fields.items():
        values = [value for value in _literals(field.annotation) if value not in FOREIGN_BACKENDS]
        if name.endswith(_SUFFIX) and len(values) > 1:
            yield name, values


def _pieces(config: TransformConfig, history: Iterable[HistoryEntry]) -> Iterator[Choice]:
    captured = any(entry.key == _COMPILE and entry.num_matches for entry in history)
    if captured and getattr(config, "piecewise_enabled", None) is False:
        fields = {"backend": "torch-cudagraph", "piecewise_enabled": True}
        yield Choice(f"{_COMPILE}.piecewise_enabled", True, {"transforms": {_COMPILE: fields}})


def _literals(annotation: Any) -> list[str]:
    """Return the texts that an annotation allows: of a Literal, or of a union of some."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    parts = (_literals(part) for part in get_args(annotation))
    return [value for part in parts for value in part]
