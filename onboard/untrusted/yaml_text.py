"""YAML from elsewhere, read within bounds: how deep it nests, and how much its aliases stand for."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent

from onboard.errors import OnboardError
from onboard.untrusted.bounds import DEPTH, YAML_BYTES, YAML_VALUES, check_values


def load_yaml(text: str, source: str) -> Any:
    """Return what a YAML text holds; `source` names it in errors.

    Raises:
        OnboardError: it is no YAML, or beyond its bounds.
    """
    YAML_BYTES.check(len(text.encode("utf-8", "surrogatepass")), source)
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _BoundedComposer
    yaml.composer.source = source
    try:
        found = yaml.load(text)
    except OnboardError:
        raise
    # Constructors meet whatever a tag may stand before: "!!int []" is an AttributeError.
    except (YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise OnboardError(f"{source} is not valid YAML: {_reason(error)}") from error
    check_values(found, source, YAML_VALUES)
    return found


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _BoundedComposer(Composer):
    """Counts nodes while they are composed, those that an alias stands for each time."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.source = ""
        self.warn_double_anchors = False
        self._depth = self._values = 0
        self._sizes: dict[str, int] = {}
        """Of what anchors stand before."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent):
            self._add(self._size(event.anchor))
            return super().compose_node(parent, index)
        self._depth += 1
        DEPTH.check(self._depth, self.source)
        before = self._values
        self._add(1)
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._sizes[event.anchor] = self._values - before
        self._depth -= 1
        return node

    def _size(self, anchor: str) -> int:
        if anchor in self.anchors and anchor not in self._sizes:
            raise OnboardError(f"{self.source} has an alias, {anchor}, that stands for itself")
        return self._sizes.get(anchor, 1)

    def _add(self, count: int) -> None:
        self._values += count
        YAML_VALUES.check(self._values, self.source)
