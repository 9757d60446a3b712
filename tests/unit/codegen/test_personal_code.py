"""Constructs of models that people write for themselves, in small modules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.program.uses import Ones, given_to
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.output.printer import print_block
from onboard.hf.copied_model import copied
from onboard.hf.old.given_logits import giving_logits
from tests.unit.codegen.conftest import _translated
from tests.unit.codegen.test_own_code import _made, _with_parts, _written

Translate = Callable[..., tuple[Any, str, str]]

TABLE = """
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)
        self.inner.weight.data.zero_()
        self.inner.bias.data[1:].fill_(0.5)

    def forward(self, x):
        return x + self.inner(x).tanh()


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.trunk = nn.ModuleDict({
            "first": nn.Linear(config.size, config.size),
            "h": nn.ModuleList([Block(config) for _ in range(config.layers)]),
            "2": nn.Linear(config.size, config.size),
        })

    def forward(self, x):
        x = self.trunk.first(x)
        for block in self.trunk.h:
            x = block(x)
        return self.trunk["2"](x)
"""
COPIES = """
import copy


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return x + self.inner(x).tanh()


def clones(module, count):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(count)])


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = clones(Block(config.size), config.layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
RECORD = """
from dataclasses import dataclass


@dataclass
class Settings:
    width: int = 8
    factor: float = 2.0
    deep: int = 1


class Inner(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings
        self.layers = nn.ModuleList(
            [nn.Linear(settings.width, settings.width) for _ in range(settings.deep)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.settings.factor
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        given = dict(width=config.size, deep=config.layers + 1)
        self.inner = Inner(Settings(**given))

    def forward(self, x):
        return self.inner(x)
"""

WORKED_OUT = RECORD.replace(
    """    deep: int = 1
""",
    """    deep: int = 1
    kept: Optional[int] = None
    odd: Optional[int] = 3

    def __post_init__(self):
        assert self.width > 0
        if self.kept is None:
            self.kept = next_multiple(self.width, 3)
        if self.odd is None:
            self.odd = 5
        else:
            self.odd = self.odd + self.kept
        if self.width == 4 and self.deep > 2:
            self.factor = self.odd / 2
            self.factor += self.kept
        self.factor *= 1 + self.width


def next_multiple(n, k):
    rest = n % k
    return rest
""",
).replace("self.width, 3)", "self.width, k=3)")
WORKED_OUT = WORKED_OUT.replace(
    """    rest = n % k
    return rest
""",
    """    \"\"\"Return the next multiple.\"\"\"
    if n % k == 0:
        return n
    return n + k - (n % k)
""",
).replace("from dataclasses", "from typing import Optional\nfrom dataclasses")


@pytest.mark.parametrize(
    "text",
    [TABLE, COPIES, RECORD, WORKED_OUT],
    ids=["table", "copies", "record", "worked out"],
)
def test_what_personal_constructors_make_is_made(translate: Translate, text: str) -> None:
    config = {"size": 4, "layers": 2}
    state, _, _ = translate(text, config, specialised=True)
    others = [each for each in state.translator.states.values() if each.cls is not state.cls]
    ours = _made("\n\n\n".join([*map(_written, others), _written(state)]), config)
    theirs = _made(text, config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(ours(x), theirs(x))


def test_an_object_with_what_is_not_of_the_config_is_no_record(translate: Translate) -> None:
    text = RECORD.replace("deep=config.layers + 1", "deep=len(list(self.parameters())) + 1")
    _, init, _ = translate(text, {"size": 4, "layers": 2}, specialised=True)
    assert (
        "Inner(settings_width=config.size, settings_deep=len(list(self.parameters())) + 1)" in init
    )


@pytest.mark.parametrize(
    "odd",
    [
        "self.odd += looping(self.width)",
        "self.odd = [self.odd for _ in range(3)][0]",
        "setattr(self, 'factor', 3.0)",
        "self.later = 3 if self.width else other",
        "self.factor = looping(self.width)",
        "self.factor = next_multiple(*[self.width, 3])",
        "if self.width > 3:\n            self.later = 3",
    ],
)
def test_a_record_that_works_its_fields_out_in_other_ways_is_none(
    translate: Translate, odd: str
) -> None:
    text = WORKED_OUT.replace("assert self.width > 0", odd).replace("(settings.deep)", "(2)")
    text += "\n\nother = 3\n\n\ndef looping(x):\n    while x > 3:\n        x -= 1\n    return x\n"
    _, init, _ = translate(text, {"size": 4, "layers": 2}, specialised=True)
    assert "Settings(" in init


ATTENTION = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = nn.MultiheadAttention(config.size, 2, batch_first=True)

    def forward(self, x):
        length = x.shape[1]
        hidden = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        return self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0]
"""
ENCODER = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            config.size, 2, 12, batch_first=True, norm_first=config.first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)).to(x.device)
        return self.encoder(x, mask=mask, is_causal=True)
"""


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("text", [ATTENTION, ENCODER], ids=["attention", "encoder"])
def test_attention_of_pytorchs_own_modules_is_written_out(
    translate: Translate, text: str, first: bool
) -> None:
    config = {"size": 4, "layers": 2, "first": first}
    state, _, forward = translate(text, config, specialised=True)
    assert "torch_attention(" in forward
    assert "triu" not in forward
    head = "from torch.nn import functional as F\n"
    ours, theirs = _made(head + _written(state), config), _made(text, config)
    theirs.load_state_dict({key: torch.randn_like(x) for key, x in theirs.state_dict().items()})
    ours.load_state_dict(theirs.state_dict())
    ours, theirs, x = ours.double().eval(), theirs.double().eval(), torch.randn(2, 5, 4).double()
    assert torch.allclose(ours(x), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "change",
    [("diagonal=1).bool()", "diagonal=1).bool().T"), ("hidden, need", "~hidden, need")],
    ids=["of earlier keys", "of what is seen"],
)
def test_other_masks_of_pytorchs_attention_are_refused(
    translate: Translate, change: tuple[str, str]
) -> None:
    with pytest.raises(Untranslatable):
        translate(ATTENTION.replace(*change), {"size": 4}, specialised=True)


@pytest.mark.parametrize(
    "last", ["output = (logits,) + states[1:]; return output", "return (logits,) + states[1:]"]
)
def test_logits_before_a_tuple_that_the_trunk_gave_are_taken_alone(
    last: str, translate: Translate
) -> None:
    text = f"""
from types import SimpleNamespace
from onboard.hf.old.given_logits import giving_logits


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x):
        y = self.inner(x)
        return (y, y * 2)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.trunk = config, Trunk(config)
        self.head = nn.Linear(config.size, 5)

    def forward(self, x):
        states = self.trunk(x)
        logits = self.head(states[0])
        {last}


Toy.forward = giving_logits(Toy.forward)
Toy(SimpleNamespace(size=4, vocab_size=5))(torch.ones(1, 3, 4))
"""
    _, _, forward = translate(text, {"size": 4, "vocab_size": 5}, specialised=True)
    assert forward == "states = self.trunk(x)\nreturn self.head(states[0])"


def test_logits_of_the_last_token_are_written_for_all(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head = nn.Linear(config.size, 7)

    def forward(self, x):
        return (self.head(x[:, [-1], :]), None)
"""
    state, _, forward = translate(text, {"size": 4, "vocab_size": 7}, specialised=True)
    assert "-1" in forward  # nothing has shown yet that its class gives no others
    state.cls.forward = giving_logits(state.cls.forward)
    state.translator.model(torch.randn(2, 5, 4))
    again = _translated(state.translator, state.cls, {"x": Code(name("x"))})
    assert "self.head(x)" in print_block(again.methods["forward"].body)


CUT = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        batch, length, _ = x.shape
        mask = None
        if length > 1:
            mask = torch.full((1, length, length), float("-inf"), device=x.device)
            mask = torch.triu(mask, diagonal=1).type_as(x)
        scores = torch.matmul(x, x.transpose(1, 2))
        if mask is not None:
            scores = scores + mask
        return torch.matmul(torch.softmax(scores.float(), dim=-1).type_as(x), x)
"""


@pytest.mark.parametrize(
    ("before", "is_attention"),
    [
        ("mask", True),
        ("torch.hstack([torch.zeros((length, 0), device=x.device), mask])", True),
        ("torch.cat((torch.zeros(1, length, 0), mask), dim=-1)", True),
        ("torch.hstack([torch.zeros((length, 1)), mask])", False),
    ],
)
def test_a_mask_that_only_several_tokens_need_is_the_attentions(
    before: str, is_attention: bool, translate: Translate
) -> None:
    text = CUT.replace("=1).type_as(x)", f"=1)\n            mask = {before}.type_as(x)")
    try:
        _, _, forward = translate(text, {"size": 4}, specialised=True)
    except Untranslatable:
        assert not is_attention
        return
    assert ("torch_attention" in forward) is is_attention
    assert ("triu" in forward) is not is_attention


ONCE = """
def norm(x):
    return x / x.abs().sum(-1, keepdim=True)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x):
        y = z = norm(self.inner(x))
        y = y + 1
        return y * z
"""


def test_what_a_module_computes_for_several_names_is_computed_once(translate: Translate) -> None:
    state, _, forward = translate(ONCE, {"size": 8}, specialised=True)
    assert forward.count("self.inner(") == 1
    ours, theirs = _made(_written(state), {"size": 8}), _made(ONCE, {"size": 8})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


LISTS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(config.layers)])

    def forward(self, x):
        extra = [x, x * 2] + [None] * (len(self.layers) - 3) + [x * 3]
        for i in range(len(self.layers)):
            x = self.layers[i](x)
            if extra[i] is not None:
                x = x + extra[i]
        return x
"""


def test_lists_of_which_one_has_any_length_are_lists(translate: Translate) -> None:
    sizes = {"size": 8, "layers": 5}
    state, _, _ = translate(LISTS, sizes, specialised=True)
    ours, theirs = _made(_written(state), sizes), _made(LISTS, sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


FUNCTIONS = """
class Around(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.read = nn.Parameter(torch.ones(size))

    def forward(self, x, branch):
        y = branch(x * self.read)
        return x + y


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.around = Around(config.size)
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.around(x, lambda h: self.inner(h).tanh())
"""


def test_a_module_that_is_given_a_function_is_written_where_it_is_called(
    translate: Translate,
) -> None:
    state, _, forward = translate(FUNCTIONS, {"size": 8}, specialised=True)
    assert "self.around.read" in forward
    assert "lambda" not in forward
    theirs = _made(FUNCTIONS, {"size": 8})
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), {"size": 8})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


KEPT = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mlp = nn.ModuleDict(
            dict(first=nn.Linear(config.size, 9), act=nn.Tanh(), second=nn.Linear(9, config.size))
        )
        m, self.norm = self.mlp, nn.Linear(config.size, config.size)
        norm = self.norm
        self.mlpf = lambda x: m.second(m.act(m.first(norm(x))))

    def forward(self, x):
        return x + self.mlpf(x)
"""


def test_a_function_that_a_constructor_keeps_reads_the_modules_that_it_has(
    translate: Translate,
) -> None:
    state, _, forward = translate(KEPT, {"size": 8}, specialised=True)
    assert "self.mlp.second" in forward
    theirs, ours = _made(KEPT, {"size": 8}), _made(_written(state), {"size": 8})
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    alike = copied(theirs)
    for parameter in alike.parameters():
        parameter.data.zero_()
    assert torch.equal(alike(x), x)
    assert not torch.equal(theirs(x), x)


CLASSES = """
class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.weight


def kind(config):
    if config.kind == "scaled":
        return Scaled
    return nn.Linear


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        made = kind(config)
        self.parts = nn.ModuleDict(dict(inner=kind(config)(config.size), outer=made(config.size)))

    def forward(self, x):
        return self.parts.outer(self.parts.inner(x)).tanh()
"""


def test_a_function_that_gives_a_class_gives_that_of_this_config(translate: Translate) -> None:
    sizes = {"size": 8, "kind": "scaled"}
    state, init, _ = translate(CLASSES, sizes, specialised=True)
    assert "Scaled(" in init
    assert "kind(" not in init
    assert any("scaled" in ast.unparse(guard) for guard in state.guards)
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), sizes)
    theirs = _made(CLASSES, sizes)
    ours.load_state_dict({key: torch.randn_like(x) for key, x in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


TABLED = CLASSES.replace(
    """    if config.kind == "scaled":
        return Scaled
    return nn.Linear
""",
    """    kinds = {"scaled": Scaled, "doubled": Doubled}
    found = kinds.get(config.kind)
    if not found:
        raise ValueError(config.kind)
    return found


class Doubled(Scaled):
    def forward(self, x):
        return 2 * x * self.weight
""",
)


def test_a_table_that_a_function_makes_of_classes_may_be_asked_for_a_name(
    translate: Translate,
) -> None:
    for asked, inside in (("scaled", "Scaled("), ("doubled", "Doubled(")):
        sizes = {"size": 8, "kind": asked}
        state, init, _ = translate(TABLED, sizes, specialised=True)
        assert inside in init
        assert any(asked in ast.unparse(guard) for guard in state.guards)
    with pytest.raises(ValueError, match="other"):
        translate(TABLED, {"size": 8, "kind": "other"}, specialised=True)


HALVED = """
device = torch.device("cpu")


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.a = nn.Linear(config.size, config.size).half().to(device)
        self.b = nn.utils.skip_init(nn.Linear, config.size, config.size).to(device).bfloat16()

    def forward(self, x):
        return self.b(self.a(x))
"""


def test_modules_that_are_put_in_half_precision_take_the_models_dtype(translate: Translate) -> None:
    state, init, _ = translate(HALVED, {"size": 8}, specialised=True)
    assert "half" not in init
    assert "device" not in init
    theirs, ours = _made(HALVED, {"size": 8}).float(), _made(_written(state), {"size": 8})
    ours.load_state_dict({key: torch.randn_like(x) for key, x in theirs.state_dict().items()})
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


SHIFT = """
from torch.nn import functional as F


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Parameter(torch.ones(config.size))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        return x + (before - x) * self.mix
"""


def test_padding_that_moves_tokens_by_one_is_a_shift(translate: Translate) -> None:
    _, _, forward = translate(SHIFT, {"size": 8}, specialised=True)
    assert "torch.ops.onboard.torch_token_shift(x)" in forward
    for other in ("(0, 0, 2, -2)", "(1, -1)", "(0, 0, -1, 1)"):
        text = SHIFT.replace("(0, 0, 1, -1)", other)
        assert "token_shift" not in translate(text, {"size": 8}, specialised=True)[2]
    state, _, _ = translate(SHIFT, {"size": 8}, specialised=True)
    ours, theirs = _made(_written(state), {"size": 8}), _made(SHIFT, {"size": 8})
    ours.load_state_dict({"mix": torch.randn(8)})
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))


NEEDS_A_MASK = """
class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def forward(self, x, attention_mask):
        x = self.inner(x)
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1).to(x.dtype)
        return x, None


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config)

    def forward(self, x, attention_mask, past=None):
        outputs = self.inner(x, attention_mask)
        x, past = outputs
        return x + 1.0
"""


def test_a_mask_that_a_forward_cannot_do_without_hides_nothing(translate: Translate) -> None:
    config = {"size": 3}
    state, _, _ = translate(NEEDS_A_MASK, config, specialised=True, attention_mask=Ones())
    (needed,) = given_to(state.cls).items()
    assert (needed[0], type(needed[1])) == ("attention_mask", Ones)
    text = _with_parts(state)
    assert "mask" not in text
    ours, theirs = _made(text, config), _made(NEEDS_A_MASK, config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(ours(x), theirs(x, torch.ones(2, 5)))


def test_parts_of_what_has_no_translation_say_why(translate: Translate) -> None:
    text = NEEDS_A_MASK.replace("outputs = self.inner(x, attention_mask)", "outputs = unheard(x)")
    with pytest.raises(Untranslatable, match="unheard"):
        translate(text, {"size": 3}, specialised=True, attention_mask=Ones())
