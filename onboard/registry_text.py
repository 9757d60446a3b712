"""Edits of the text of `models.yaml`: lines are added and values change, nothing else of what
people wrote moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from onboard.errors import OnboardError
from onboard.registry import RegistryEntry, parse_entries


def insert_entry(text: str, entry: RegistryEntry) -> str:
    """Return `text` with the entry after the last one: the difference is only added lines.

    An entry of the same name stays as it is, so that what a person changed in it survives.
    """
    if any(known.name == entry.name for known in parse_entries(text)):
        return text
    models = _models_node(text)
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if models is None or not models.value:
        at, column = _empty_list_line(lines), 2
    else:
        at, column = _last_line(models) + 1, models.start_mark.column
    lines[at:at] = _render_entry(entry, column)
    return "".join(lines)


def set_fields(text: str, name: str, fields: Mapping[str, str]) -> str:
    """Return `text` with plain values for fields of the entry `name`; nothing else in it moves."""
    for key, value in fields.items():
        text = _with_field(text, name, key, value)
    return text


def set_files(text: str, name: str, files: Sequence[str]) -> str:
    """Return `text` with other `yaml_extra` for the entry `name`; where their number is the same,
    comments stay.
    """
    node: SequenceNode = _scalar(_entry_node(text, name), "yaml_extra")
    lines = text.splitlines(keepends=True)
    if len(node.value) == len(files):
        for item, file in reversed(list(zip(node.value, files, strict=True))):
            at, start, end = item.start_mark.line, item.start_mark.column, item.end_mark.column
            lines[at] = f"{lines[at][:start]}{file}{lines[at][end:]}"
        return "".join(lines)
    if node.flow_style or not node.value:
        return f"{text[: node.start_mark.index]}[{', '.join(files)}]{text[node.end_mark.index :]}"
    indent = " " * node.start_mark.column
    lines[node.start_mark.line : _last_line(node) + 1] = [f"{indent}- {file}\n" for file in files]
    return "".join(lines)


def _entry_node(text: str, name: str) -> MappingNode:
    models = _models_node(text)
    assert models is not None, "a registry without entries"
    nodes: list[MappingNode] = models.value
    return next(node for node in nodes if _scalar(node, "name").value == name)


def _with_field(text: str, name: str, key: str, value: str) -> str:
    entry = _entry_node(text, name)
    old, lines = _scalar(entry, key), text.splitlines(keepends=True)
    if old is not None:
        at, (start, end) = old.start_mark.line, (old.start_mark.column, old.end_mark.column)
        lines[at] = f"{lines[at][:start]}{value}{lines[at][end:]}"
    elif entry.flow_style:
        at, end = entry.end_mark.line, entry.end_mark.column - 1
        lines[at] = f"{lines[at][:end]}, {key}: {value}{lines[at][end:]}"
    else:
        at = _last_line(entry)
        lines[at] = f"{lines[at].rstrip()}\n{' ' * entry.start_mark.column}{key}: {value}\n"
    return "".join(lines)


def _scalar(entry: Node, key: str) -> Any:
    return next((value for name, value in entry.value if name.value == key), None)


def _models_node(text: str) -> SequenceNode | None:
    root: Node | None = YAML().compose(StringIO(text))
    if not isinstance(root, MappingNode | None):
        raise OnboardError(
            "registry/models.yaml is not a mapping", hint="Restore it from version control"
        )
    pairs = root.value if isinstance(root, MappingNode) else []
    node = next((value for key, value in pairs if key.value == "models"), None)
    if not isinstance(node, SequenceNode):
        return None
    if node.flow_style and node.value:
        raise OnboardError(
            "registry/models.yaml: `models` is a list in brackets",
            hint="Write one entry a line (- name: ...)",
        )
    return node


def _last_line(node: Node) -> int:
    """Return the index of the line on which a node's last scalar or closing bracket stands."""
    while isinstance(node, MappingNode | SequenceNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.line)


def _empty_list_line(lines: list[str]) -> int:
    """Return the index after the line `models:`, which an empty `[]` is taken from; add the line
    when there is none.
    """
    for index, line in enumerate(lines):
        if match := re.match(r"models:\s*(\[\s*\]|null|~)?\s*(#.*)?$", line):
            if match[1]:
                lines[index] = line.replace(match[1], "", 1).replace(": \n", ":\n")
            return index + 1
    lines.append("models:\n")
    return len(lines)


def _render_entry(entry: RegistryEntry, column: int) -> list[str]:
    stream = StringIO()
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump([entry.model_dump(exclude_defaults=True)], stream)
    return [f"{' ' * column}{line[2:]}" for line in stream.getvalue().splitlines(keepends=True)]
