"""Tables of positions in code of repositories: cut to the text's length, handed on, grown with the
texts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.statements.assignments.kept import keep_table
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

CUT = """
class Tables(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.longest = None
        self._grow(size, length)
        self.longest = None

    def _grow(self, size, length):
        self.longest = length
        angles = torch.outer(torch.arange(length).float(), 1.0 / torch.arange(1, size + 1))
        self.register_buffer("cos", angles.cos()[None, None, :, :], persistent=False)

    def forward(self, x, length):
        if self.longest is None or length > self.longest:
            self._grow(x.shape[-1], length)
        return self.cos[:, :, :length, ...].to(dtype=x.dtype)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables = Tables(config.size, config.length)

    def forward(self, x, position_ids):
        cos = self.tables(x, length=x.shape[1])
        cos = cos.squeeze(1).squeeze(0)
        return x * USE
"""


def test_a_table_cut_to_the_text_is_looked_up_whole(translate: Translate) -> None:
    text = CUT.replace("USE", "cos[position_ids]")
    sizes = {"size": 4, "length": 32}
    state, init, forward = translate(text, sizes, position_ids=Code(name("position_ids")))
    (tables,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Tables"]
    assert tables.methods["forward"].parameters == ["x"]
    assert "cos[position_ids]" in forward
    original = _made(text, sizes)
    ours = _made(f"{_written(tables)}\n\n\n{_written(state)}", sizes)
    generator = torch.Generator().manual_seed(5)
    x, positions = torch.randn(2, 7, 4, generator=generator), torch.arange(7).expand(2, 7)
    assert torch.equal(ours(x, positions), original(x, positions))
    # A step of a text that began before: the table cut to its length would be too short.
    assert torch.equal(ours(x[:, 5:], positions[:, 5:]), original(x, positions)[:, 5:])


def test_a_table_cut_to_the_text_that_is_not_looked_up_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="no positions are looked up"):
        translate(
            CUT.replace("USE", "cos"),
            {"size": 4, "length": 32},
            position_ids=Code(name("position_ids")),
        )


HANDED = """
def turned(x, cos):
    _, length, _ = x.shape
    return x * cos[:length]


class Part(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, cos):
        length = x.shape[1]
        return x * cos[:length]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        angles = torch.outer(torch.arange(config.length).float(), 1.0 / torch.arange(1, config.size + 1))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.part = Part()

    def turned(self, x, cos):
        return x * cos[: x.shape[1]]

    def forward(self, x, position_ids, offset=0):
        HOW
"""


@pytest.mark.parametrize(
    "how",
    [
        "return turned(x, self.cos[offset:])",
        "return turned(x, cos=self.cos.to(x.dtype))",
        "return self.turned(x, self.cos)",
        "return self.part(x, self.cos)",
        "table = self.cos\n        return x * table[: x.shape[1]]",
    ],
    ids=["function", "keyword", "method", "module", "variable"],
)
def test_a_table_that_is_cut_where_it_was_handed_on_is_looked_up_whole(
    how: str, translate: Translate
) -> None:
    text, sizes = HANDED.replace("HOW", how), {"size": 4, "length": 32}
    given = Code(name("position_ids"))
    _agree_in_every_step(
        translate(text, sizes, specialised=True, counts_positions=True, position_ids=given)[0],
        text,
        sizes,
    )


def _agree_in_every_step(state: Any, text: str, sizes: dict[str, Any]) -> str:
    """Compare what is left of class Toy with it, for a text and for the last tokens of it; return
    what is left.
    """
    functions = [_function(key, each) for key, each in state.translator.functions.items()]
    classes = [_written(each) for each in state.translator.states.values() if each is not state]
    written = "\n\n\n".join([*functions, *classes, _written(state)])
    ours = _made(written, sizes)
    generator = torch.Generator().manual_seed(6)
    x, positions = torch.randn(2, 7, sizes["size"], generator=generator), torch.arange(7)
    expected = _made(text, sizes)(x, positions := positions.expand(2, 7))
    assert torch.equal(ours(x, positions), expected)
    assert torch.equal(ours(x[:, 5:], positions[:, 5:]), expected[:, 5:])
    return written


GROWN = """
class Toy(nn.Module):
    def __init__(self, config, start=4):
        super().__init__()
        self.size = config.size
        self._grow(start, torch.float32)

    def _grow(self, length, dtype):
        self.length = length
        places = torch.arange(length, dtype=torch.float32)
        self._cos = torch.outer(places, 1.0 / torch.arange(1, self.size + 1)).cos().to(dtype)

    def forward(self, x, position_ids, offset=0):
        length = x.shape[1] + offset
        if self.length < length or self._cos.dtype != x.dtype:
            self._grow(length, x.dtype)
        return x * self._cos[offset:][: x.shape[1]]
"""


@pytest.mark.parametrize("start", ["start=4", "start=64"])
def test_a_table_that_begins_with_a_number_of_rows_has_as_many_as_a_text_needs(
    start: str, translate: Translate
) -> None:
    """Positions of some config are more than the number, whatever it is."""
    text, sizes = GROWN.replace("start=4", start), {"size": 4}
    given = Code(name("position_ids"))
    state, _, _ = translate(
        text, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    _agree_in_every_step(state, text, sizes)
    assert "4" not in _written(state)


FLOORED = """
class Tables(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def alpha(self, length):
        return max(2 ** math.ceil(math.log(length / self.config.trained, 2) + 1) - 1, 1)

    def grown(self, scale=1):
        return 1.0 if scale <= 1 else 0.1 * math.log(scale) + 1.0

    def forward(self, x, length):
        length = max(length, self.config.trained)
        base = 10.0 * COMPUTED
        angles = torch.einsum("i,j->ij", torch.arange(length).float(), 1.0 / torch.arange(1, 5) / base)
        return angles.cos()[:length]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables = Tables(config)

    def forward(self, x):
        return x * self.tables(x, x.shape[1])[: x.shape[1]]
"""


@pytest.mark.parametrize(
    ("computed", "longest"),
    [
        ("self.alpha(length)", 8),
        ("self.grown(length / self.config.trained)", 8),
        ("self.alpha(length) * self.grown(length / self.config.trained)", 8),
        ("self.config.trained", None),  # a table of so many rows, and no more
    ],
)
def test_numbers_of_a_length_that_has_a_least_are_those_of_this(
    computed: str, longest: int | None, translate: Translate
) -> None:
    text, fields = FLOORED.replace("COMPUTED", computed), {"trained": 8}
    state, _, _ = translate(text, fields, specialised=True, counts_positions=True)
    (tables,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Tables"]
    written = f"{_written(tables)}\n\n\n{_written(state)}"
    original, ours = _made(text, fields), _made(written, fields)
    generator = torch.Generator().manual_seed(12)
    for length in (3, 8, 9, 20):
        x = torch.randn(2, length, 4, generator=generator)
        given = {"position_ids": torch.arange(length).expand(2, -1)}
        if longest is not None and length > longest:
            with pytest.raises(AssertionError, match="texts of more tokens"):
                ours(x, **given)
        else:
            torch.testing.assert_close(ours(x, **given), original(x))


WITH_HEADS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        angles = torch.outer(torch.arange(config.length).float(), 1.0 / torch.arange(1, config.size + 1))
        self.register_buffer("cos", angles.cos()[SHAPE], persistent=False)

    def forward(self, x, position_ids, offset=0):
        length = x.shape[1]
        return (x[:, None] * self.cos[CUT])[:, 0]
"""


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ("None", ":, :length"),
        ("None, None", ":, :, :length, :"),
        (":, :", "None, :length, None, :"),
    ],
)
def test_rows_of_counted_positions_stay_beside_what_they_are_multiplied_with(
    shape: str, cut: str, translate: Translate
) -> None:
    text = WITH_HEADS.replace("SHAPE", shape).replace("CUT", cut)
    if shape == "None":  # batch and positions, and no dimension between them
        text = text.replace("(x[:, None] *", "(x *").replace(")[:, 0]", ")")
    if cut.startswith("None"):  # heads behind the positions
        text = text.replace("(x[:, None] *", "(x[:, :, None] *").replace(")[:, 0]", ")[:, :, 0]")
    sizes, given = {"size": 4, "length": 32}, Code(name("position_ids"))
    state, _, _ = translate(
        text, sizes, specialised=True, counts_positions=True, position_ids=given
    )
    _agree_in_every_step(state, text, sizes)


def test_a_table_is_kept_behind_statements_that_stand_nowhere_in_the_code() -> None:
    empty = ast.parse("self.table = None").body[0]
    placeless = ast.Assign([ast.Name("a", ast.Store())], ast.Constant(1))
    out: list[ast.stmt] = [placeless, empty]
    frame: Any = SimpleNamespace(outer=[], out=out, emit=lambda item, _: out.append(item))
    keep_table("table", ast.Name("a", ast.Load()), frame, None)
    assert out[0] is placeless
    assert [ast.unparse(item) for item in out[1:]] == [
        f"self.register_buffer('table', {value}, persistent=False)" for value in ("None", "a")
    ]
