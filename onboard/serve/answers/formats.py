"""How families of models write reasoning and calls of tools, as transformers' response templates.

A tokenizer that brings a template of its own (`response_template`) is read by that one. For the
others the marks decide that the chat template, or the vocabulary, has: no model's name is asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from onboard.runtime.tokenizer import Tokenizer

Format = Mapping[str, Any]

BEGINNING = "\x00"
"""Stands before what a chat template writes of the model's turn: no text has it."""
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE_CALL = {"type": "function", "function": "{content}"}
_VERBATIM = {"content": "text", "content_args": {"strip": False}}
_THOUGHT = {"open": "<think>", "close_pattern": r"\s*</think>", **_VERBATIM}


def _format(
    calls: Mapping[str, Any] | None, thought: Mapping[str, Any] = _THOUGHT, dropped: str = ""
) -> Format:
    """Return a template; `dropped` is a pattern that no reader sees, between calls and text."""
    text = {**_VERBATIM, "close_pattern": dropped} if dropped else dict(_VERBATIM)
    fields = {"reasoning_content": dict(thought), "content": text}
    if calls is not None:
        lenient = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
        fields["tool_calls"] = {**lenient, **calls}
    return {"start_anchor": BEGINNING, "fields": fields}


TAGGED_JSON = _format(
    {
        "open_pattern": r"\s*<tool_call>\s*(?=[{\[])",
        "close_pattern": r"\s*</tool_call>",
        "transform": _WHOLE_CALL,
    }
)
"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

TAGGED_PARAMETERS = _format(
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        },
        "transform": _CALL,
    }
)
"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""


def bare_json(names: Sequence[str]) -> Format:
    """Llama 3: `{"name": ..., "parameters": {...}}` in the place of an answer.

    Nothing marks it as a call but the name of one of the tools.
    """
    known = "|".join(map(re.escape, names)) or "(?!)"
    return _format(
        {
            "open_pattern": (
                r"(?:<\|python_tag\|>)?"
                rf'(?=\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:{known})")'
            ),
            "close_pattern": r"<\|eom_id\|>|<\|eot_id\|>",
            "transform": _WHOLE_CALL,
        }
    )


NAMED_JSON = _format(
    {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[ARGS\])?(?=\{)",
        "close_pattern": r"(?=\[TOOL_CALLS\]|</s>)",
        "transform": _CALL,
    },
    {"open": "[THINK]", "close_pattern": r"\s*\[/THINK\]", **_VERBATIM},
)
"""Mistral of 2025 on: `[TOOL_CALLS]NAME[ARGS]{...}`."""

LISTED_JSON = _format(
    {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
        "close": "</s>",
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
        "transform_each": True,
        "repeats": False,
    }
)
"""Mistral before: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`."""

FENCED_JSON = _format(
    {
        "open_pattern": (
            r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>"
            r"(?:function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json\s*"
            r"|(?!function<)(?P<name>[\w.-]+)<｜tool▁sep｜>)"
        ),
        "close_pattern": r"(?:\s*```)?\s*<｜tool▁call▁end｜>",
        "transform": _CALL,
    },
    dropped=r"\s*<｜tool▁calls▁end｜>",
)
"""DeepSeek: a name, then JSON, fenced or not, between its own marks."""

_NEXT_MESSAGE = r"(?:<\|end\|>|<\|return\|>|<\|call\|>)(?:<\|start\|>assistant)?"

CHANNELS: Format = {
    "start_anchor": BEGINNING,
    "fields": {
        "reasoning_content": {
            "open": "<|channel|>analysis<|message|>",
            "close_pattern": _NEXT_MESSAGE,
            **_VERBATIM,
        },
        "tool_calls": {
            "open_pattern": (
                r"(?:<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)"
                r"| to=functions\.(?P<name>[\w.-]+)<\|channel\|>commentary)"
                r"[^<]*(?:<\|constrain\|>json)?<\|message\|>"
            ),
            "close_pattern": _NEXT_MESSAGE,
            "repeats": True,
            "content": "json",
            "content_args": {"allow_non_json": True},
            "transform": _CALL,
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?! to=)[^<]*<\|message\|>",
            "close_pattern": _NEXT_MESSAGE,
            **_VERBATIM,
        },
    },
}
"""Harmony (gpt-oss): channels for analysis, for calls and for what the user reads."""


def names_its_calls(shape: Format) -> bool | None:
    """Return whether a mark names a call of which the arguments stand alone; False: an object has
    name and arguments, None: it is written in another way.
    """
    calls = shape["fields"].get("tool_calls") or {}
    if calls.get("content") != "json" or calls.get("transform") not in (_CALL, _WHOLE_CALL):
        return None
    return bool(calls["transform"] == _CALL)


PLAIN = _format(None)
"""Text, perhaps behind thoughts."""

_MARKS: tuple[tuple[str, Format | None], ...] = (
    ("<|channel|>", CHANNELS),
    ("<｜tool▁calls▁begin｜>", FENCED_JSON),
    ("[ARGS]", NAMED_JSON),
    ("[TOOL_CALLS]", LISTED_JSON),
    ("<function=", TAGGED_PARAMETERS),
    ("<tool_call>", TAGGED_JSON),
    ("<|python_tag|>", None),
)
"""What a chat template, or a vocabulary, has that writes so; the first that is found decides. None:
`bare_json`.
"""


def format_of(
    chat_template: str, vocabulary: Mapping[str, int], tools: Sequence[str] = ()
) -> Format:
    """Return how a model writes: by the marks of its chat template and of its tokens; `tools` are
    the names that it may call.
    """
    for mark, found in _MARKS:
        if mark in chat_template or mark in vocabulary:
            return bare_json(tools) if found is None else found
    return PLAIN


def format_for(tokenizer: Tokenizer | None, tools: Sequence[str] = ()) -> Format:
    """Return how the model of a tokenizer writes: by the tokenizer's own `response_template`, else
    by `format_of`.
    """
    if tokenizer is None:
        return format_of("", {})
    own: Format | None = getattr(tokenizer.hf, "response_template", None)
    template = str(tokenizer.hf.chat_template or "")
    return own or format_of(template, tokenizer.special_tokens, tools)
