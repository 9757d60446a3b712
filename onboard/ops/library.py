"""How an op gets into `torch.ops.onboard`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch._ops import OpOverload, OpOverloadPacket

from onboard.errors import UsageError
from onboard.ops.written_forms import CallForm, LoopForm

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "onboard"
HINTS = 'str layer_type="unknown", bool enable_sharding=False'
"""What the schema of a hinted op has besides its function's arguments."""

State = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a cached op keeps of each sequence."""
StateOf = Callable[..., State]
"""The arguments of a canonical op, by name -> what its cached form keeps of each sequence."""


class OpProperties(TypedDict, total=False):
    """What transforms have to know of an op, declared where it is registered and nowhere else."""

    mutates: tuple[str, ...]
    """Names of the arguments that the op writes to."""
    carries_state: bool
    """It carries something from token to token and sees only the tokens of its own step, so that a
    cached op must take its place before a graph can generate."""
    inserted: bool
    """Transforms put it into graphs; model files may not use it."""
    cached_form_of: str
    """The canonical op whose place it takes in a cached graph. Ops of the same name with another
    word in place of "torch" are other back ends of it."""
    state: StateOf
    """What a recurrence's cached form keeps of each sequence, in its first cache."""
    invariant_form_of: str
    """The op whose place it takes where results may not depend on the batch."""
    row_wise: bool
    """Each row of its results follows from the same row of its inputs, and is the same, bit for
    bit, for any number of rows."""
    attends: bool
    """For each token it gives a mean of values of tokens, by the softmax of scores."""
    rotary: tuple[str, ...]
    """Its arguments that hold the rotary embedding's table, cos and sin or complex numbers."""
    experts: bool
    """It runs the experts that a router has chosen."""
    feed_forward: bool
    """It is a feed-forward block: it projects its first argument by weights of its own."""
    takes_codes: str
    """For a linear layer whose weight is codes, with their scales as an argument: the op, without
    its back end, that also does what stands around it."""
    adds_residual: bool
    """It returns a norm of the sum of its first two arguments, and the sum."""
    no_capture: str
    """Why no CUDA graph can hold it."""
    no_pieces: str
    """Why no CUDA graph of steps with many tokens should hold it."""
    any_lengths: bool
    """A cached op: in a step that reads prompts, what it launches follows from the numbers of tokens
    and sequences alone, so a CUDA graph of it holds for sequences of any lengths."""
    fused_form: str
    """A rotation: the op, without its back end, that takes its place in layout bsnd, with the same
    arguments but for the layout."""
    described: str
    """What a class is, in the words of the field, whose code calls it; a whole sentence where more
    than that is told by nothing else."""
    called_as: CallForm | tuple[CallForm, ...]
    """How a helper function of modeling code that computes it is called, or in which ways."""
    called_as_module: CallForm
    """How a module of modeling code, without weights, that computes it is called."""
    looped_as: tuple[LoopForm, ...]
    """In which ways modeling code writes it as a loop, those that say more first."""
    written_out_as: str
    """Its expression where modeling code writes it out: of `x`, `A`, `B`, `C`, `D`, `dt`, `dt_bias`,
    `groups`, `least`, `most` and `chunk_size`."""
    hinted: bool
    """Model files say with two more arguments, `layer_type` and `enable_sharding`, how ranks divide
    what it computes; export takes these away."""
    marks: bool
    """A model file says with it how ranks divide a layer; export takes it away."""


@dataclass(frozen=True)
class OpSource:
    """What is known of a registered op: where it comes from, and its `OpProperties`."""

    module: str
    """The module that it comes from."""
    function: Callable[..., Any]
    """What it computes, to be called without the dispatcher."""
    mutates: tuple[str, ...] = ()
    carries_state: bool = False
    inserted: bool = False
    cached_form_of: str = ""
    state: StateOf | None = None
    invariant_form_of: str = ""
    row_wise: bool = False
    attends: bool = False
    rotary: tuple[str, ...] = ()
    experts: bool = False
    feed_forward: bool = False
    takes_codes: str = ""
    adds_residual: bool = False
    no_capture: str = ""
    no_pieces: str = ""
    any_lengths: bool = False
    fused_form: str = ""
    described: str = ""
    called_as: CallForm | tuple[CallForm, ...] = ()
    called_as_module: CallForm | None = None
    looped_as: tuple[LoopForm, ...] = ()
    written_out_as: str = ""
    hinted: bool = False
    marks: bool = False

    @property
    def ships(self) -> bool:
        """Whether the op is this package's own; others come from extensions."""
        return self.module.startswith("onboard.")


_SOURCES: dict[str, OpSource] = {}
NOT_OURS = OpSource("", lambda *_, **__: None)
"""What is known of an operator that was not registered here."""


def register_op(
    fake: Callable[..., Any] | None = None,
    *,
    schema: str | None = None,
    **properties: Unpack[OpProperties],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.onboard.<its name>`; the schema comes from its
    annotations.

    Args:
        fake: computes outputs of the right shape, dtype and strides from fake tensors. None: the
            function itself does, which is right for a composition of PyTorch operators that never
            reads a value.
        schema: the schema where annotations cannot say it (an optional list of tensors), without
            the op's name.
        properties: what transforms have to know of the op.

    The function itself is returned, so that ops can be composed without a second trip through the
    dispatcher. Raises `UsageError` for a name that is taken: graphs that are there already call the
    op that has it.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        if function.__name__ in _SOURCES:
            raise UsageError(
                f"there is an op {function.__name__!r}",
                hint="Give it another name; after an edit start Python anew",
            )
        op, shape = _custom_op(function, fake or function, schema, properties)
        op.register_fake(shape)
        _SOURCES[function.__name__] = OpSource(function.__module__, function, **properties)
        return function

    return register


def _custom_op(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None,
    properties: OpProperties,
) -> tuple[Any, Callable[..., Any]]:
    """Return the op of a function and what computes its shapes; both ignore the hints that a hinted
    one takes.
    """
    mutates = properties.get("mutates", ())
    called = function
    if properties.get("hinted"):
        schema = schema or torch.library.infer_schema(function, mutates_args=mutates)
        schema = schema.replace(") ->", f", *, {HINTS}) ->")
        called, fake = _without_hints(function), _without_hints(fake)
    name = f"{NAMESPACE}::{function.__name__}"
    return torch.library.custom_op(name, called, mutates_args=mutates, schema=schema), fake


def _without_hints(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(
        *args: Any, layer_type: str = "unknown", enable_sharding: bool = False, **kwargs: Any
    ) -> Any:
        return function(*args, **kwargs)

    return called


def schema_of(name: str) -> str:
    """Return the schema of a registered op without hints, for another one that is to have the same:
    for `register_op`.
    """
    schema = str(getattr(getattr(torch.ops, NAMESPACE), name).default._schema).partition(name)[2]
    return schema.replace(f", *, {HINTS}", "")


def plain_function(op: Any) -> Any:
    """Return the Python function behind an operator of ours, which costs less to call; any other
    one as it is.
    """
    source = declared(op)
    return op if source is NOT_OURS else source.function


def declared(op: Any) -> OpSource:
    """Return what is known of an operator; of one that was not registered here that is nothing."""
    packet = op.overloadpacket if isinstance(op, OpOverload) else op
    namespace, _, name = str(packet).partition(".")
    is_ours = isinstance(packet, OpOverloadPacket) and namespace == NAMESPACE
    return _SOURCES.get(name, NOT_OURS) if is_ours else NOT_OURS


def cached_forms(op: str) -> dict[str, str]:
    """Return the ops that take a canonical op's place in a cached graph, by back end; none for one
    without.
    """
    reference = next((name for name, source in _SOURCES.items() if source.cached_form_of == op), "")
    return forms_of(reference) if reference else {}


def forms_of(reference: str) -> dict[str, str]:
    """Return the ops that compute what a `torch_*` op does, that one among them, by back end."""
    suffix = reference.removeprefix("torch")
    names = (
        name
        for name, source in _SOURCES.items()
        if name.endswith(suffix) and not source.invariant_form_of
    )
    return {
        name.removesuffix(suffix): name for name in names if "_" not in name.removesuffix(suffix)
    }


def op_sources() -> dict[str, OpSource]:
    """Return what is known of every registered op, by name."""
    return dict(_SOURCES)
