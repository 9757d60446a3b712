"""The one Jinja environment: templates of the user's root first, then the shipped ones."""

from __future__ import annotations

import ast
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from onboard.content import CONTENT_ROOT
from onboard.untrusted.visible_text import escaped

TEST_TEMPLATE = "tests/test_modeling.py.j2"
"""What the equivalence tests are made from."""
TEST_SUITE = Path(__file__).resolve().parent / "testing" / "suite.py"
"""What they inherit."""


_LIVE = re.compile(r"(?<=[@#])|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=\bGH)(?=-\d)", re.IGNORECASE)
"""Where text is parted that GitHub would link, notify or refer to."""


def render(template: str, root: Path | None = None, **values: Any) -> str:
    """Render a template, named relative to `templates/` (for example "report/report.md.j2").

    An unknown name is an error (StrictUndefined). HTML templates escape every value; in Python and
    Markdown ones values from a config or a repository go through the filters `python`, `inline`,
    `code` and `fenced`.
    """
    return environment(root).get_template(template).render(values)


@lru_cache(maxsize=8)
def environment(root: Path | None = None) -> Environment:
    """Return the environment of a root."""
    roots = [root, CONTENT_ROOT] if root is not None else [CONTENT_ROOT]
    jinja = Environment(
        loader=FileSystemLoader([folder / "templates" for folder in roots]),
        undefined=StrictUndefined,
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters |= {
        "python": python_literal,
        "inline": inline,
        "code": code,
        "fenced": fenced,
        "visible": escaped,
    }
    return jinja


def python_literal(value: Any) -> str:
    """Return `value` as a Python literal; read back it is the same value. Floats without a literal
    are calls.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if type(value) is dict:
        return (
            "{"
            + ", ".join(
                f"{python_literal(key)}: {python_literal(item)}" for key, item in value.items()
            )
            + "}"
        )
    if type(value) is list:
        return "[" + ", ".join(map(python_literal, value)) + "]"
    text = repr(value)
    assert ast.literal_eval(text) == value, f"{value!r} has no literal"
    return text


def inline(value: Any) -> str:
    """Return `value` as one line of Markdown text with nothing in it that Markdown, HTML or GitHub
    would act on.

    GitHub looks for @names, #1, GH-1 and addresses in the rendered text, where a backslash is gone:
    an HTML comment parts them instead.
    """
    text = re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", _one_line(value))
    return _LIVE.sub("<!-- -->", text)


def _one_line(value: Any) -> str:
    return escaped(" ".join(str(value).split()))


def code(value: Any) -> str:
    """Return `value` as a Markdown code span: one line without control characters, verbatim
    otherwise.
    """
    text = _one_line(value)
    fence = "`" * (max(map(len, re.findall(r"`+", text)), default=0) + 1)
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def fenced(value: Any, language: str = "text") -> str:
    """Return `value` verbatim in a fenced block, the fence longer than any that the text has."""
    text = str(value)
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"
