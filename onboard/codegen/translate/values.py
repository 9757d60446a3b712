"""What is known of a value while code is evaluated partially.

Every value can be turned back into code (`residual`); what is known lets branches be decided and arguments dropped.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from onboard.codegen.translate.forms import CHANNELS as CHANNELS
from onboard.codegen.translate.forms import CHUNKED as CHUNKED
from onboard.codegen.translate.forms import COMPLEX as COMPLEX
from onboard.codegen.translate.forms import KEYS as KEYS
from onboard.codegen.translate.forms import MAYBE as MAYBE
from onboard.codegen.translate.forms import POSITIONS as POSITIONS
from onboard.codegen.translate.forms import ROWS as ROWS
from onboard.codegen.translate.forms import SHARED as SHARED
from onboard.codegen.translate.forms import TRIANGLE as TRIANGLE
from onboard.codegen.translate.forms import UPCAST as UPCAST
from onboard.codegen.translate.forms import ZEROS as ZEROS


class Untranslatable(Exception):
    """A construct that has no translation; the message says which."""


class Value:
    """A value of the evaluated program."""


@dataclass(frozen=True)
class Known(Value):
    """A Python constant that holds whatever the config says."""

    value: Any


@dataclass(frozen=True, eq=False)
class Code(Value):
    """A value that exists at run time only: the expression that computes it."""

    expr: ast.expr
    static: bool = False
    """It depends on config and constants only (not on a tensor), so it may be None or decide a branch."""
    transposed: bool = False
    """The value is `expr.transpose(1, 2)`: heads and sequence are swapped later, or never."""
    form: str | None = None
    """`COMPLEX`, `POSITIONS`, `ROWS`, `UPCAST`, `KEYS`, `ZEROS`, `TRIANGLE`, `CHANNELS` or None."""
    optional: bool = False
    """It may be None."""
    masked: bool = False
    """Its value needs a mask, which generated code does not have: it may become attention, but not be read."""
    unread: ClassVar[str] = ""
    """Why only attention may take it."""

    def same_as(self, other: Code) -> bool:
        """Whether another value of this class is certainly equal."""
        return same_code(self.expr, other.expr) and self.transposed == other.transposed


@dataclass(frozen=True, eq=False)
class Folded(Code):
    """`expr` [batch, heads, sequence, dim] with batch and heads as one dimension."""

    turned: bool = False
    """The last two dimensions are swapped."""

    def same_as(self, other: Code) -> bool:
        """Whether both are folded alike."""
        assert isinstance(other, Folded)
        return super().same_as(other) and self.turned == other.turned


@dataclass(frozen=True, eq=False)
class Repeated(Code):
    """`expr` [batch, heads, sequence, dim] with each head `times` times, as grouped queries need it."""

    times: ast.expr = field(default_factory=lambda: ast.Constant(1))
    swapped: bool = False
    """`expr` is [batch, sequence, heads, dim]: `transposed` it is not, for whoever reads it has to repeat it."""

    @property
    def single(self) -> Code:
        """The tensor before it is repeated."""
        return Code(self.expr, transposed=self.swapped, form=self.form)

    def same_as(self, other: Code) -> bool:
        """Whether both are repeated alike."""
        assert isinstance(other, Repeated)
        return super().same_as(other) and self.swapped == other.swapped and same_code(self.times, other.times)


@dataclass(frozen=True, eq=False)
class KeyBias(Code):
    """A bias of attention that is linear in the key's position (ALiBi); `expr`, its slopes, is what is left of it."""

    unread = "a bias of positions that more than attention reads"


@dataclass(frozen=True, eq=False)
class Unread(Value):
    """A value without a translation, of a variable that nothing may read."""

    reason: str


@dataclass(frozen=True, eq=False)
class Half(Value):
    """cos (part 0) or sin (part 1) of a complex rotary embedding."""

    whole: Code
    part: int


@dataclass(frozen=True, eq=False)
class Items(Value):
    """A tuple or list of known length."""

    items: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Mapping(Value):
    """A dict with known keys."""

    items: dict[str, Value]


@dataclass(frozen=True, eq=False)
class Output(Value):
    """A transformers output dataclass."""

    fields: dict[str, Value]


@dataclass(frozen=True, eq=False)
class Global(Value):
    """An object that the module's namespace names: a function, a class, a module."""

    obj: Any
    expr: ast.expr


@dataclass(frozen=True, eq=False)
class Choice(Value):
    """One of two classes or functions; `test` is known once the config is."""

    test: ast.expr
    first: Value
    second: Value


@dataclass(frozen=True, eq=False)
class Config(Value):
    """The model's config object, or that of a part of a composite."""

    expr: ast.expr
    obj: Any
    copy: ast.expr | None = None
    """How it is copied, where code may change it from here on."""


@dataclass(frozen=True, eq=False)
class Self(Value):
    """The module whose code is evaluated."""


@dataclass(frozen=True, eq=False)
class Super(Value):
    """`super()`."""


@dataclass(frozen=True, eq=False)
class Made:
    """A constructor call: class and arguments. They count for the class's translation once its forward is reached."""

    cls: type
    arguments: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Instance(Value):
    """A module: made in one of the ways `made`, by `expr` (a constructor call) or found there (an attribute)."""

    made: tuple[Made, ...]
    expr: ast.expr
    optional: bool = False
    """It may be None, as some configs have it."""

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes it may be of."""
        return tuple(dict.fromkeys(made.cls for made in self.made))


@dataclass(frozen=True, eq=False)
class ModuleList(Value):
    """An nn.ModuleList of modules that are made in the given ways."""

    made: tuple[Made, ...]
    expr: ast.expr


@dataclass(frozen=True, eq=False)
class Method(Value):
    """`owner.name`, to be called."""

    owner: Value
    name: str


@dataclass(frozen=True, eq=False)
class AttentionInterface(Value):
    """What transformers' attention dispatch returns: a function of q, k, v, mask and keywords."""


@dataclass(frozen=True, eq=False)
class MaskMaker(Value):
    """A function that builds an attention mask, or a mask of padding alone."""

    padding: bool = False
    chunked: bool = False
    """The mask cuts the text into chunks of the config's length."""


@dataclass(frozen=True, eq=False)
class Mask(Value):
    """A causal attention mask: it may only reach the attention interface, whose canonical op is causal by itself."""


@dataclass(frozen=True, eq=False)
class PaddingMask(Mask):
    """A mask that is None without padding, for layers without attention; or one of those and causal ones of others."""


@dataclass(frozen=True, eq=False)
class Joined(Value):
    """`torch.cat([a, b], dim=-1)` that may be taken apart again."""

    parts: tuple[Value, Value]


@dataclass(frozen=True, eq=False)
class Expanded(Value):
    """The keys (part 0) or values (part 1) that latent attention expands from one vector a token."""

    latent: Value
    kpe: Value
    weight: ast.expr
    part: int


@dataclass(frozen=True, eq=False)
class Hole(Value):
    """The i-th run-time part of a call's result."""

    index: int
    form: str | None = None
    optional: bool = False
    like: Code | None = None
    """What the part is where its code does not say it."""


@dataclass(frozen=True, eq=False)
class Result(Value):
    """A call whose result has several run-time parts; `shape` is a value with `Hole`s in it."""

    expr: ast.expr
    shape: Value
    holes: int
    transposed: bool = False

    @property
    def is_plain_tuple(self) -> bool:
        """Whether it is a tuple of its run-time parts and nothing else."""
        shape = self.shape
        return not self.transposed and isinstance(shape, Items) and all(isinstance(item, Hole) for item in shape.items)


NONE = Known(None)


def name(identifier: str, store: bool = False) -> ast.Name:
    """Return a name node."""
    return ast.Name(identifier, ast.Store() if store else ast.Load())


def attribute(owner: ast.expr, *names: str) -> ast.expr:
    """Return `owner.a.b...`."""
    for item in names:
        owner = ast.Attribute(owner, item, ast.Load())
    return owner


def call(function: ast.expr, *args: ast.expr, **keywords: ast.expr) -> ast.Call:
    """Return a call node."""
    return ast.Call(function, list(args), [ast.keyword(key, value) for key, value in keywords.items()])


def constant(value: Any) -> ast.expr:
    """Return a literal; values without one are untranslatable."""
    if isinstance(value, tuple | list):
        items = [constant(item) for item in value]
        return ast.Tuple(items, ast.Load()) if isinstance(value, tuple) else ast.List(items, ast.Load())
    if isinstance(value, slice):
        return call(name("slice"), constant(value.start), constant(value.stop), constant(value.step))
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return call(name("float"), ast.Constant(str(value)))
    if value is None or value is Ellipsis or isinstance(value, str | bytes | int | float | bool):
        return ast.Constant(value)
    raise Untranslatable(f"a constant of type {type(value).__name__}")


def residual(value: Value) -> ast.expr:
    """Return the code that computes a value."""
    match value:
        case Known(value=known):
            return constant(known)
        case Mask():
            raise Untranslatable("attention that reads its mask")
        case Code(masked=True):
            raise Untranslatable("attention scores that are read once they are masked")
        case Unread(reason=reason) | Code(unread=str() as reason) if reason:
            raise Untranslatable(reason)
        case Folded():
            return folded_code(value)
        case Repeated(times=times):
            return call(attribute(residual(value.single), "repeat_interleave"), times, dim=ast.Constant(1))
        case Code(expr=expr, transposed=True):
            return call(attribute(expr, "transpose"), ast.Constant(1), ast.Constant(2))
        case Items(items=items):
            return _residual_items(items)
        case Mapping(items=entries):
            return ast.Dict([ast.Constant(key) for key in entries], [residual(item) for item in entries.values()])
        case Code(expr=expr) | Global(expr=expr) | Config(expr=expr) | Instance(expr=expr) | ModuleList(expr=expr):
            return expr
        case Result(expr=expr, transposed=False):
            return expr
        case Method(owner=owner, name=attr):
            return attribute(residual(owner), attr)
        case Joined(parts=parts):
            return call(attribute(name("torch"), "cat"), _residual_items(parts), dim=constant(-1))
        case Self():
            return name("self")
        case Super():
            return call(name("super"))
        case Choice(test=test, first=first, second=second):
            return ast.IfExp(test, residual(first), residual(second))
    raise Untranslatable(f"a {type(value).__name__} as a run-time value")


def folded_code(value: Folded) -> ast.expr:
    """Return the code of a folded tensor, [batch * heads, sequence, dim] or turned."""
    unfolded = residual(Code(value.expr, transposed=value.transposed))
    folded = call(attribute(unfolded, "flatten"), ast.Constant(0), ast.Constant(1))
    return call(attribute(folded, "transpose"), ast.Constant(1), ast.Constant(2)) if value.turned else folded


def passed(value: Value, fact: Value | None) -> ast.expr:
    """Return the code of an argument for a function that was translated with a fact about it."""
    if isinstance(value, Folded | KeyBias) and type(value) is type(fact):
        return value.expr
    return residual(value)


def _residual_items(items: tuple[Value, ...]) -> ast.expr:
    match items:
        case (Half(whole=first, part=0), Half(whole=second, part=1)) if same_code(first.expr, second.expr):
            return first.expr
    return ast.Tuple([residual(item) for item in items], ast.Load())


def same_code(first: ast.AST, second: ast.AST) -> bool:
    """Whether two trees are the same code."""
    return ast.dump(first) == ast.dump(second)


def same(first: Value, second: Value) -> bool:
    """Whether two values are certainly equal."""
    if first is second:
        return True
    match first, second:
        case Known(value=a), Known(value=b):
            return type(a) is type(b) and bool(a == b)
        case Code(), Code():
            return type(first) is type(second) and first.same_as(second)
        case Items(items=a), Items(items=b):
            return len(a) == len(b) and all(map(same, a, b))
        case Mapping(items=a), Mapping(items=b):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case Output(fields=a), Output(fields=b):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        case Global(obj=a), Global(obj=b):
            return a is b
        case Instance(), Instance():
            ways = len(first.made) == len(second.made) and all(map(same_way, first.made, second.made))
            return ways and first.optional == second.optional and same_code(first.expr, second.expr)
        case ModuleList(), ModuleList():
            return same_code(first.expr, second.expr)
        case Config(obj=a), Config(obj=b):
            return a is b
        case Half(), Half():
            return first.part == second.part and same_code(first.whole.expr, second.whole.expr)
        case Hole(), Hole():
            return first.index == second.index and type(first.like) is type(second.like)
        case MaskMaker(), MaskMaker():
            return first.padding == second.padding
        case Method(), Method():
            return first.name == second.name and same(first.owner, second.owner)
    return type(first) is type(second) and isinstance(first, AttentionInterface | Mask | Self | Super)


def same_way(first: Made, second: Made) -> bool:
    """Whether two constructor calls are certainly equal."""
    if first is second:
        return True
    if first.cls is not second.cls or first.arguments.keys() != second.arguments.keys():
        return False
    return all(same(first.arguments[key], second.arguments[key]) for key in first.arguments)


def joined_ways(first: tuple[Made, ...], second: tuple[Made, ...]) -> tuple[Made, ...]:
    """Return the ways in which the modules of either list are made, each once."""
    return (*first, *(way for way in second if not any(same_way(way, other) for other in first)))


def may_be_none(value: Value) -> bool:
    """Whether a value is None, or may be when the program runs."""
    return same(value, NONE) or (isinstance(value, Code | Instance) and value.optional)


def is_static(value: Value) -> bool:
    """Whether a value depends on config and constants only."""
    match value:
        case Code(static=static):
            return static
        case Items(items=items):
            return all(map(is_static, items))
        case Mapping(items=items):
            return all(map(is_static, items.values()))
    return isinstance(value, Known | Config | Global | MaskMaker)


def untransposed(value: Value) -> Code:
    """Return a transposed value's code as it lies in memory."""
    assert isinstance(value, Code)
    return replace(value, transposed=False)
