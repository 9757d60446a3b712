"""What Python's own functions make of lists and tuples whose items are known: counts, dicts of pairs,
products and sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_HEAD = """
import itertools
from collections import Counter, OrderedDict, defaultdict
from itertools import chain, product

KINDS = ["wide", "thin", "wide"]
WEIGHTS = [0.5, 0.25, 0.125]
PAIRS = (("wide", 0.5), ("thin", 0.25))
"""
_END = """
x = x + self.attn(self.norm1(x), position_ids)
return x + factor * self.mlp(self.norm2(x))
"""
FORMS = {
    "counted": "factor = 1.0 / Counter(KINDS)['wide']",
    "most_frequent": "(kind, count), = Counter(KINDS).most_common(1)\nfactor = 1.0 / count",
    "of_pairs": "factor = dict([('wide', x.tanh()), ('thin', 0.5)])['wide']",
    "of_pairs_in_order": "factor = sum(OrderedDict(PAIRS).values())",
    "in_a_row": "factor = sum(a * b for a, b in chain([(2.0, 0.5)], PAIRS[:0], [(0.1, 3.0)]))",
    "products": "factor = 0.0\nfor i, j in product((1, 2), range(2)):\n    factor = factor + i * j",
    "sums": "ends = [*itertools.accumulate([1, 2, 3])]\nfactor = ends[-1] / ends[1]",
    "over_a_list_of_the_file": (
        "counts = defaultdict(int)\nfor kind in KINDS:\n    counts[kind] += 1\n"
        "factor = 1.0 / counts['wide']"
    ),
    "over_pairs_of_the_file": (
        "factor = {}\nfor kind, size in PAIRS:\n    factor[kind] = size * 0.5\n"
        "factor = factor['thin'] + factor['wide']"
    ),
    "one_of_a_list_of_the_file": (
        "kind = KINDS[self.index % len(KINDS)]\nfactor = 0.5 if kind == 'wide' else 2.0\n"
        "factor = factor + WEIGHTS[self.index % 3]"
    ),
    "weights_of_the_file": "factor = sum(w * y for w, y in zip(WEIGHTS, [x, x.tanh(), x.sin()]))",
    "pairs_in_pairs": (
        "factor = x\nfor (a, b), c in zip([(x, x.tanh())], [0.5]):\n    factor = factor + a * b * c"
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("gathered")
    folders = [
        save_odd(folder / key, head=_HEAD, block=f"{begin}\n{_END}") for key, begin in FORMS.items()
    ]
    folders.append(save_odd(folder / "named_in_a_row", head=_HEAD, block=_SEQUENCE))
    path = folders[-1] / "modeling_odd.py"
    text = path.read_text()
    path.write_text(text.replace("        self.index = index\n", _MADE, 1))
    return run_apart(GENERATE, folders)


_MADE = """        self.index, size = index, config.hidden_size
        self.post = nn.Sequential(
            OrderedDict([("fc", nn.Linear(size, size)), ("act", nn.GELU()), ("out", nn.Linear(size, size))])
        )
"""
_SEQUENCE = """
x = x + self.attn(self.norm1(x), position_ids)
return x + self.post(self.mlp(self.norm2(x)))
"""


@pytest.mark.parametrize("name", [*FORMS, "named_in_a_row"])
def test_it_is_read(name: str, found: dict[str, dict[str, object]]) -> None:
    assert_translated(found[name])


def test_modules_keep_their_names(found: dict[str, dict[str, object]]) -> None:
    assert '("fc", nn.Linear(' in str(found["named_in_a_row"]["text"])
