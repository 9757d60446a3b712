# ruff: noqa: D102  (methods that are torch's say what they do there)
"""Tensors that have a shape and a dtype and no values: what a model's code does to sizes, without
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partialmethod
from typing import Any

from onboard.runtime.sketch.storage import (
    BFLOAT16,
    BOOL,
    COMPLEX64,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    MEMORY,
    DType,
    Size,
    Storage,
    UnsureError,
    broadcast,
    keep_whole,
)


def promoted(*values: Any) -> DType:
    """Return the dtype of a result of tensors and numbers: numbers count where they are of a wider
    kind.
    """
    tensors = [each.dtype for each in values if isinstance(each, Tensor)]
    best = tensors[0]
    for each in tensors[1:]:
        best = promote_types(best, each)
    rank = max((_rank(each) for each in values if not isinstance(each, Tensor)), default=0)
    if rank > best.rank:
        best = {1: INT64, 2: MEMORY.default, 3: COMPLEX64}[rank]
    return best


def _of_python(kind: type | None) -> DType:
    known: dict[type | None, DType] = {bool: BOOL, int: INT64, float: FLOAT64, None: MEMORY.default}
    return known[kind]


def _rank(number: Any) -> int:
    kinds = ((bool, 0), (int, 1), (float, 2), (complex, 3))
    return next((rank for kind, rank in kinds if isinstance(number, kind)), 0)


def promote_types(one: DType, other: DType) -> DType:
    """As torch's."""
    if one is other or one.rank != other.rank:
        return max(one, other, key=lambda each: each.rank)
    if {one, other} == {FLOAT16, BFLOAT16}:
        return FLOAT32
    return max(one, other, key=lambda each: each.itemsize)


class Tensor:
    """A shape and a dtype; views share a storage."""

    requires_grad = False
    read_with_bias: bool | None = None
    """Whether linear layers that read it have a bias; None: none has read it."""
    is_meta = True
    is_cuda = False

    def __init__(
        self,
        shape: Iterable[int],
        dtype: DType | type | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.shape = Size(shape)
        self.dtype = dtype if isinstance(dtype, DType) else _of_python(dtype)
        self.storage = storage or Storage(self.nbytes)

    # What is asked of a tensor.

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> str:
        return "meta"

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether its numbers are complex."""
        return self.dtype.is_complex

    def __len__(self) -> int:
        return int(self.shape[0])

    def __bool__(self) -> bool:
        raise UnsureError("a value decides")

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsureError(f"Tensor.{name}")

    # Views and copies.

    def like(self, shape: Iterable[int] | None = None, dtype: DType | None = None) -> Tensor:
        """Return a new tensor, of the same shape and dtype unless said otherwise."""
        return Tensor(self.shape if shape is None else shape, dtype or self.dtype)

    def seen_as(self, shape: Iterable[int]) -> Tensor:
        """Return a view of another shape."""
        return Tensor(shape, self.dtype, self.storage)

    def _axis(self, dim: int, more: int = 0) -> int:
        return dim + len(self.shape) + more if dim < 0 else dim

    def view(self, *shape: Any) -> Tensor:
        if isinstance(shape[0], DType):
            raise UnsureError("Tensor.view of a dtype")
        sizes = list(shape[0]) if isinstance(shape[0], tuple | list) else list(shape)
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes:
            sizes[sizes.index(-1)] = math.prod(self.shape) // known if known else 0
        if math.prod(sizes) != math.prod(self.shape):
            raise UnsureError(f"a view of {self.shape} as {sizes}")
        return self.seen_as(sizes)

    def reshape(self, *shape: Any) -> Tensor:
        return self.view(*shape)

    def view_as(self, other: Tensor) -> Tensor:
        return self.view(other.shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        start, end = self._axis(start_dim), self._axis(end_dim)
        middle = math.prod(self.shape[start : end + 1])
        return self.seen_as((*self.shape[:start], middle, *self.shape[end + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Tensor:
        dim = self._axis(dim)
        return self.view(*self.shape[:dim], *sizes, *self.shape[dim + 1 :])

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        sizes, one, other = list(self.shape), self._axis(dim0), self._axis(dim1)
        sizes[one], sizes[other] = sizes[other], sizes[one]
        return self.seen_as(sizes)

    def permute(self, *dims: Any) -> Tensor:
        order = dims[0] if isinstance(dims[0], tuple | list) else dims
        return self.seen_as(self.shape[dim] for dim in order)

    @property
    def T(self) -> Tensor:
        return self.seen_as(reversed(self.shape))

    def t(self) -> Tensor:
        return self.T

    @property
    def mT(self) -> Tensor:
        return self.transpose(-1, -2)

    def unsqueeze(self, dim: int) -> Tensor:
        dim = self._axis(dim, 1)
        return self.seen_as((*self.shape[:dim], 1, *self.shape[dim:]))

    def squeeze(self, dim: int | None = None) -> Tensor:
        gone = range(self.ndim) if dim is None else [self._axis(dim)]
        return self.seen_as(
            size for index, size in enumerate(self.shape) if index not in gone or size != 1
        )

    def expand(self, *sizes: Any) -> Tensor:
        wanted = sizes[0] if isinstance(sizes[0], tuple | list) else sizes
        own = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
        return self.seen_as(
            have if size == -1 else size for size, have in zip(wanted, own, strict=True)
        )

    def expand_as(self, other: Tensor) -> Tensor:
        return self.expand(other.shape)

    def repeat(self, *repeats: Any) -> Tensor:
        times = repeats[0] if isinstance(repeats[0], tuple | list) else repeats
        own = (1,) * (len(times) - self.ndim) + tuple(self.shape)
        return self.like(n * size for n, size in zip(times, own, strict=True))

    def contiguous(self, **_: Any) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        return self

    def clone(self, **_: Any) -> Tensor:
        return self.like()

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        dim = self._axis(dim)
        keep_whole(self.shape[dim])
        rest = (*self.shape[:dim], *self.shape[dim + 1 :])
        return tuple(self.seen_as(rest) for _ in range(self.shape[dim]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
        dim = self._axis(dim)
        total = self.shape[dim]
        keep_whole(total)
        if isinstance(sizes, int):
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
        if sum(sizes) != total:
            raise UnsureError(f"a split of {self.shape} into {sizes}")
        return tuple(
            self.seen_as((*self.shape[:dim], size, *self.shape[dim + 1 :])) for size in sizes
        )

    split_with_sizes = split

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        return self.split(-(-self.shape[self._axis(dim)] // chunks), dim)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        dim = self._axis(dim)
        keep_whole(self.shape[dim])
        return self.seen_as((*self.shape[:dim], length, *self.shape[dim + 1 :]))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        wanted = kwargs.get("dtype") or next(
            (each for each in args if isinstance(each, DType)),
            next((each.dtype for each in args if isinstance(each, Tensor)), None),
        )
        return self if wanted in (None, self.dtype) else self.like(dtype=wanted)

    def type(self, dtype: DType) -> Tensor:
        return self.to(dtype)

    def type_as(self, other: Tensor) -> Tensor:
        return self.to(other.dtype)

    def new_empty(self, *shape: Any, dtype: DType | None = None, **_: Any) -> Tensor:
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        return self.like(sizes, dtype)

    new_zeros = new_ones = new_empty

    def new_full(self, shape: Any, _: Any, dtype: DType | None = None, **__: Any) -> Tensor:
        return self.like(shape, dtype)

    # Items.

    def __getitem__(self, index: Any) -> Tensor:
        items = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(each, Tensor) for each in items):
            return self._gathered(items)
        return self.seen_as(self._item_shape(items))

    def _item_shape(self, items: list[Any]) -> list[int]:
        named = sum(each is not None and each is not Ellipsis for each in items)
        sizes, dim = list[int](), 0
        for each in items:
            if each is None:
                sizes.append(1)
            elif each is Ellipsis:
                end = dim + self.ndim - named
                sizes += self.shape[dim:end]
                dim = end
            elif isinstance(each, slice):
                size = len(range(*each.indices(self.shape[dim])))
                if size != self.shape[dim]:
                    keep_whole(self.shape[dim])
                sizes.append(size)
                dim += 1
            elif isinstance(each, int):
                keep_whole(self.shape[dim])
                dim += 1
            else:
                raise UnsureError(f"an item {each!r}")
        return sizes + list(self.shape[dim:])

    def _gathered(self, items: list[Any]) -> Tensor:
        if len(items) == 1 and items[0].dtype.rank == 1:
            keep_whole(self.shape[0])
            return self.like((*items[0].shape, *self.shape[1:]))
        raise UnsureError("items chosen by several tensors")

    def __setitem__(self, index: Any, value: Any) -> None:
        """Shapes stay as they are."""

    # Arithmetic, element by element.

    def _with(self, other: Any, dtype: DType | None = None) -> Tensor:
        shape = broadcast(self.shape, other.shape) if isinstance(other, Tensor) else self.shape
        return Tensor(shape, dtype or promoted(self, other))

    def _divided(self, other: Any) -> Tensor:
        dtype = promoted(self, other)
        return self._with(other, dtype if dtype.rank >= 2 else MEMORY.default)

    def _compared(self, other: Any) -> Tensor:
        return self._with(other, BOOL)

    def _same(self, *_: Any, **__: Any) -> Tensor:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _with
    __pow__ = __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _with
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = _with
    __truediv__ = __rtruediv__ = _divided
    __lt__ = __le__ = __gt__ = __ge__ = _compared
    __eq__ = __ne__ = _compared  # type: ignore[assignment]
    __iadd__ = __isub__ = __imul__ = __itruediv__ = _same
    __hash__ = object.__hash__

    def __matmul__(self, other: Tensor) -> Tensor:
        return product(self, other)

    def __neg__(self) -> Tensor:
        return self.like()

    def __invert__(self) -> Tensor:
        return self.like()


def product(one: Tensor, other: Tensor) -> Tensor:
    """Return the matrix product of two tensors of two dimensions at least."""
    if one.ndim < 2 or other.ndim < 2 or one.shape[-1] != other.shape[-2]:
        raise UnsureError(f"a product of {one.shape} and {other.shape}")
    keep_whole(one.shape[-1])
    batch = broadcast(one.shape[:-2], other.shape[:-2]) if one.ndim + other.ndim > 4 else ()
    return Tensor((*batch, one.shape[-2], other.shape[-1]), promoted(one, other))


_SHORT = {"float": FLOAT32, "half": FLOAT16, "bool": BOOL, "long": INT64, "int": INT32}
for _name, _dtype in _SHORT.items():
    setattr(Tensor, _name, partialmethod(Tensor.to, _dtype))
