"""Files of the corpus, a little wrong: values of JSON replaced, and bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 0.5, 1e308, -0.0),
    *(1024, 2**24, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400),
    *(float("nan"), float("inf"), -float("inf")),
    *(
        "",
        " ",
        "a",
        "x" * 300,
        "../../x",
        "/etc/passwd",
        "a\nb",
        "\x1b]0;x\x07",
        "\u202e",
        "\ud800",
    ),
    *(
        "auto",
        "none",
        "True",
        "1e5",
        "float64",
        "int8",
        "bfloat16",
        "F32",
        "BF16",
        "I8",
        "{{ 7*7 }}",
    ),
    *([], {}, [[]], [None], [0, 0], [1] * 300, {"a": {}}, {"": 1}, [{}] * 3),
]
"""Values that code forgets."""

Json = Any
Draw = Callable[..., Any]


def values() -> st.SearchStrategy[Json]:
    """Odd ones first, then any JSON."""
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
    nested = st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
        max_leaves=8,
    )
    return st.sampled_from(ODD).map(copy.deepcopy) | nested


def places(document: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a document."""
    keys: list[Any] = []
    if isinstance(document, dict):
        keys = list(document)
    elif isinstance(document, list):
        keys = list(range(len(document)))
    return [path, *(place for key in keys for place in places(document[key], (*path, key)))]


@st.composite
def documents(draw: Draw, originals: list[Json], more_keys: tuple[str, ...] = ()) -> Json:
    """A document with up to three values replaced, removed, added, or moved."""
    document = copy.deepcopy(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        document = _changed(draw, document, more_keys)
    return document


def _changed(draw: Draw, document: Json, more_keys: tuple[str, ...]) -> Json:
    place = draw(st.sampled_from(places(document)))
    if not place:
        return (
            draw(values()) if draw(st.integers(0, 20)) == 0 else _grown(draw, document, more_keys)
        )
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    action = draw(st.sampled_from(["replace", "replace", "remove", "copy", "nest"]))
    if action == "replace":
        holder[place[-1]] = draw(values())
    elif action == "remove":
        del holder[place[-1]]
    elif action == "nest":
        holder[place[-1]] = _nested(holder[place[-1]], draw(st.sampled_from([1, 5, 70, 100])))
    else:
        source = document
        for key in draw(st.sampled_from(places(document))):
            source = source[key]
        holder[place[-1]] = copy.deepcopy(source)
    return document


def _grown(draw: Draw, document: Json, more_keys: tuple[str, ...]) -> Json:
    if isinstance(document, dict):
        key = draw(st.sampled_from(more_keys) if more_keys else st.text(max_size=12))
        document[key] = draw(values())
    return document


def _nested(value: Json, depth: int) -> Json:
    for _ in range(depth):
        value = [value]
    return value


def as_json(document: Json) -> bytes:
    """JSON as Python writes it, NaN and lone surrogates included."""
    return json.dumps(document).encode()


@st.composite
def damaged(draw: Draw, originals: list[bytes]) -> bytes:
    """Bytes cut, repeated, replaced, or with others in between."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 40))
        action = draw(st.sampled_from(["cut", "put", "repeat", "end", "token"]))
        if action == "cut":
            del data[at : at + length]
        elif action == "put":
            data[at : at + length] = draw(st.binary(max_size=12))
        elif action == "repeat":
            data[at:at] = bytes(data[at : at + length]) * draw(st.sampled_from([2, 50, 3000]))
        elif action == "end":
            del data[at:]
        else:
            data[at:at] = draw(st.sampled_from(TOKENS))
    return bytes(data)


TOKENS = [
    *(b"[", b"{", b"(", b"[" * 2000, b"(" * 500, b"- " * 400, b"-" * 5000, b"{a: " * 300),
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\t", b"\x1b[2J", b'"', b"'", b"\\", b"\n---\n"),
    *(b"&a ", b"*a", b"<<: ", b"!!python/name:os.system ", b"!!binary x", b"? ", b": ", b"#", b"%"),
    *(b"NaN", b"1e999", b"0x" + b"f" * 3000, b"9" * 5000, b"2020-13-45", b"~", b"null", b"-1"),
    *(b"lambda: 0", b"import os\n", b"def f(", b"class A:\n", b"\nif 1:\n", b"from .x import y\n"),
]
