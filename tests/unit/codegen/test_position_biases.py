"""Biases of attention that are linear in the key's position (ALiBi), in code that is translated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onboard.analysis.recognise.position_biases import deviation
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.testing.recorded_calls import alibi_slopes
from tests.unit.codegen.test_translate_attention import ALIBI, causal, run, translated

HIDDEN_PADDING = """        bias = (torch.arange(1 - s, 1).view(1, 1, 1, s) * slopes)
        there = torch.ones((b, s), dtype=torch.bool, device=x.device)
        bias = bias.masked_fill(~there.view(-1, 1, 1, s), -1e9).view(b * self.heads, 1, s)
"""


@torch.no_grad()
def test_a_mask_of_ones_that_code_makes_itself_hides_nothing(tmp_path: Path) -> None:
    start, end = ALIBI.index("        bias = ("), ALIBI.index("        scores =")
    text = ALIBI[:start] + HIDDEN_PADDING + ALIBI[end:]
    body, model = translated(text, tmp_path, alibi=True)
    assert "alibi_slopes=" in body
    assert "masked_fill" not in body
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(11))
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))
    with pytest.raises(Untranslatable, match="a bias of positions and its masked_fill"):
        translated(text.replace("~there", "there"), tmp_path, alibi=True)


CUT = """        if bias.size(-2) != s:
            bias = bias[..., -s:, :]
"""


@torch.no_grad()
def test_a_bias_that_is_cut_to_the_last_queries_keeps_its_slopes(tmp_path: Path) -> None:
    before = "        scores ="
    text = ALIBI.replace(before, CUT + before)
    body, model = translated(text, tmp_path, alibi=True, specialised=[])
    assert "alibi_slopes=" in body
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(12))
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))
    other = text.replace("[..., -s:, :]", "[..., ::2, :]")
    with pytest.raises(Untranslatable, match="a bias of positions and its size"):
        translated(other, tmp_path, alibi=True, specialised=[])


def test_a_rounded_bias_is_no_alibi(tmp_path: Path) -> None:
    with pytest.raises(Untranslatable, match="rounded to half precision"):
        translated(ALIBI.replace("* slopes)", "* slopes.bfloat16())"), tmp_path, alibi=True)


def test_a_bias_that_more_than_attention_reads_is_refused(tmp_path: Path) -> None:
    read = ALIBI.replace("        scores =", "        v = v + bias\n        scores =")
    with pytest.raises(Untranslatable, match="more than attention reads"):
        translated(read, tmp_path, alibi=True)


def test_a_linear_bias_is_recognised_and_its_slopes_are_read_back() -> None:
    slopes, keys = torch.tensor([0.5, 0.3, 0.7]), torch.arange(9.0)
    bias = (slopes[:, None, None] * keys).repeat(2, 1, 1)
    error = deviation(bias)
    assert error is not None
    assert error < 1e-6
    torch.testing.assert_close(alibi_slopes(bias), slopes)
    bent = deviation(slopes[:, None, None] * keys.square())
    assert bent is not None
    assert bent > 0.1
    assert deviation(keys.expand(3, 1, 9)) is None
    assert deviation(torch.ones(3, 2, 9)) is None
