"""No model whose code does something else beyond what the tool tries becomes a proven one that is
wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onboard.testing import fresh_seed
from tests.support.mutation.fooling import CASES, Fool, drawn, examine
from tests.support.mutation.mutants import PACKAGE

SEEN_LATE = {
    "base": "right",
    "a2 rope by position": "refused at prove: model.rotary_emb",
    "a6b length 128": "refused at prove: the code of LlamaForCausalLM takes another path unless length <= 128",
    "a6c exact length": "refused at prove: logits [1, 200] (LlamaForCausalLM) differs",
    "a8 log-n table sliced by the cache": "refused at run: aten.slice in model.layers.0.self_attn mixes the tokens",
    "c11 eps of a layer": "refused at prove: model.norm (LlamaRMSNorm) differs",
    "c12 norm behind token 20": "right in prefill and decode, and named: transformers' cached decode",
    "c13b norm in slices of 600": "refused at prove: model.layers.0.input_layernorm (LlamaRMSNorm) differs",
    "c13c norm of texts of 600": "refused at prove: logits [1, 600] (LlamaForCausalLM) differs",
    "d1 several rows": "refused at analyze: LlamaForCausalLM gives a text other logits in a batch than alone",
    "f1 cached": "right in prefill and decode, and named: transformers' cached decode differs from its prefill",
    "f2 counted in steps": "right in prefill and decode, and named: transformers' cached decode",
    "g1 short texts in a late layer": "refused at prove: exported logits [1, 2] (LlamaForCausalLM)",
}
"""Cases of each kind that were once proven and wrong, and what becomes of them."""
DRAWN = int(os.environ.get("ONBOARD_FOOLS", "2"))
DRAWN_OF_ALL = int(os.environ.get("ONBOARD_FOOLS", "40"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that mutated modules can be imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.parametrize("name", SEEN_LATE)
def test_what_was_passed_once_is_not_passed_again(name: str, folder: Path) -> None:
    (fool,) = (case for case in CASES if case.name == name)
    assert examine(fool, folder, fresh_seed()).startswith(SEEN_LATE[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fool", [case for case in CASES if case.name not in SEEN_LATE], ids=lambda fool: fool.name
)
def test_every_fooling_model_is_refused_or_right(fool: Fool, folder: Path) -> None:
    print(examine(fool, folder, fresh_seed()))


def test_drawn_models_are_refused_or_right(folder: Path) -> None:
    _examine_drawn(folder, DRAWN)


@pytest.mark.exhaustive
def test_many_drawn_models_are_refused_or_right(folder: Path) -> None:
    _examine_drawn(folder, DRAWN_OF_ALL)


def _examine_drawn(folder: Path, number: int) -> None:
    seed = fresh_seed()
    for each in range(seed, seed + number):
        fool = drawn(each)
        print(f"{fool.name}: {examine(fool, folder, each)}")
