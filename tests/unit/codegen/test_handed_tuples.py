"""Code that asks whether it was given a tuple takes the branch that it takes in the repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.printer import print_block
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

HELPERS = """
def first(x):
    if isinstance(x, tuple):
        return x[0] * 2
    return x * 3


def of_list(x):
    if isinstance(x, list):
        return x[0] * 2
    return x[1] * 3


def both(x):
    y = x.exp()
    return y, y * y


def two_or_three(x):
    if x.sum() > 9:
        return x + 1, x * 2, x
    return x + 1, x * 2


def two_or_one(x):
    if x.sum() > 0:
        return x + 1, x * 2
    return x * 5


def one_with_none(x):
    if x.sum() > 0:
        return x + 1, x * 2
    return x, None


def one_with_pair(x):
    if x.sum() > 0:
        return x + 1, (x * 2, x)
    return x, x * 7


def second(pair):
    return pair[1] if pair[1] is not None else pair[0] * 3


def of_pair(pair):
    return pair[1][1] if isinstance(pair[1], tuple) else pair[1] * 3
"""
TOY = """

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = config.scale

    def forward(self, x):
        x = x * self.scale
"""
BODIES = {
    "an argument": "return first((x, x + 1)) + first(x)",
    "a list as an argument": "return of_list([x, x + 1]) + of_list((x, x + 1))",
    "a result": "return x * 2 if isinstance(both(x), tuple) else x",
    "a result that is stored": """
y = both(x)
return y[0] if isinstance(y, (tuple, list)) else y
""",
    "a result that is no tensor": """
y = both(x)
return y[0] if not isinstance(y, torch.Tensor) else y
""",
    "results of two lengths": """
y = two_or_three(x)
return y[0] if isinstance(y, tuple) else x * 9
""",
    "a tuple or a tensor": """
y = two_or_one(x)
return y[0] if isinstance(y, tuple) else y * 9
""",
    "an expression of two": """
y = (x, x * 2) if x.sum() > 0 else x * 5
if isinstance(y, tuple):
    return y[1]
return y
""",
    "tuples of two branches": """
if x.sum() > 0:
    y = (x, x * 2)
else:
    y = (x * 3, x)
return y[1] if isinstance(y, tuple) else x * 9
""",
    "a tuple on one branch": """
if x.sum() > 0:
    y = (x, x * 2)
else:
    y = x * 3
return y[1] if isinstance(y, tuple) else y * 9
""",
    "what a loop hands on": """
y = x
for _ in range(3):
    y = two_or_one(y)
    if isinstance(y, tuple):
        y = y[1]
return y
""",
    "a list": """
y = [x, x * 2]
return y[1] if isinstance(y, tuple) else x * 9
""",
    "an item of a dict": """
kept = {"a": (x, x + 2)}
return kept["a"][0] if isinstance(kept["a"], tuple) else x * 9
""",
    "an item of a list": """
kept = []
for index in range(2):
    kept.append((x, x * 2))
y = kept[-1]
return y[1] if isinstance(y, tuple) else x * 9
""",
    "parts of a tensor": """
y = x.chunk(2, -1)
return y[0] if isinstance(y, tuple) else y
""",
    "a part that may be None": """
y = one_with_none(x)
return y[-1] if y[-1] is not None else y[0] * 3
""",
    "a part that may be a tuple": """
y = one_with_pair(x)
return y[1][1] if isinstance(y[1], tuple) else y[1] * 3
""",
    "an argument whose part may be None": """
return second((x, x * 2)) + second((x, None))
""",
    "an argument whose part is a tuple": """
return of_pair((x, (x, x * 2)))
""",
    "an argument with a part that may be None": """
y = one_with_none(x)
return second(y)
""",
    "a part that is None on one branch": """
if x.sum() > 0:
    y = (x, x * 2)
else:
    y = (x * 3, None)
return y[1] if y[1] is not None else x * 9
""",
    "a part that is a tuple on one branch": """
if x.sum() > 0:
    y = (x, (x, x * 2))
else:
    y = (x * 3, x)
return y[1][1] if isinstance(y[1], tuple) else y[1] * 9
""",
    "an expression of two whose part may be None": """
y = (x, x * 2) if x.sum() > 0 else (x * 5, None)
return y[1] if y[1] is not None else y[0]
""",
    "what a loop leaves None": """
y = x
for _ in range(3):
    z = x if y is None else y * 2
    y = None if z.sum() > 9 else z
return x * 7 if y is None else y
""",
    "unpacked with a part that may be None": """
y = (x, None) if x.sum() > 0 else (x, x)
a, b = y
return a * 3 if b is None else b
""",
    "an item of a list whose part is None": """
kept = []
for index in range(2):
    kept.append((x, None) if x.sum() > 0 else (x, x))
y = kept[-1]
return y[1] if y[1] is not None else x * 9
""",
    "an item of a list that is None": """
kept = []
for index in range(2):
    kept.append(None if x.sum() > 0 else x)
y = kept[-1]
return y if y is not None else x * 9
""",
    "a part of an item of a tuple": """
y = (x, None) if x.sum() > 0 else (x, x)
z = (y, x)
return z[0][1] if z[0][1] is not None else x * 9
""",
    "a slice whose part is None": """
y = one_with_none(x)
z = y[1:]
return z[0] if z[0] is not None else x * 9
""",
    "parts of which one may be None": """
for part in one_with_none(x):
    if part is not None:
        x = x + part
return x
""",
    "a longer tuple with a None": """
y = (x, None) if x.sum() > 0 else (x, x)
y = y + (x,)
return y[1] if y[1] is not None else x * 9
""",
    "a star before the last": """
*y, z = (x, x * 2, x + 1)
return y[1] + z if isinstance(y, list) and len(y) == 2 else x * 9
""",
    "a star that stands for none": """
y, z, *rest = both(x)
return y + z if len(rest) == 0 else x * 9
""",
    "a star of parts of a tensor": """
y, *rest = x.chunk(4, -1)
return rest[2] + y if isinstance(rest, list) else x * 9
""",
    "a longer tuple": """
y = x.chunk(2, -1)
y = y + (x,)
return y[2] if isinstance(y, tuple) else x * 9
""",
}


@pytest.mark.parametrize("case", BODIES)
def test_a_tuple_is_one_wherever_it_is_handed(translate: Translate, case: str) -> None:
    text, config = _toy(BODIES[case]), {"scale": 1.5}
    state, _, _ = translate(text, config, specialised=True)
    ours, original = _made(_all_written(state), config), _made(text, config)
    for sign in (1.0, -1.0):
        x = torch.rand(2, 4, generator=torch.Generator().manual_seed(3)) * sign
        assert torch.equal(ours(x), original(x))


def test_what_may_be_a_list_at_run_time_is_refused(translate: Translate) -> None:
    body = """
y = [x, x * 2] if x.sum() > 0 else x * 5
return y[1] if isinstance(y, list) else y
"""
    with pytest.raises(Untranslatable, match="is a list, which it is on one way only"):
        translate(_toy(body), {"scale": 1.5}, specialised=True)


def _toy(body: str) -> str:
    lines = [f"        {line}" for line in body.strip().splitlines()]
    return HELPERS + TOY + "\n".join(lines) + "\n"


def _all_written(state: Any) -> str:
    """Return what is left of the functions and of the class as text."""
    functions = [
        f"def {routine.node.name}({', '.join(routine.parameters)}):\n"
        + "".join(f"    {line}\n" for line in print_block(routine.body).splitlines())
        for routine in state.translator.functions.values()
    ]
    return "\n\n".join([*functions, _written(state)])
