"""Lists and dicts that modules, functions and loops change by their methods, slices and `del`: whoever
has them has what becomes of them.
"""

from __future__ import annotations

import pytest

from tests.support.given_objects import BLOCK, save_given
from tests.support.odd_code import GENERATE, assert_translated, run_apart

_MODEL = """
x, angles = self.embed(input_ids), angles_of(position_ids, self.config)
rotary, given = Rotary(angles.cos(), angles.sin()), {made}
{body}
return self.norm({read})
"""
_LAYERS = "for layer in self.layers:\n    x = layer(x, rotary, given)"
_BEFORE = BLOCK.replace("return x +", "x = x +")
_ALL = "torch.stack(given).mean(0) + x"
_STATE = "@dataclass\nclass State(Rotary):\n    total: Any = 0.0"
_WEIGHTS = """
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
weights = F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)
given['all'].append(weights)
y = weights @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""
_SIZE = "x.norm(dim=-1, keepdim=True)"


def _by_block(made: str, read: str, end: str, begin: str = "") -> dict[str, str]:
    """Return a model whose blocks change what they are given."""
    model = _MODEL.format(made=made, body=_LAYERS, read=read)
    block = f"{begin}\n{_BEFORE}\n{end}\nreturn x"
    return {"model": model, "block_taken": "given, states", "block": block}


def _by_model(made: str, read: str, turn: str, end: str = "pass") -> dict[str, str]:
    """Return a model that changes what is its own."""
    body = f"for layer in self.layers:\n    x = layer(x, rotary)\n    {turn}\n{end}"
    return {"model": _MODEL.format(made=made, body=body, read=read)}


FORMS: dict[str, dict[str, str]] = {
    "inserted": _by_block("[x]", f"given[0] + {_ALL}", "states.insert(0, x)"),
    "popped_and_put_back": _by_block(
        "[x]", "given[-1] + x", "states.append(x * 0.5)", "x = x + states.pop()"
    ),
    "as_many_as_two": _by_block(
        "[x]", _ALL, "states.append(x)\nif len(states) > 2:\n    states.pop(0)"
    ),
    "several": _by_block("[]", _ALL, "states.extend([x, x * 0.5])"),
    "of_a_slice": _by_block("[x, x * 0.5]", "given[0] + given[-1] + x", "states[:1] = [x]"),
    "emptied": _by_block("[x, x]", _ALL, "states.clear()\nstates.append(x)"),
    "turned_round": _by_block("[x]", "given[0] + x", "states.append(x)\nstates.reverse()"),
    "deleted": _by_block("[x, x * 0.5]", _ALL, "del states[0]\nstates.append(x)"),
    "changed_places": _by_block("[x * 0.5]", "given[0] + x", "x, states[-1] = x + states[-1], x"),
    "list_in_two": _by_block(
        "[[], []]",
        "sum(given[0]) * 0.1 + given[1][0] + x",
        "states[0].append(x)\nstates[1].extend([x, x])",
    ),
    "first_lists": _by_block(
        "{}", "torch.stack(given['all']).mean(0) + x", "states.setdefault('all', []).append(x)"
    ),
    "first_numbers": _by_block(
        "{}",
        "given['sum'] / given['n'] + x",
        "states.setdefault('n', 0)\nstates.setdefault('sum', 0.0)\nstates['n'] += 1\n"
        f"states['sum'] = states['sum'] + {_SIZE}",
    ),
    "first_of_a_number": _by_block(
        "{}", "given[0] + given[1] + x", "states.setdefault(self.index % 2, x)"
    ),
    "by_words": _by_block(
        "{'sum': 0.0, 'n': 0}",
        "given['sum'] / given['n'] + x",
        f"states.update(sum=states['sum'] + {_SIZE}, n=states['n'] + 1)",
    ),
    "joined": _by_block(
        "{'sum': 0.0}", "given['sum'] + x", f"states |= {{'sum': states['sum'] + {_SIZE}}}"
    ),
    "taken_out": _by_block(
        "{'first': x * 0.5}",
        "given.get('first', x) + given['last']",
        "states['last'] = x",
        "if 'first' in states:\n    x = x + states.pop('first')",
    ),
    "entry_deleted": _by_block(
        "{'first': x * 0.5, 'last': x}",
        "given.get('first', x) + given['last']",
        "states['last'] = x",
        "if 'first' in states:\n    x = x + states['first']\n    del states['first']",
    ),
    "tuple_of_an_object": {
        "head": "@dataclass\nclass State(Rotary):\n    states: tuple = ()",
        "model": _MODEL.format(
            made="State(angles.cos(), angles.sin())",
            body="for layer in self.layers:\n    x = layer(x, given)",
            read="torch.stack(given.states).mean(0) + x",
        ),
        "block": f"{_BEFORE}\ngiven.states += (x,)\nreturn x",
    },
    "objects_of_layers": {
        "head": _STATE,
        "model": _MODEL.format(
            made="[State(angles.cos(), angles.sin(), x * 0.0) for _ in self.layers]",
            body="for i, layer in enumerate(self.layers):\n    x = layer(x, given[i])",
            read="x + sum(one.total for one in given)",
        ),
        "block": f"{_BEFORE}\ngiven.total = given.total + {_SIZE}\nreturn x",
    },
    "object_of_a_number": {
        "head": _STATE,
        "model": _MODEL.format(
            made="[State(angles.cos(), angles.sin(), x * 0.0) for _ in self.layers]",
            body=_LAYERS,
            read="x + given[0].total + given[-1].total",
        ),
        "block_taken": "given, states",
        "block": f"state = states[self.index]\n{_BEFORE}\n"
        f"state.total = state.total + {_SIZE}\nreturn x",
    },
    "dicts_in_a_dict": _by_block(
        "{'all': {}}",
        "given['all'][0]['x'] + given['all'][1]['x']",
        "states['all'][self.index] = {'x': x, 'n': self.index}",
    ),
    "entry_that_nobody_reads": {
        "model": _MODEL.format(
            made="{'cos': angles.cos(), 'sin': angles.sin(), 'all': [], 'sum': 0.0}",
            body="for layer in self.layers:\n    x = layer(x, given)",
            read="x + given['sum']",
        ),
        "turn": f"q, k = (rotate(y, given['cos'], given['sin']) for y in (q, k))\n{_WEIGHTS}",
        "block": f"{_BEFORE}\ngiven['sum'] += {_SIZE}\nreturn x",
    },
    "own_history": _by_model(
        "[x]", _ALL, "given.insert(0, x)\n    if len(given) > 3:\n        given.pop()"
    ),
    "own_without_last": _by_model("[x]", f"given[-1] + {_ALL}", "given.append(x)", "given.pop()"),
}
_OF_ONE = "[State(angles.cos(), angles.sin())]"
_KINDS = "for kind in kinds:\n    x = x * (0.5 if kind == 'a' else 1.5)"
FORMS |= {
    "object_in_a_list": {
        "head": _STATE,
        "model": _MODEL.format(made=_OF_ONE, body=_LAYERS, read="given[0].total + x"),
        "block_taken": "given, states",
        "block": f"{_BEFORE}\nstates[0].total = states[0].total + {_SIZE}\nreturn x",
    },
    "constant_removed": _by_model(
        "['a', 'skip', 'b']",
        "x / len(given)",
        "pass",
        f"given.remove('skip')\nkinds = given\n{_KINDS}",
    ),
    "constants_sorted": _by_model(
        "[3, 1, 2]",
        "x",
        "pass",
        "given.sort()\nfor i, step in enumerate(given):\n    x = x + step * i",
    ),
    "constants_sorted_backwards": _by_model(
        "[3, 1, 2]",
        "x",
        "pass",
        "given.sort(reverse=True)\nfor i, step in enumerate(given):\n    x = x + step * i",
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("containers")
    return run_apart(GENERATE, [save_given(folder / key, form) for key, form in FORMS.items()])


@pytest.mark.parametrize("name", [*FORMS])
def test_who_has_it_has_what_becomes_of_it(name: str, found: dict[str, dict[str, object]]) -> None:
    assert_translated(found[name])
