"""Generated files beside what a person writes: the same model, and not much longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboard.analysis.analyze import analyze
from onboard.codegen.format import format_python
from onboard.codegen.hints.unhinted_text import without_hints
from onboard.verify.blocks import prove
from onboard.workflow.zoo import load_zoo
from tests.support import hand_written

ROOT = Path(__file__).parents[3]
FAMILIES = ("qwen3", "deepseek_v3", "mamba2")
LONGER = 1.3
"""How many times the lines of a hand-written file a generated one may have, without what it says of
several ranks: no file by hand says anything of them.
"""


def _by_hand(family: str) -> str:
    folder = Path(hand_written.__file__).parent
    return (folder / f"modeling_{family}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_by_hand_is_the_model(family: str) -> None:
    models = load_zoo(ROOT)[family]
    name, fields = next(iter(models.items()))
    spec = analyze({"model_type": family, **fields}, model=name)
    proofs = prove(_by_hand(family), spec, export=False)
    assert proofs[-1].path == ""  # the logits


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_files_are_not_much_longer(family: str) -> None:
    generated = (ROOT / "models" / f"modeling_{family}.py").read_text(encoding="utf-8")
    by_hand = _by_hand(family)
    assert format_python(by_hand) == by_hand
    assert format_python(generated) == generated
    assert _lines(without_hints(generated)) <= LONGER * _lines(by_hand)


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())
