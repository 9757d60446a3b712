"""Random JSON schemas, and how long their longest answers are, so that one comes to its end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

WORDS = ("name", "größe", 'a "b"', "x\\y", "id", "日本", "tab\t", "$ref", "")
PATTERNS = {
    "^[a-z]{1,4}$": 4,
    "^(yes|no)$": 3,
    "^\\d{2}-\\d{2}$": 5,
    "^x?y{0,3}$": 4,
    "^[A-Z][a-z]{0,5}$": 6,
}
"""With the most characters of each."""
FORMATS = {"date": 10, "ipv4": 15, "uuid": 36}
SPACES = {None: 42, " ?": 1, "": 0}
"""What may be between the tokens of an answer, None for what the runtime lets be there, with its
most bytes.
"""
_CHARACTER = 6
"""Most bytes of one: an escaped control character."""
_NUMBER = 8


class Longest(NamedTuple):
    """Most bytes of an answer without white space, and most tokens of its JSON."""

    size: int
    tokens: int

    def with_spaces(self, width: int) -> int:
        """Return the most bytes with white space of so many bytes at most."""
        return self.size + width * (self.tokens - 1)


def bounded_schema(rng: random.Random, room: int) -> dict[str, Any]:
    """Return a schema whose every answer has at most `room` bytes: where it nests too deep for that
    with white space, it says that there is less of it, or none.
    """
    while True:
        schema = random_schema(rng)
        most = longest(schema)
        for pattern, width in SPACES.items():
            if most.with_spaces(width) <= room:
                own = {} if pattern is None else {"x-guidance": {"whitespace_pattern": pattern}}
                return {**own, **schema}


def longest(schema: dict[str, Any], root: dict[str, Any] | None = None) -> Longest:
    """Return how long an answer to a schema of `random_schema` may be."""
    root = schema if root is None else root
    if "$ref" in schema:
        return longest(root["$defs"]["part"], root)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _most(longest(each, root) for each in schema[key])
    if "enum" in schema or "const" in schema:
        return _most(map(_written, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "object":
        values = schema["properties"].items()
        return _joined([_pair(name, longest(value, root)) for name, value in values])
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]] * schema["maxItems"]
        return _joined([longest(each, root) for each in items])
    return Longest(_simple(schema), 1)


def _simple(schema: dict[str, Any]) -> int:
    if schema["type"] in ("null", "boolean", "integer", "number"):
        return _NUMBER
    most = PATTERNS.get(schema.get("pattern", "")) or FORMATS.get(schema.get("format", ""))
    return max(_NUMBER, 2 + _CHARACTER * (most or schema["maxLength"]))


def _written(value: Any) -> Longest:
    """Return how long a value is."""
    if isinstance(value, dict):
        return _joined([_pair(name, _written(each)) for name, each in value.items()])
    if isinstance(value, list):
        return _joined([_written(each) for each in value])
    return Longest(len(json.dumps(value)), 1)


def _pair(name: str, value: Longest) -> Longest:
    return Longest(len(json.dumps(name)) + 1 + value.size, 2 + value.tokens)


def _joined(parts: list[Longest]) -> Longest:
    """Return how long parts are in brackets, with commas between them."""
    own = 2 + max(len(parts) - 1, 0)
    return Longest(own + sum(each.size for each in parts), own + sum(each.tokens for each in parts))


def _most(parts: Iterable[Longest]) -> Longest:
    found = list(parts)
    return Longest(max(each.size for each in found), max(each.tokens for each in found))


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema that nests at most `depth` deep; some refer to a definition of their own."""
    if rng.random() < 0.2:
        own = {"$defs": {"part": _schema(rng, depth - 1)}}
        part: dict[str, Any] = {"$ref": "#/$defs/part"}
        if rng.random() < 0.5:
            return {**own, "type": "array", "items": part, "maxItems": 2}
        return {**own, **_object(rng, 1), "properties": {"p": part}, "required": ["p"]}
    return _schema(rng, depth)


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = [_null, _boolean, _integer, _number, _text, _pattern, _format, _enum, _const, _types]
    nested = [_object, _object, _array, _tuple, _any_of, _one_of, _all_of]
    if depth <= 0 or rng.random() < 0.3:
        return rng.choice(simple)(rng)
    return rng.choice(nested)(rng, depth)


def _null(_: random.Random) -> dict[str, Any]:
    return {"type": "null"}


def _boolean(_: random.Random) -> dict[str, Any]:
    return {"type": "boolean"}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    bounds = {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 3, 500])}
    if rng.random() < 0.3:
        bounds |= {"minimum": 0, "maximum": 90, "multipleOf": rng.choice([3, 5, 30])}
    return bounds


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    kind = rng.choice(["minimum", "exclusiveMinimum"])
    return {"type": "number", kind: low / 4, "maximum": low / 4 + 2, "multipleOf": 0.25}


def _text(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(list(PATTERNS))}


def _format(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(list(FORMATS))}


def _value(rng: random.Random) -> Any:
    return rng.choice([None, True, 3, -2.5, rng.choice(WORDS), [1, "a"], {"k": [None]}, [], {}])


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": [_value(rng) for _ in range(rng.randint(1, 4))]}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": _value(rng)}


def _types(rng: random.Random) -> dict[str, Any]:
    return {"type": ["null", "boolean", "string"], "maxLength": rng.randint(1, 6)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    found = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        found["description"] = "what a reader should know"
    return found


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = _schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    first = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    count = {"minItems": rng.randint(0, len(first)), "maxItems": len(first)}
    return {"type": "array", "prefixItems": first, "items": False, **count}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, _: int) -> dict[str, Any]:
    """Alternatives of which no value meets two."""
    kinds = [_boolean(rng), _integer(rng), _text(rng), _null(rng)]
    return {"oneOf": rng.sample(kinds, rng.randint(1, 3))}


def _all_of(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-9, 9)
    more = {"type": "integer", "maximum": low + 20}
    return {"allOf": [{"type": "integer", "minimum": low}, more]}
