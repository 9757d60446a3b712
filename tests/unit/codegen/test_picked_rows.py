"""Rows that are picked, computed and put in their places, are so too where all rows are computed."""

from __future__ import annotations

import ast
import random
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.analysis.recognise.recorder import ModuleCall
from onboard.codegen.translate.mechanisms.parts.picked_rows import PickedRows
from onboard.verify.block_outputs import rows_of_theirs

BY_PLACES = """
r, c = torch.where(chosen == 2)
if r.numel() > 0:
    y.index_add_(0, r, work(x[r]) * w[r, c, None])
"""
BY_PLACES_TURNED = """
c, r = torch.where((chosen == 2).T)
if not r.shape[0] == 0:
    made = work(x[r] * w[r, c].unsqueeze(-1))
    y[r] += made
"""
BY_ROWS = """
r = torch.nonzero(p[:, 2] > 0.5).squeeze(1)
if len(r):
    y[r] = y[r] + p[r, 2, None] * work(x.index_select(0, r))
"""
BY_TABLE = """
hit = (chosen == 2).nonzero(as_tuple=False)
if hit.size(0) != 0:
    y[hit[:, 0]] += work(x[hit[:, 0]]) * w[hit[:, 0], hit[:, 1]].unsqueeze(-1)
"""
BY_MASK = """
m = p[..., 2] > 0.5
if m.any():
    y[m] += p[m][:, 2:3] * work(x[m])
"""
REPLACED = """
m = (chosen == 2).any(dim=-1)
if m.sum() > 0:
    y[m] = work(x[m])
"""
NUMBERS = """
m = (x > 0.5) & (x[..., :1] < 0.7)
y[m] = work(x[m]) - y[m]
"""
FIRST_OF_TWO = """
r = torch.where(chosen == 2)[0]
y[r] = work(x[r]) * 2.0
"""
WAYS = {
    "places": BY_PLACES,
    "turned": BY_PLACES_TURNED,
    "rows": BY_ROWS,
    "table": BY_TABLE,
    "mask": BY_MASK,
    "replaced": REPLACED,
    "numbers": NUMBERS,
    "first of two": FIRST_OF_TWO,
}


def _dense(text: str) -> str | None:
    frame: Any = SimpleNamespace(
        translator=SimpleNamespace(specialised=True), kind="forward", fresh=lambda stem: stem
    )
    made = PickedRows().instead(ast.parse(text).body, frame)
    if made is None:
        return None
    return ast.unparse(ast.fix_missing_locations(ast.Module([*made], [])))


def _run(text: str, **given: Any) -> torch.Tensor:
    names = {key: x.clone() for key, x in given.items()}
    body = textwrap.indent(f"{text}\nreturn y", "    ")
    scope: dict[str, Any] = {"torch": torch, "work": lambda x: x.tanh() * 3 + 1}
    exec(f"def made({', '.join(names)}):\n{body}", scope)
    result: torch.Tensor = scope["made"](**names)
    return result


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("expert", [2, 9])
def test_all_rows_give_what_the_picked_ones_do(way: str, expert: int) -> None:
    """Of an expert that no token has (9), too."""
    seed = random.randrange(2**31)
    print(seed)
    generator = torch.Generator().manual_seed(seed)
    text = WAYS[way].replace("== 2", f"== {expert}")
    lead = (2, 7) if "..." in text else (14,)
    given = {
        key: torch.rand((*lead, size), generator=generator, dtype=torch.float64)
        for key, size in (("x", 5), ("y", 5), ("p", 4), ("w", 2))
    }
    given["chosen"] = torch.rand((*lead, 4), generator=generator).argsort(dim=-1)[..., :2]
    dense = _dense(text)
    assert dense is not None
    assert "nonzero" not in dense
    assert "if " not in dense
    torch.testing.assert_close(_run(dense, **given), _run(text, **given))


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("rows", ("if len(r):", "if len(r) > 1:")),
        ("rows", ("if len(r):", "if 0 < len(r) < 100:")),
        ("mask", ("if m.any():", "if m.all():")),
        ("mask", ("if m.any():", "if m.sum() > 1:")),
        ("mask", ("if m.any():", "if m.float().mean() > 0.5:")),
        ("rows", ("if len(r):", "if len(r) and w.sum() > 0:")),
        ("rows", ("work(x.index_select(0, r))", "work(x.index_select(0, r)) * len(r)")),
        ("places", ("w[r, c, None]", "w[r, c + 1, None]")),
        ("places", ("y.index_add_(0, r,", "y.index_add_(0, r // 2,")),
        ("table", ("work(x[hit[:, 0]])", "work(x[hit[:, 0]]) * hit.sum()")),
        ("replaced", ("y[m] = work(x[m])", "y[~m] = work(x[~m])")),
        ("replaced", ("y[m] = work(x[m])", "y[m] = 0.0")),
    ],
)
def test_what_is_done_otherwise_stays(way: str, change: tuple[str, str]) -> None:
    assert change[0] in WAYS[way]
    assert _dense(WAYS[way].replace(*change)) is None


def test_a_module_of_all_rows_is_compared_at_those_that_its_counterpart_got() -> None:
    seed = random.randrange(2**31)
    print(seed)
    layer = torch.nn.Linear(6, 4)
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(seed))
    some = x.flatten(0, 1)[[11, 3, 4]]
    with torch.no_grad():
        made, call = layer(x), ModuleCall((some,), {}, layer(some))
        found = rows_of_theirs((x,), made, call)
        assert found is not None
        torch.testing.assert_close(*found)
        made[1, 2] += 1  # row 11
        found = rows_of_theirs((x,), made, call)
    assert found is not None
    assert not torch.allclose(*found)
    assert rows_of_theirs((x + 1,), made, call) is None
    assert rows_of_theirs((some,), call.output, call) is None
