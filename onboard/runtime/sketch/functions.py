"""What torch's functions make of shapes: those that model files call. Any other one is an
`UnsureError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onboard.runtime.sketch.storage import (
    BOOL,
    COMPLEX64,
    INT64,
    MEMORY,
    DType,
    UnsureError,
    broadcast,
    keep_whole,
)
from onboard.runtime.sketch.tensor import Tensor, product, promoted

_ELEMENTWISE = """
    abs neg exp exp2 expm1 log log2 log1p sqrt rsqrt sin cos tanh sigmoid relu square reciprocal
    floor ceil round softplus silu gelu erf clamp clip clamp_min clamp_max relu6 selu mish
    masked_fill index_add index_copy scatter scatter_add logical_not nan_to_num leaky_relu
    elu hardtanh dropout
""".split()  # noqa: SIM905  (a list of words is read more easily so)
"""Functions of a tensor whose result is like it."""
_IN_PLACE = """
    add_ sub_ mul_ div_ exp_ clamp_ fill_ zero_ copy_ masked_fill_ scatter_ scatter_add_
    uniform_ normal_ index_add_ index_copy_ neg_ sigmoid_ tanh_ relu_ pow_ sqrt_ rsqrt_
""".split()  # noqa: SIM905  (a list of words is read more easily so)
_TWO = {
    "add": "__add__",
    "sub": "__sub__",
    "mul": "__mul__",
    "div": "__truediv__",
    "pow": "__pow__",
    "eq": "__eq__",
    "ne": "__ne__",
    "lt": "__lt__",
    "le": "__le__",
    "gt": "__gt__",
    "ge": "__ge__",
    "matmul": "__matmul__",
    "bmm": "__matmul__",
    "mm": "__matmul__",
    "maximum": "__add__",
    "minimum": "__add__",
    "logical_and": "__and__",
    "logical_or": "__or__",
    "bitwise_and": "__and__",
    "bitwise_or": "__or__",
    "bitwise_xor": "__xor__",
    "floor_divide": "__floordiv__",
    "remainder": "__mod__",
    "fmod": "__mod__",
    "multiply": "__mul__",
    "true_divide": "__truediv__",
}
_SHAPED = """
    view reshape flatten unflatten transpose permute squeeze unsqueeze unbind split chunk clone
    narrow t movedim
""".split()  # noqa: SIM905  (a list of words is read more easily so)


def _like(x: Tensor, *_: Any, dtype: DType | None = None, **__: Any) -> Tensor:
    return x.like(dtype=dtype)


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _swapped(method: str) -> Callable[..., Tensor]:
    def call(one: Any, other: Any, **_: Any) -> Tensor:
        first, second = (one, other) if isinstance(one, Tensor) else (other, one)
        result: Tensor = getattr(first, method)(second)
        return result

    return call


def _method(name: str) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    return call


def _filled(*shape: Any, dtype: DType | None = None, **_: Any) -> Tensor:
    sizes = shape[0] if shape and isinstance(shape[0], tuple | list) else shape
    return Tensor(sizes, dtype)


def full(shape: Sequence[int], value: Any, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """As torch's."""
    return Tensor(shape, dtype or _dtype_of(value))


def _dtype_of(value: Any) -> DType:
    if isinstance(value, bool):
        return BOOL
    return INT64 if isinstance(value, int) else MEMORY.default


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    **_: Any,
) -> Tensor:
    """As torch's."""
    first, last = (0, start) if end is None else (start, end)
    size = max(0, math.ceil((last - first) / step))
    return Tensor((size,), dtype or _dtype_of(first + last + step))


def linspace(
    start: float, end: float, steps: int, *, dtype: DType | None = None, **_: Any
) -> Tensor:
    """As torch's."""
    return Tensor((steps,), dtype)


def tensor(values: Any, *, dtype: DType | None = None, **_: Any) -> Tensor:
    """As torch's."""
    shape, item = [], values
    while isinstance(item, list | tuple):
        shape.append(len(item))
        if not item:
            break
        item = item[0]
    return Tensor(shape, dtype or _dtype_of(item))


def outer(one: Tensor, other: Tensor) -> Tensor:
    """As torch's."""
    return Tensor((*one.shape, *other.shape), promoted(one, other))


def cat(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Tensor:
    """As torch's."""
    shape = list(tensors[0].shape)
    keep_whole(shape[dim])
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return Tensor(shape, promoted(*tensors))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """As torch's."""
    return cat([each.unsqueeze(dim) for each in tensors], dim)


def where(condition: Tensor, *values: Any) -> Tensor:
    """As torch's, with two values."""
    if len(values) != 2:
        raise UnsureError("torch.where of a condition alone")
    shapes = [each.shape for each in (condition, *values) if isinstance(each, Tensor)]
    tensors = [each for each in values if isinstance(each, Tensor)]
    return Tensor(broadcast(*shapes), promoted(*values) if tensors else _dtype_of(values[0]))


def reduced(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: DType | None = None, **_: Any
) -> Tensor:
    """Return what is left when dimensions are summed, averaged or the like."""
    dims = range(x.ndim) if dim is None else dim if isinstance(dim, tuple | list) else [dim]
    gone = {each % x.ndim for each in dims}
    for each in gone:
        keep_whole(x.shape[each])
    sizes = enumerate(x.shape)
    shape = [1 if i in gone else s for i, s in sizes if keepdim or i not in gone]
    return x.like(shape, dtype)


def topk(x: Tensor, k: int, dim: int = -1, **_: Any) -> tuple[Tensor, Tensor]:
    """As torch's."""
    shape = list(x.shape)
    keep_whole(shape[dim])
    shape[dim] = k
    return x.like(shape), x.like(shape, INT64)


def extreme(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """As torch's max and min of one tensor."""
    if dim is None:
        return reduced(x)
    if isinstance(dim, Tensor):
        return x + dim
    values = reduced(x, dim, keepdim)
    return values, values.like(dtype=INT64)


def gather(x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    """As torch's."""
    keep_whole(x.shape[dim])
    return x.like(index.shape)


def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """As torch's."""
    shape = list(x.shape)
    keep_whole(shape[dim])
    shape[dim] = index.numel()
    return x.like(shape)


def repeat_interleave(x: Tensor, repeats: int, dim: int | None = None, **_: Any) -> Tensor:
    """As torch's, with a number of repeats."""
    if not isinstance(repeats, int):
        raise UnsureError("torch.repeat_interleave by a tensor")
    shape = [x.numel()] if dim is None else list(x.shape)
    shape[-1 if dim is None else dim] *= repeats
    return x.like(shape)


def along(x: Tensor, dim: int, *_: Any, dtype: DType | None = None, **__: Any) -> Tensor:
    """Return what is like a tensor, and made along a dimension."""
    keep_whole(x.shape[dim])
    return x.like(dtype=dtype)


def triangle(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """As torch's tril and triu."""
    for size in x.shape[-2:]:
        keep_whole(size)
    return x.like()


def polar(one: Tensor, other: Tensor) -> Tensor:
    """As torch's."""
    return Tensor(broadcast(one.shape, other.shape), COMPLEX64)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch.nn.functional's."""
    if x.shape[-1] != weight.shape[-1]:
        raise UnsureError(f"a linear layer {weight.shape} of {x.shape}")
    MEMORY.before_last_linear = MEMORY.peak
    if x.read_with_bias is (bias is None):  # joined, those without one get zeros
        raise UnsureError("layers with and without a bias read the same tensor")
    x.read_with_bias = bias is not None
    return x.like((*x.shape[:-1], weight.shape[0]))


def addmm(bias: Tensor, one: Tensor, other: Tensor, **_: Any) -> Tensor:
    """As torch's."""
    return product(one, other)


def embedding(index: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """As torch.nn.functional's."""
    return weight.like((*index.shape, weight.shape[-1]))


def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """As torch.nn.functional's."""
    if num_classes < 0:
        raise UnsureError("one_hot of as many classes as there are")
    return x.like((*x.shape, num_classes), INT64)


_OWN: dict[str, Callable[..., Any]] = {
    "arange": arange,
    "linspace": linspace,
    "tensor": tensor,
    "as_tensor": tensor,
    "outer": outer,
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "where": where,
    "topk": topk,
    "max": extreme,
    "min": extreme,
    "gather": gather,
    "index_select": index_select,
    "repeat_interleave": repeat_interleave,
    "polar": polar,
    "addmm": addmm,
    "full": full,
    "linear": linear,
    "embedding": embedding,
    "one_hot": one_hot,
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), along),
    "layer_norm": _like,
    "rms_norm": _like,
    **dict.fromkeys(("ones", "zeros", "empty", "rand", "randn"), _filled),
    **dict.fromkeys(("ones_like", "zeros_like", "empty_like", "full_like"), _like),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "any", "all", "var"), reduced),
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _like),
    **dict.fromkeys(_IN_PLACE, _same),
    **{name: _swapped(method) for name, method in _TWO.items()},
    **{name: _method(name) for name in _SHAPED},
    **_OWN,
}
"""By the name that they have in torch, and as methods of tensors."""

for _name, _function in FUNCTIONS.items():
    if not hasattr(Tensor, _name):
        setattr(Tensor, _name, _function)
