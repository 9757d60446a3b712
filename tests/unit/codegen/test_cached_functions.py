"""Functions that keep what they gave (`lru_cache`), and what only a recording can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_BLOCK = "x = x + self.attn(self.norm1(x), position_ids)\n{}\nreturn x + self.mlp(self.norm2(x))"
CACHED = {
    "number": (
        "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef scale_of(size):\n    return size**-0.5",
        "x = x * (1 + scale_of(x.shape[-1]))",
    ),
    "table": (
        "from functools import lru_cache\n@lru_cache\ndef ramp(size, base=10.0):\n"
        "    return torch.arange(size).float() / base",
        "x = x + ramp(x.shape[-1]) + ramp(x.shape[-1], base=3.0)",
    ),
    "list": (
        "import functools\n@functools.cache\ndef gains(n):\n    return [1.0 / (i + 1) for i in range(n)]",
        "for g in gains(3):\n    x = x * (1 + g)",
    ),
    "of_the_layer": (
        "import functools\n@functools.lru_cache(maxsize=8)\ndef gain(i):\n    return 0.8 - 0.6 * math.exp(-0.3 * i)",
        "x = x * gain(self.index)",
    ),
}
RECORDED = {
    "chain": (
        "import itertools",
        "for y in itertools.chain.from_iterable([[x * 2], [x + 1]]):\n    x = x + y",
    ),
}
_QUEUE = """
x, last = self.embed(input_ids), deque(maxlen=2)
for layer in self.layers:
    last.append(layer(x, position_ids))
    x = x + last[0]
return self.norm(x)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("cached")
    forms = (CACHED | RECORDED).items()
    folders = [
        save_odd(folder / key, head=head, block=_BLOCK.format(x)) for key, (head, x) in forms
    ]
    folders.append(save_odd(folder / "deque", head="from collections import deque", model=_QUEUE))
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("name", [*CACHED])
def test_they_are_written_as_functions(name: str, found: dict[str, dict[str, object]]) -> None:
    assert_translated(found[name])
    assert "cache" not in str(found[name]["text"]).partition("class Block")[2].partition("class")[0]


@pytest.mark.parametrize("name", [*RECORDED])
def test_what_has_no_translation_is_recorded(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    made = found[name]
    assert "error" not in made, made
    assert "Block" in made["recorded"]  # type: ignore[operator]
    assert made["worst"] < 1e-5  # type: ignore[operator]


def test_a_deque_that_a_loop_fills_is_refused_by_its_name(
    found: dict[str, dict[str, object]],
) -> None:
    assert "cannot translate OddForCausalLM: a deque at modeling_odd.py:9" in str(found["deque"])
