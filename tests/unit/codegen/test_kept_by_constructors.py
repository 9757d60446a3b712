"""What constructors make of packages that are not installed and no forward for text asks for, and
constructors that insist on one whose functions have a form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
from functools import partial
from nobody_has_vision import Scaled, Towers, transforms

def images(size):
    return transforms.Compose([transforms.Resize((size, size)), transforms.ToTensor()])


class Holder:
    def __init__(self, size):
        self.images = Scaled(size)
"""
_KEPT = {
    "composed": "transforms.Compose([transforms.Resize(4), transforms.ToTensor()])",
    "helped": "images(4)",
    "partly": 'partial(Scaled, 4)().to("cpu")',
    "tabled": '{"train": [Scaled(size) for size in (3, 4)], "test": Scaled(3)}',
    "held": "Holder(4)",
}
_TRIED = """
try:
    from causal_conv1d import causal_conv1d_fn
except ImportError:
    causal_conv1d_fn = None
"""
_CONVOLUTION = """

class Convolution(nn.Module):
    def __init__(self, size):
        super().__init__()
        assert causal_conv1d_fn is not None
        self.conv = nn.Conv1d(size, size, 3, groups=size, padding=2)

    def forward(self, x):
        weight, bias = self.conv.weight.squeeze(1), self.conv.bias
        return causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)
"""
_REFUSED = {"used": "Scaled(config.hidden_size)", "in_a_list": "nn.ModuleList([Towers(4)])"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base: Path = tmp_path_factory.mktemp("kept")
    asked = ATTENTION.replace("b, t, _ = x.shape", "x = self.rotary(x)\nb, t, _ = x.shape")
    folders = [
        with_rotary(
            save_odd(base / name, head=_HEAD, attention=asked if name == "used" else ATTENTION),
            made,
        )
        for name, made in (_KEPT | _REFUSED).items()
    ]
    convolved = ATTENTION.replace("b, t, _ = x.shape", "x = x + self.rotary(x)\nb, t, _ = x.shape")
    odd = save_odd(base / "insisting", head=_TRIED + _CONVOLUTION, attention=convolved)
    folders.append(with_rotary(odd, "Convolution(config.hidden_size)"))
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("name", _KEPT)
def test_what_is_kept_and_not_asked_is_left_out(found: dict[str, Any], name: str) -> None:
    assert found[name].get("worst", 1.0) < 1e-5, found[name].get("error")
    assert "nobody_has_vision" not in found[name]["text"]


@pytest.mark.parametrize(("name", "leaf"), [("used", "Scaled"), ("in_a_list", "Towers")])
def test_what_is_asked_is_refused_by_its_name(found: dict[str, Any], name: str, leaf: str) -> None:
    said = f"the model's code uses nobody_has_vision.{leaf}, which is not here"
    assert said in found[name]["error"]
    assert "pip install nobody-has-vision" in found[name]["error"]


def test_a_constructor_insists_on_what_has_a_form(found: dict[str, Any]) -> None:
    made = found["insisting"]
    assert made.get("worst", 1.0) < 1e-5, made.get("error")
    assert any("has causal_conv1d_fn all the same" in fact for fact in made["facts"])
