# ruff: noqa: D102  (methods that are torch's say what they do there)
"""`torch.nn` of tensors without values: modules that know their parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from onboard.runtime.sketch.functions import FUNCTIONS, embedding, linear
from onboard.runtime.sketch.storage import MEMORY, WEIGHTS, UnsureError
from onboard.runtime.sketch.tensor import Tensor


class Parameter(Tensor):
    """A tensor that is a module's weight."""

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        dtype = MEMORY.default if data.is_floating_point() else data.dtype
        super().__init__(data.shape, dtype, WEIGHTS)


class Buffer(Tensor):
    """A tensor that is a module's table."""

    def __init__(self, data: Tensor, *, persistent: bool = True) -> None:
        super().__init__(data.shape, data.dtype, WEIGHTS)


def weight(*shape: int) -> Parameter:
    """Return a new parameter in the dtype of the model."""
    made = Parameter.__new__(Parameter)
    Tensor.__init__(made, shape, MEMORY.default, WEIGHTS)
    return made


class Module:
    """A tree of parts; those are found in its attributes."""

    training = False

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UnsureError(f"{type(self).__name__} has no forward")

    def register_buffer(self, name: str, value: Tensor | None, persistent: bool = True) -> None:
        setattr(self, name, None if value is None else Buffer(value))

    def register_parameter(self, name: str, value: Parameter | None) -> None:
        setattr(self, name, value)

    def add_module(self, name: str, module: Module | None) -> None:
        setattr(self, name, module)

    register_module = add_module

    def tensors(self, *kinds: type[Tensor]) -> Iterator[list[Tensor]]:
        """Yield all tensors of each kind, parameters or buffers; those that are the same object
        once.
        """
        parts, left = dict[int, Module](), [self]
        while left:
            part = left.pop()
            if id(part) not in parts:
                parts[id(part)] = part
                left += part.children()
        for kind in kinds:
            owned = (each for part in parts.values() for each in vars(part).values())
            yield list({id(each): each for each in owned if type(each) is kind}.values())

    def children(self) -> list[Module]:
        return [each for each in vars(self).values() if isinstance(each, Module)]

    def named_modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Return the module and all parts of it with their paths."""
        yield path, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{path}.{name}" if path else name)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((name, each) for name, each in vars(self).items() if isinstance(each, Module))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Refuse: names would be needed."""
        raise UnsureError("Module.named_parameters")


class ModuleList(Module):
    """A list of parts."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.members = list(modules)

    def children(self) -> list[Module]:
        return self.members + super().children()

    def named_children(self) -> Iterator[tuple[str, Module]]:
        yield from ((str(index), each) for index, each in enumerate(self.members))
        yield from super().named_children()

    def append(self, module: Module) -> ModuleList:
        self.members.append(module)
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        self.members.extend(modules)
        return self

    def __iter__(self) -> Iterator[Module]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        return ModuleList(self.members[index]) if isinstance(index, slice) else self.members[index]


class Sequential(ModuleList):
    """Parts, one after the other."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for each in self.members:
            x = each(x)
        return x


class ModuleDict(Module):
    """Parts by name."""

    def __init__(self, modules: dict[str, Module] | None = None) -> None:
        super().__init__()
        self.members = dict(modules or {})

    def children(self) -> list[Module]:
        return list(self.members.values())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return iter(self.members.items())

    def __getitem__(self, name: str) -> Module:
        return self.members[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self.members[name] = module


class Linear(Module):
    """As torch's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        **_: Any,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight = weight(out_features, in_features)
        self.bias = weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    """As torch's."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **_: Any
    ) -> None:
        if not -num_embeddings <= (padding_idx or 0) < num_embeddings:
            raise UnsureError(f"padding_idx {padding_idx} of {num_embeddings} embeddings")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.weight = weight(num_embeddings, embedding_dim)

    def forward(self, index: Tensor) -> Tensor:
        return embedding(index, self.weight)


class LayerNorm(Module):
    """As torch's."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *_: Any,
        **__: Any,
    ) -> None:
        shape = (
            normalized_shape if isinstance(normalized_shape, tuple | list) else [normalized_shape]
        )
        self.normalized_shape, self.eps = tuple(shape), eps
        self.weight = weight(*shape) if elementwise_affine else None
        self.bias = weight(*shape) if elementwise_affine and bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x.like()


class RMSNorm(LayerNorm):
    """As torch's."""

    def __init__(
        self, normalized_shape: Any, eps: float | None = None, elementwise_affine: bool = True
    ) -> None:
        super().__init__(normalized_shape, eps or 0.0, elementwise_affine, bias=False)


class Conv1d(Module):
    """As torch's; its forward mixes tokens, which a cached graph does in an op alone."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        **_: Any,
    ) -> None:
        self.kernel_size, self.stride, self.padding, self.dilation = (
            each if isinstance(each, tuple) else (each,)
            for each in (kernel_size, stride, padding, dilation)
        )
        if in_channels % groups or out_channels % groups:
            raise UnsureError(f"{in_channels} and {out_channels} channels in {groups} groups")
        self.groups = groups
        self.weight = weight(out_channels, in_channels // groups, self.kernel_size[0])
        self.bias = weight(out_channels) if bias else None


class Identity(Module):
    """As torch's; dropout in a run, too."""

    def forward(self, x: Any) -> Any:
        return x


class Activation(Module):
    """A function of each element."""

    def forward(self, x: Tensor) -> Tensor:
        return FUNCTIONS["silu"](x)  # type: ignore[no-any-return]


_ACTIVATIONS = """
    ReLU ReLU6 SiLU GELU Tanh Sigmoid LeakyReLU Mish Softplus ELU Hardtanh
""".split()  # noqa: SIM905  (a list of words is read more easily so)

NAMES: dict[str, Any] = {
    **{name: type(name, (Activation,), {}) for name in _ACTIVATIONS},
    **dict.fromkeys(("Identity", "Dropout"), Identity),
    **{
        each.__name__: each
        for each in (Parameter, Buffer, Module, ModuleList, ModuleDict, Sequential, Linear)
        + (Embedding, LayerNorm, RMSNorm, Conv1d)
    },
}
"""What `torch.nn` has here."""
