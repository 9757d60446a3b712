"""Single settings of a configuration on the command line: options of their own for the usual ones,
--set for any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from onboard.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

_NOT_SETTINGS = ("model",)
"""What a command takes as its argument."""


def settings_of(assignments: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Return the nested settings of options that were given, with those of --set over them.

    An option's name has `__` for the dot of a path: `kv_cache_config__dtype`.

    Raises:
        UsageError: an assignment is none, or there is no such setting.
    """
    from onboard.config import deep_merge

    settings: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            plain = value.value if isinstance(value, Enum) else value
            settings = deep_merge(settings, _nested(name.split("__"), plain))
    for assignment in assignments or ():
        settings = deep_merge(settings, _parsed(assignment))
    return settings


def _parsed(assignment: str) -> dict[str, Any]:
    """Return PATH=VALUE as nested settings; the value is read as YAML reads it, so `null`, `true`
    and lists work.
    """
    import yaml

    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise UsageError(
            f"--set {assignment!r} has no value", hint="Write it as kv_cache_config.dtype=float16"
        )
    _check_path(path)
    try:
        return _nested(path.split("."), yaml.safe_load(text))
    except yaml.YAMLError:
        raise UsageError(
            f"--set {path}: {text!r} is no value", hint="Write lists as [1,2,8]"
        ) from None


def _nested(parts: Sequence[str], value: Any) -> dict[str, Any]:
    for part in reversed(parts):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def _check_path(path: str) -> None:
    from onboard.config import RuntimeConfig, suggest

    known = dict(_paths(RuntimeConfig))
    is_inside = any(is_open and path.startswith(f"{name}.") for name, is_open in known.items())
    if path not in known and not is_inside:
        raise UsageError(f"--set: there is no setting {path!r}", hint=suggest(path, known))


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the path of every setting, and whether it is a mapping in which any name may be set."""
    from pydantic import BaseModel

    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _paths(kind, f"{prefix}{name}.")
        elif name not in _NOT_SETTINGS:
            yield f"{prefix}{name}", getattr(kind, "__origin__", None) is dict
