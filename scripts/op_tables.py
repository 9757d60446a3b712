"""The tables of ops in docs/architecture.md and in the docstring of onboard/ops, written from the
registrations.

`python scripts/op_tables.py` writes them anew; a test says when that has to be done.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import onboard.ops  # noqa: F401  (registers)
from onboard.ops import canonical_ops
from onboard.ops.library import forms_of, op_sources

ROOT = Path(__file__).resolve().parents[1]
_MARK = r"(<!-- {0} -->\n).*?(<!-- end -->)"
_DOCSTRING = r"(registers them all\.\n\n).*?(\nA folder holds)"


def written() -> dict[Path, str]:
    """Return the text that each of the files is to have."""
    page = ROOT / "docs" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    for name, table in _TABLES.items():
        text = _replaced_between(_MARK.format(name), table(), text)
    package = ROOT / "onboard" / "ops" / "__init__.py"
    return {
        page: text,
        package: _replaced_between(_DOCSTRING, _by_module(), package.read_text(encoding="utf-8")),
    }


def _replaced_between(marks: str, new: str, text: str) -> str:
    made, places = re.subn(marks, lambda found: f"{found[1]}{new}{found[2]}", text, flags=re.DOTALL)
    assert places == 1, marks
    return made


def _canonical() -> str:
    rows = (
        (f"`{name}`", _signature(name), _meaning(name))
        for name in _shipped()
        if name in canonical_ops()
    )
    return _table(("op", "arguments", "what it computes"), rows)


def _inserted() -> str:
    names = (name for name in _shipped() if op_sources()[name].inserted)
    rows = ((f"`{name}`", _signature(name), _meaning(name), _others(name)) for name in names)
    return _table(("op", "arguments", "what it computes", "other back ends"), rows)


def _cached() -> str:
    names = (
        name for name in _shipped() if op_sources()[name].mutates and name.startswith("torch_")
    )
    rows = (
        (
            f"`{name}`",
            _replaced(name),
            "; ".join(_cache(name, each) for each in op_sources()[name].mutates),
            _others(name),
        )
        for name in names
    )
    return _table(("op", "takes the place of", "caches of a layer", "other back ends"), rows)


_TABLES: dict[str, Callable[[], str]] = {
    "canonical ops": _canonical,
    "inserted ops": _inserted,
    "cached ops": _cached,
}


def _by_module() -> str:
    modules: dict[str, list[str]] = defaultdict(list)
    for name in _shipped():
        modules[op_sources()[name].module.removeprefix("onboard.ops.")].append(name)
    rows = (
        (f"`{module.replace('.', '/')}.py`", ", ".join(f"`{name}`" for name in names))
        for module in sorted(modules)
        for names in _by_twos(modules[module])
    )
    return _table(("file", "ops"), rows)


def _by_twos(names: list[str]) -> list[list[str]]:
    """Cut a list so that a row of it fits a line."""
    return [names[start : start + 2] for start in range(0, len(names), 2)]


def _shipped() -> list[str]:
    """The ops of the core: those of experiments are there when their transforms are."""
    return [
        name
        for name, source in sorted(op_sources().items())
        if source.module.startswith("onboard.ops.")
    ]


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def _signature(name: str) -> str:
    arguments = getattr(torch.ops.onboard, name).default._schema.arguments
    return ", ".join(
        f"{each.name}={each.default_value!r}" if each.has_default_value() else each.name
        for each in arguments
    )


def _docstring(name: str) -> str:
    return inspect.getdoc(op_sources()[name].function) or ""


def _meaning(name: str) -> str:
    """The first paragraph of an op's docstring."""
    first = " ".join(_docstring(name).partition("\n\n")[0].split())
    return first.rstrip(".").replace("|", "\\|")


def _others(name: str) -> str:
    """The back ends of an op beside torch."""
    forms = forms_of(name) if name.startswith("torch_") else {}
    return ", ".join(
        f"`{other}`"
        for other in sorted(forms.values())
        if other != name and op_sources()[other].ships
    )


def _replaced(name: str) -> str:
    return f"`{canonical}`" if (canonical := op_sources()[name].cached_form_of) else ""


def _cache(name: str, argument: str) -> str:
    """A cache with what the docstring says first of it."""
    line = rf"^ +(?:\w+, )*{argument}(?:, \w+)*: (.*?)(?:, written to)?(?:[:;.]|$)"
    found = re.search(line, _docstring(name), re.MULTILINE)
    return f"`{argument}`: {found[1]}" if found and found[1] else f"`{argument}`"


if __name__ == "__main__":
    for path, new in written().items():
        path.write_text(new, encoding="utf-8")
