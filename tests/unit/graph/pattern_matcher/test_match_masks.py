from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from onboard.graph.pattern_matcher.masks import MaskForm, mask_form
from tests.support.graph.harness import transform


class _Mask(nn.Module):
    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.formula(input_ids, position_ids)


def _distance(position_ids: Tensor) -> Tensor:
    return (position_ids[:, :, None] - position_ids[:, None, :])[:, None]


def _additive(allowed: Tensor) -> Tensor:
    return torch.where(allowed, torch.tensor(0.0), torch.finfo(torch.float32).min)


def _band(window: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda _, positions: (_distance(positions) >= 0) & (_distance(positions) < window)


def _triangle(input_ids: Tensor, position_ids: Tensor) -> Tensor:
    sequence = input_ids.shape[1]
    return torch.ones(sequence, sequence, dtype=torch.bool).tril()[None, None]


def _same(chunk: Tensor) -> Tensor:
    return (chunk[:, :, None] == chunk[:, None, :])[:, None]


def _chunks(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    def formula(_: Tensor, positions: Tensor) -> Tensor:
        chunk = positions // size
        return (_distance(positions) >= 0) & (chunk[:, :, None] == chunk[:, None, :])[:, None]

    return formula


def _cut_off(window: int) -> Callable[[Tensor, Tensor], Tensor]:
    """As transformers' Gemma 2 made the windows of its layers, from their common mask."""

    def formula(_: Tensor, positions: Tensor) -> Tensor:
        mask = _additive(_distance(positions) >= 0)
        gone = torch.tril(torch.ones_like(mask, dtype=torch.bool), diagonal=-window)
        return torch.where(gone, torch.finfo(torch.float32).min, mask)

    return formula


def _chunks_of_row(input_ids: Tensor, _: Tensor) -> Tensor:
    chunks = torch.arange(input_ids.shape[1]) // 8192
    return chunks.unsqueeze(1) == chunks


FORMS: list[tuple[str, Callable[[Tensor, Tensor], Tensor], MaskForm | None]] = [
    ("causal", lambda _, p: _distance(p) >= 0, MaskForm(True)),
    ("causal, from sizes", _triangle, MaskForm(True)),
    ("causal, additive", lambda _, p: _additive(_distance(p) >= 0), MaskForm(True)),
    (
        "causal, expanded over heads",
        lambda _, p: (_distance(p) >= 0).expand(-1, 4, -1, -1),
        MaskForm(True),
    ),
    ("everything", lambda _, p: _distance(p) == _distance(p), MaskForm(False)),
    ("later keys and near ones", lambda _, p: _distance(p) < 4096, None),
    ("window shorter than the probes", _band(5), MaskForm(True, 5)),
    ("window between the probes", _band(30), MaskForm(True, 30)),
    ("window longer than the probes", _band(4096), MaskForm(True, 4096)),
    (
        "window with its bound inside",
        lambda _, p: (_distance(p) >= 0) & (_distance(p) <= 4096),
        MaskForm(True, 4097),
    ),
    ("window cut off by a diagonal", _cut_off(4096), MaskForm(True, 4096)),
    ("short window cut off by a diagonal", _cut_off(7), MaskForm(True, 7)),
    ("two windows", lambda i, p: _band(4096)(i, p) & _band(512)(i, p), MaskForm(True, 512)),
    ("short chunks", _chunks(7), MaskForm(True, None, 7)),
    ("chunks between the probes", _chunks(30), MaskForm(True, None, 30)),
    ("long chunks", _chunks(8192), MaskForm(True, None, 8192)),
    ("chunks of two lengths", lambda i, p: _chunks(7)(i, p) & _chunks(5)(i, p), None),
    ("long chunks of two lengths", lambda i, p: _chunks(8192)(i, p) & _chunks(4096)(i, p), None),
    ("long chunks that see ahead", lambda _, p: _same(p // 8192), MaskForm(False, None, 8192)),
    (
        "long chunks in a window",
        lambda i, p: _chunks(8192)(i, p) & _band(4096)(i, p),
        MaskForm(True, 4096, 8192),
    ),
    ("short chunks in a window", lambda i, p: _chunks(7)(i, p) & _band(3)(i, p), None),
    ("long chunks in a short window", lambda i, p: _chunks(8192)(i, p) & _band(5)(i, p), None),
    ("long chunks of the row", _chunks_of_row, MaskForm(False, None, 8192)),
    ("not causal", lambda _, p: _distance(p) <= 0, None),
    ("padding", lambda i, p: (_distance(p) >= 0) & (i > 3)[:, None, None], None),
    ("a far token", lambda i, p: (_distance(p) >= 0) & (i != 50000)[:, None, None], None),
    (
        "far tokens of a table",
        lambda i, p: (
            (_distance(p) >= 0)
            & (i[..., None] != torch.tensor([50000, 50001])).all(-1)[:, None, None]
        ),
        None,
    ),
    (
        "sizes of ids",
        lambda i, p: torch.ones_like(i)[:, None, None].bool() & _triangle(i, p),
        MaskForm(True),
    ),
    ("bias", lambda _, p: _distance(p).float() * -0.1, None),
    (
        "heads that differ",
        lambda _, p: (_distance(p) >= 0) & (torch.arange(4).view(1, 4, 1, 1) != 2),
        None,
    ),
]


@pytest.mark.parametrize(
    ("formula", "form"), [pytest.param(*case[1:], id=case[0]) for case in FORMS]
)
def test_masks_are_known_by_what_they_allow(
    formula: Callable[[Tensor, Tensor], Tensor], form: MaskForm | None
) -> None:
    ids = torch.zeros(3, 11, dtype=torch.int64)
    inputs = {"input_ids": ids, "position_ids": torch.arange(11).expand(3, 11).contiguous()}
    gm = transform([], _Mask(formula), inputs).gm
    mask = gm.graph.output_node().args[0]

    assert isinstance(mask, torch.fx.Node)
    assert mask_form(gm, mask) == form


class _Table(nn.Module):
    """A table that attention cuts its mask out of: a band that is wider than short probes."""

    def __init__(self, window: int, hole: bool = False) -> None:
        super().__init__()
        table = torch.ones(120, 120, dtype=torch.bool).tril()
        table ^= table.tril(-window)
        if hole:
            table[100, 90] = False
        self.register_buffer("table", table[None, None], persistent=False)

    def mask(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        return self.table[:, :, length - length : length, :length]

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = input_ids[:, None, :, None].float().expand(-1, 2, -1, 4)
        return torch.ops.onboard.torch_attention(
            x, x, x, self.mask(input_ids), 0.0, True, 0.1, layout="bnsd"
        )


@pytest.mark.parametrize(
    ("window", "hole", "matches"), [(60, False, 1), (5, False, 1), (120, False, 1), (60, True, 0)]
)
def test_a_mask_cut_out_of_a_table_becomes_a_window(window: int, hole: bool, matches: int) -> None:
    model = _Table(window, hole)
    ids = torch.randint(9, (3, 90))
    inputs = {"input_ids": ids, "position_ids": torch.arange(90).expand(3, 90).contiguous()}
    result = transform(["match_attention_mask"], model, inputs)
    assert result.matches["match_attention_mask"] == matches
    assert bool(result.gm.graph.find_nodes(op="get_attr")) == hole
    torch.testing.assert_close(result.gm(**inputs), model(**inputs))
