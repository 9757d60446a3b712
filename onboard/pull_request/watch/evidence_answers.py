"""Answers to questions, from what was found and measured: the spec, the tests, the run, the review and
the model file's own lines. Nothing is made up; what the evidence does not say is left to the user.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onboard.analysis.spec import ModelSpec
from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.watch.speech import sentences, words_of
from onboard.render import code, fenced, inline
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.test import model_path

_MOST = 6
"""Pieces of evidence in an answer."""
_AROUND = 3
"""Lines that are shown before and after those that a question is about."""
_SHARE = 0.5
"""A piece is shown that fits at least so well as this share of the best one."""
_COMMON = words_of(
    [
        "a an and are as at be been but by can could did do does for from had has have how i if in is",
        "it its just me my not of on or our so than that the their them then there these they this",
        "those to up us was we were what when where which who why will with would you your please",
        "explain here about model file tell show use used uses",
    ]
)


@dataclass(frozen=True)
class Evidence:
    """One thing that is known, and how."""

    text: str
    """Markdown."""
    words: frozenset[str]


def answer(context: RunContext, said: Said) -> str:
    """Return the answer to a question, as Markdown; "" where the evidence has none.

    The question only chooses among the evidence: nothing of it is carried out, or repeated.
    """
    known = list(_gathered(context))
    lines, about = _lines_around(context, said)
    asked = words_of(sentences(said.body)) - _COMMON
    best = _best(known, asked | about, asked)
    shown = [lines] if lines else []
    if best:
        shown.append(
            "What was found and measured:\n\n" + "\n".join(f"- {each.text}" for each in best)
        )
    return "\n\n".join(shown)


def _best(known: list[Evidence], words: set[str], asked: set[str]) -> list[Evidence]:
    """Return the evidence that has most of the words, rare ones counting more (inverse document
    frequency).
    """
    counts = Counter(word for each in known for word in each.words)

    def weight(each: Evidence, chosen: set[str]) -> float:
        shared = each.words & chosen
        return sum(math.log(1 + len(known) / counts[word]) for word in shared)

    scored = [(weight(each, words) + weight(each, asked), each) for each in known]
    top = max((score for score, _ in scored), default=0.0)
    chosen = [pair for pair in scored if pair[0] > 0 and pair[0] >= _SHARE * top]
    ranked = sorted(chosen, key=lambda pair: -pair[0])
    return [each for _, each in ranked[:_MOST]]


def _evidence(text: str, *words: object) -> Evidence:
    return Evidence(text, frozenset(words_of(map(str, words)) - _COMMON))


def _gathered(context: RunContext) -> Iterator[Evidence]:
    yield from _of_spec(context.spec)
    yield from _of_tests(_artifact(context, "tests.json"))
    yield from _of_run(_artifact(context, "run.json"))
    yield from _of_review(_artifact(context, "review.json"))


def _artifact(context: RunContext, name: str) -> dict[str, Any]:
    found: dict[str, Any] = context.read_json(name) if context.artifact(name).exists() else {}
    return found


def _of_spec(spec: ModelSpec) -> Iterator[Evidence]:
    for name, trait in spec.traits.items():
        text = f"{code(name)} is {code(trait.value)}: {inline(trait.evidence)}"
        yield _evidence(text, name, trait.value, trait.evidence)
    for block in spec.blocks:
        text = f"{code(block.class_name)} ({inline(block.kind)}, at {code(block.path)}) is from {code(block.source)}"
        yield _evidence(text, block.class_name, block.kind, block.path)
    for name, value in spec.config.items():
        if isinstance(value, str | int | float):
            yield _evidence(f"config.json: {code(name)} is {code(value)}", name, value)


def _of_tests(tests: dict[str, Any]) -> Iterator[Evidence]:
    for test in tests.get("tests", []):
        measured = ""
        if test.get("error") is not None:
            limit = test.get("tolerance")
            measured = f", error {test['error']:.1e}" + (
                f" of at most {limit:.1e}" if limit else ""
            )
        text = f"test {code(test['name'])}: {inline(test['status'])}{measured}"
        yield _evidence(
            text, test["name"], test.get("block", ""), test.get("level", ""), "error test tested"
        )


def _of_run(run: dict[str, Any]) -> Iterator[Evidence]:
    full = run.get("runs", {}).get("full", {})
    for check in full.get("comparison", {}).get("checks", []):
        text = (
            f"the run on the checkpoint's weights, {inline(check['what'])}: logits within {check['error']:.1e} "
            f"of transformers', at most {check['limit']:.1e}"
        )
        if rounding := check.get("rounding"):
            text += f", or as near to its float64 as its float32: {rounding['ours']:.1e} and {rounding['theirs']:.1e}"
        yield _evidence(text, check["what"], "run logits error transformers weights checkpoint")
    if tokens := full.get("comparison", {}).get("tokens"):
        text = f"greedy tokens: {tokens['compared']} compared, {tokens['differing']} differ"
        yield _evidence(text, "greedy tokens differ same text output")
    if text := full.get("text"):
        yield _evidence(
            f"the text is {inline(text['verdict'])}: {inline(text['reason'])}",
            "text output perplexity coherent",
        )
    for name, value in full.get("settings", {}).items():
        yield _evidence(f"the run's {code(name)}: {code(value)}", name, value, "run ran")
    for fact in full.get("facts", []):
        yield _evidence(f"a fact of the run: {inline(fact)}", fact)


def _of_review(review: dict[str, Any]) -> Iterator[Evidence]:
    for item in review.get("items", []):
        lines = "; ".join(code(line) for line in item["evidence"][:2])
        text = f"review, {inline(item['title'])}: {inline(item['verdict'])}{f' ({lines})' if lines else ''}"
        yield _evidence(text, item["title"], "review")


def _lines_around(context: RunContext, said: Said) -> tuple[str, set[str]]:
    """Return the lines that a comment is about, as Markdown, and the names that stand there."""
    path = model_path(context)
    if said.place != "inline" or said.path.rsplit("/", 1)[-1] != path.name or not said.line:
        return "", set()
    lines = context.files.read(context.root / path).splitlines()
    first, last = max(said.first_line - _AROUND, 1), min(said.line + _AROUND, len(lines))
    name = class_at("\n".join(lines), said.line)
    where = f" (class {code(name)})" if name else ""
    shown = "\n".join(f"{number:>4}  {lines[number - 1]}" for number in range(first, last + 1))
    head = f"{code(f'{path.as_posix()}:{said.line}')}{where}:"
    return f"{head}\n\n{fenced(shown)}", words_of([name]) - _COMMON


def class_at(text: str, line: int) -> str:
    """Return the class of a file that has a line; "" where none has."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return ""
