"""Random JSON schemas whose values have few characters, so that an answer comes to its end."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "größe", 'a "b"', "x\\y", "id", "日本", "tab\t", "$ref", "")
PATTERNS = ("^[a-z]{1,4}$", "^(yes|no)$", "^\\d{2}-\\d{2}$", "^x?y{0,3}$", "^[A-Z][a-z]{0,5}$")
FORMATS = ("date", "ipv4", "uuid")


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
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(FORMATS)}


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
