"""Convolutions of channels that are modules of torch's class themselves, with what a constructor notes
at them from outside.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
class Short(nn.Conv1d):
    def __init__(self, size, kernel):
        super().__init__(
            in_channels=size, out_channels=size, kernel_size=kernel, groups=size, bias=True,
            padding=kernel - 1, dilation=1,
        )

    def forward(self, x):
        x = x.transpose(1, 2)
        x = self._conv_forward(x, self.weight, self.bias)[..., CUT]
        return F.silu(x).transpose(1, 2)


def made(size, config):
    short = Short(size, 4)
    short._beside = config.norm_eps > 0
    short.times = config.num_attention_heads
    return short


def mixed(short, x):
    y = short(x)
    if short._beside:
        return x + short.times * y
    return y
"""
_MIXED = "x = mixed(self.rotary, x)\n" + ATTENTION.strip("\n")


def _found(folder: Path, cut: str) -> dict[str, object]:
    head = _HEAD.replace("CUT", cut)
    folder = save_odd(folder, head=head, attention=_MIXED)
    made = "made(config.hidden_size, config)"
    return dict(run_apart(GENERATE, [with_rotary(folder, made)])[folder.name])


def test_a_module_that_is_a_convolution_becomes_the_canonical_op(tmp_path: Path) -> None:
    found = _found(tmp_path / "odd_short", ":x.shape[-1]")
    assert found.get("error") is None, found["error"]
    assert float(str(found["worst"])) < 1e-5
    assert "torch_causal_conv1d(" in str(found["text"])
    assert "_conv_forward" not in str(found["text"])
    assert "def mixed(short: Short, " in str(found["text"])
    assert "._beside = config.norm_eps > 0" in str(found["text"])  # other configs may say otherwise


def test_one_that_looks_at_later_tokens_does_not(tmp_path: Path) -> None:
    found = _found(tmp_path / "odd_later", "1:x.shape[-1] + 1")
    assert "torch_causal_conv1d" not in str(found.get("text"))
    assert "error" in found
