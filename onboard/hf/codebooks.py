"""Transformers' models to which several rows of `input_ids` are one text, as models that read texts
like any other.

A position of such a text holds a code of each of several codebooks, and each codebook has an
embedding table and a head of its own. For us that is one token (`Codebooks`), and here its rows and
its logits become transformers' and back.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from onboard.modeling import ONE_CODEBOOK, Codebooks


def codebooks_of(model: nn.Module) -> Codebooks:
    """Return the codebooks of a transformers model, as its embedding tables and heads tell."""
    if (found := tables_and_heads(model)) is None:
        return ONE_CODEBOOK
    sizes: set[int] = {table.num_embeddings for table in found[0]}  # type: ignore[misc]
    return Codebooks(len(found[0]), min(sizes))


def tables_and_heads(model: Any) -> tuple[nn.ModuleList, nn.ModuleList] | None:
    """Return a transformers model's embedding tables and heads, one of each a codebook; None where
    it has one.
    """
    try:
        tables, heads = model.get_input_embeddings(), model.get_output_embeddings()
    except (AssertionError, AttributeError, NotImplementedError):  # it does not say where they are
        return None
    listed = isinstance(tables, nn.ModuleList) and isinstance(heads, nn.ModuleList)
    return (tables, heads) if listed and len(tables) == len(heads) > 1 else None


def places_of(model: nn.Module) -> tuple[str, str] | None:
    """Return the paths of `tables_and_heads` in a transformers model."""
    if (found := tables_and_heads(model)) is None:
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    return paths[id(found[0])], paths[id(found[1])]


def with_tokens(model: Any) -> Any:
    """Have a transformers model, in place, take tokens [batch, seq] and give logits [batch, seq,
    count * codes].

    One with a single codebook does so. Copies of the model do as it does. Raises `OnboardError` as
    `Codebooks` does.
    """
    if codebooks_of(model).count > 1:
        model.register_forward_pre_hook(_unpack, with_kwargs=True)
        model.register_forward_hook(_join)
    return model


def _unpack(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    books = codebooks_of(model)
    if args:
        return (books.rows(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "input_ids": books.rows(kwargs["input_ids"])}


def _join(model: nn.Module, _: Any, output: Any) -> None:
    output.logits = codebooks_of(model).join(output.logits)
