"""Which tensors of a checkpoint are heads for multi-token prediction, by their names and shapes.

DeepSeek-AI 2024 (arXiv:2412.19437), section 2.2: a head joins the norm of a hidden state and the
norm of the next token's embedding by a projection to half the size, runs one layer like the model's
own on it, and shares the embedding and the output layer with the model. Releases name its tensors
in several ways; the projection's shape and those of the layer are the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from onboard.errors import UsageError
from onboard.graph.weight_load.safetensors_folder import TensorMeta

Shapes = Mapping[str, tuple[int, ...]]

_OF_EMBEDDING = ("enorm", "emb", "token")
_OF_HIDDEN = ("hnorm", "hidden")
_HIDDEN_FIRST = ("input_proj",)
"""What projections are called that read the hidden state before the embedding; others read the
embedding first. No shape tells this.
"""
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""What configs call the number of heads."""
_WITHOUT = "Use ngram, or a small model, to draft"


@dataclass(frozen=True)
class HeadTensors:
    """The names of one head's tensors."""

    layer: int
    """Index of the model's layer that the head's own is like."""
    block: Mapping[str, str]
    """Name in that layer -> name in the checkpoint."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    projection_bias: str | None
    final_norm: str | None
    """None: what comes out of the head is normed as what comes out of the model."""

    @property
    def hidden_first(self) -> bool:
        """Whether the projection reads the hidden state before the embedding."""
        return any(word in self.projection.split(".") for word in _HIDDEN_FIRST)


def find_heads(
    layers: Sequence[nn.Module],
    hidden_size: int,
    used: Iterable[str],
    available: Mapping[str, TensorMeta],
) -> list[HeadTensors]:
    """Return the heads of a checkpoint, the one for the nearest token first.

    Args:
        layers: the model's own, on any device.
        hidden_size: of the model.
        used: names of the checkpoint that the model itself reads.
        available: all names of the checkpoint, as an unquantised model has them.

    Raises:
        UsageError: the checkpoint has no head, or one that is not made like this.
    """
    taken = set(used)
    shapes = {name: meta.shape for name, meta in available.items() if name not in taken}
    blocks = _blocks(layers, shapes)
    of_blocks = {name for _, block in blocks.values() for name in block.values()}
    wanted = (hidden_size, 2 * hidden_size)
    projections = [
        name for name, shape in shapes.items() if shape == wanted and name not in of_blocks
    ]
    if not projections:
        raise UsageError("the checkpoint has no head for multi-token prediction", hint=_WITHOUT)
    heads = []
    for projection in sorted(projections, key=_order):
        own = [prefix for prefix in blocks if _belongs(prefix, projection)]
        if not own:
            continue  # a head of another kind, or a tensor of this shape in something else
        first, second, final = _norms(projection, hidden_size, shapes, of_blocks)
        bias = projection.removesuffix("weight") + "bias"
        own_bias = bias if bias in shapes else None
        heads += [
            HeadTensors(*blocks[prefix], first, second, projection, own_bias, final)
            for prefix in sorted(own, key=_order)
        ]
    if not heads:
        raise UsageError(
            f"the head of {min(projections, key=_order)} is like none of the model's layers",
            hint=_WITHOUT,
        )
    return heads


def heads_of_config(
    config: Mapping[str, object], path: str, layers: Sequence[nn.Module]
) -> list[HeadTensors]:
    """Return as many heads as a config says, for random weights: each has a layer like the last one of
    the model's `layers`, and tensors whose names begin with `path`, behind those of the layers.

    Raises:
        UsageError: the config names none.
    """
    counts = (config.get(word) for word in _COUNTS)
    count = next((each for each in counts if isinstance(each, int) and each > 0), 0)
    if not count:
        raise UsageError(
            f"the config has none of {', '.join(_COUNTS)}, so random weights have no head for multi-token prediction",
            hint=_WITHOUT,
        )
    last = len(layers) - 1
    return [
        _imagined(f"{path}.{len(layers) + number}.", last, layers[last]) for number in range(count)
    ]


def _imagined(at: str, index: int, layer: nn.Module) -> HeadTensors:
    return HeadTensors(
        layer=index,
        block={name: at + name for name in layer.state_dict()},
        embedding_norm=f"{at}enorm.weight",
        hidden_norm=f"{at}hnorm.weight",
        projection=f"{at}eh_proj.weight",
        projection_bias=None,
        final_norm=f"{at}shared_head.norm.weight",
    )


def _blocks(
    layers: Sequence[nn.Module], shapes: Shapes
) -> dict[str, tuple[int, Mapping[str, str]]]:
    """Return the layers that lie in the checkpoint besides the model's: what their names begin with
    -> (the model's last layer like it, name there -> name in the checkpoint).
    """
    found: dict[str, tuple[int, Mapping[str, str]]] = {}
    for index in reversed(range(len(layers))):
        own = {name: tuple(tensor.shape) for name, tensor in layers[index].state_dict().items()}
        first = next(iter(own), "")
        prefixes = [name.removesuffix(first) for name in shapes if name.endswith(f".{first}")]
        for prefix in prefixes:
            if prefix not in found and all(
                shapes.get(prefix + name) == shape for name, shape in own.items()
            ):
                found[prefix] = index, {name: prefix + name for name in own}
    return found


def _norms(
    projection: str, hidden_size: int, shapes: Shapes, of_blocks: Iterable[str]
) -> tuple[str, str, str | None]:
    """Return the names of a head's norms: of the embedding, of the hidden state, and the last one.

    Raises `UsageError` unless it has one of each input.
    """
    others = set(shapes) - set(of_blocks)
    norms = [
        name
        for name in sorted(others)
        if shapes[name] == (hidden_size,)
        and name.endswith(".weight")
        and _belongs(name, projection)
    ]
    of_embedding = [name for name in norms if _says(name, _OF_EMBEDDING)]
    of_hidden = [name for name in norms if _says(name, _OF_HIDDEN) and name not in of_embedding]
    final = [name for name in norms if name not in of_embedding + of_hidden]
    if len(of_embedding) != 1 or len(of_hidden) != 1 or len(final) > 1:
        raise UsageError(
            f"the head of {projection} has {len(norms)} norms ({', '.join(norms)}), and they do not tell what "
            "they are of",
            hint=_WITHOUT,
        )
    return of_embedding[0], of_hidden[0], final[0] if final else None


def _says(name: str, words: Sequence[str]) -> bool:
    """Tell whether the module of a tensor, by the last two words of its path, is one of these."""
    return any(word in part for part in name.split(".")[-3:-1] for word in words)


def _belongs(name: str, projection: str) -> bool:
    """Tell whether a tensor, or a layer by what its names begin with, is of the projection's head:
    it has the same number, or lies beside it where heads have none.
    """
    if (number := _number(projection)) is not None:
        return _number(name) == number
    return name.startswith(projection.rsplit(".", 2)[0] + ".")


def _number(name: str) -> int | None:
    """Return the last number of a dotted path, None without any."""
    return next((int(part) for part in reversed(name.split(".")) if part.isdecimal()), None)


def _order(name: str) -> tuple[int, str]:
    return -1 if (number := _number(name)) is None else number, name
