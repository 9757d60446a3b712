"""What a forward computes, puts into a list or a dict of its own and reads more than once is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_ATTENTION, _MLP = "self.attn(self.norm1(x), position_ids)", "self.mlp(self.norm2(x + {}))"
_OBJECT = """
class State:
    def __init__(self):
        self.kept, self.items = {}, []
"""


def _block(begin: str, entry: str, other: str, last: str = "") -> str:
    """Return a block that reads what `begin` and `other` put into something twice."""
    return (
        f"{begin}\n{other.replace('MLP', _MLP.format(entry))}\nreturn x + {entry} * 0.5 + {entry}"
        f"{last and ' + '}{last}"
    ).replace("ATTN", _ATTENTION)


FORMS = {
    "entries": _block(
        "kept = {}\nkept['attn'] = ATTN", "kept['attn']", "kept['mlp'] = MLP", "kept['mlp']"
    ),
    "items": _block("kept = []\nkept.append(ATTN)", "kept[0]", "kept.append(MLP)", "kept[1]"),
    "more_items": _block(
        "kept = [x]\nkept.extend([ATTN, x])", "kept[1]", "kept += [MLP]", "kept[-1] + kept[-1]"
    ),
    "listed_entries": _block(
        "kept = {'mlp': []}\nkept.setdefault('attn', []).append(ATTN)",
        "kept['attn'][0]",
        "kept['mlp'].append(MLP)",
        "kept['mlp'][-1]",
    ),
    "updated": _block(
        "kept = dict(first=x)\nkept.update(attn=ATTN)",
        "kept['attn']",
        "kept.update({'mlp': MLP})",
        "sum(kept.values())",
    ),
    "of_an_object": _block(
        "state = State()\nstate.kept['attn'] = ATTN",
        "state.kept['attn']",
        "state.items.append(MLP)",
        "state.items[0] + state.items[0]",
    ),
    "of_each_layer": _block(
        "kept = []\nif self.index % 2:\n    kept.append(ATTN)\nelse:\n    kept.append(x.tanh())",
        "kept[0]",
        "kept.append(MLP)",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("read_twice")
    forms = [save_odd(folder / key, head=_OBJECT, block=body) for key, body in FORMS.items()]
    return run_apart(GENERATE, forms)


@pytest.mark.parametrize("name", [*FORMS])
def test_it_is_computed_once(name: str, found: dict[str, dict[str, object]]) -> None:
    assert_translated(found[name])
    text = str(found[name]["text"])
    assert text.count("self.attn(") == 1
