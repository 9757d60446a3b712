"""Dicts whose entries come to be when they are read, and lists in a dict of a forward's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_HEAD = "import collections\nfrom collections import defaultdict"
_MODEL = """
x = self.embed(input_ids)
{made}
for index, layer in enumerate(self.layers):
    x = layer(x, position_ids)
{turn}
return self.norm(x)
"""
FORMS = {
    "lists": ("seen = defaultdict(list)", ["seen['h'].append(x)", "x = x + 0.1 * seen['h'][0]"]),
    "before": (
        "out = collections.defaultdict(list)\nout['first'].append(x)",
        ["out['all'].append(x)", "x = torch.stack(out['all']).mean(0) + out['first'][0]"],
    ),
    "numbers": ("count = defaultdict(int)\ncount['n'] += 2", ["x = x * (1.0 / count['n'])"]),
    "made": (
        "total = defaultdict(lambda: 0.5)",
        ["total['s'] = total['s'] + x", "x = x + total['s']"],
    ),
    "asked": (
        "seen = defaultdict(float)\nx = x + seen['a'] + 2.0 * ('b' in seen) + len(seen)",
        ["x = x + 0.1"],
    ),
    "lists_in_a_dict": (
        "out = {'all': [], 'one': []}\nout['one'].append(x)",
        ["out['all'].append(x)", "x = x + torch.stack(out['all']).mean(0) * out['one'][0]"],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder: Path = tmp_path_factory.mktemp("default_dicts")
    folders = []
    for key, (made, turn) in FORMS.items():
        body = _MODEL.replace("{made}", made)
        inside = "\n".join(f"    {line}" for line in turn)
        folders.append(save_odd(folder / key, head=_HEAD, model=body.replace("{turn}", inside)))
    return run_apart(GENERATE, folders)


@pytest.mark.parametrize("name", [*FORMS])
def test_they_are_dicts_that_have_their_entries(
    name: str, found: dict[str, dict[str, object]]
) -> None:
    assert_translated(found[name])
    assert "defaultdict" not in str(found[name]["text"])
