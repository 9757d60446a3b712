"""What must hold after a stage, whichever transforms ran in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import fx, nn

from onboard.errors import NoCachedFormError, OnboardError
from onboard.graph.cache_init.token_mixing import token_mixing
from onboard.graph.context import TransformContext
from onboard.graph.fx import ancestors, graph_modules, is_op, nodes_of
from onboard.graph.pattern_matcher.patterns import CASTS, aten
from onboard.graph.transform import Stages
from onboard.ops import attention_ops, stateful_ops


def check_stage(stage: Stages, module: nn.Module, context: TransformContext) -> None:
    """Record what a finished stage left behind as facts; raise `OnboardError` for what makes the
    model unusable.
    """
    if check := _CHECKS.get(stage):
        check(module, context)


def _attention_is_canonical(module: nn.Module, context: TransformContext) -> None:
    for _, gm in graph_modules(module):
        if left := _plain_attention(gm):
            context.facts.append(
                f"{len(left)} attention calls were not matched, for example {left[0].name}"
            )


def _plain_attention(gm: fx.GraphModule) -> list[fx.Node]:
    """Return attention that is not canonical: sdpa calls, and softmax results that go into a matrix
    product.
    """
    written_out = [
        node for node in nodes_of(gm, aten.softmax, aten._softmax) if _feeds_product(node)
    ]
    return [*nodes_of(gm, aten.scaled_dot_product_attention), *written_out]


def _feeds_product(node: fx.Node) -> bool:
    """Whether numbers go into a product with values of tokens; one with weights alone, as that of a
    vocabulary's probabilities with its embedding, treats each token by itself.
    """
    products = (aten.matmul, aten.bmm)
    return any(
        (is_op(user, *products) and not _is_of_weights(user, node))
        or (is_op(user, *CASTS) and _feeds_product(user))
        for user in node.users
    )


def _is_of_weights(product: fx.Node, factor: fx.Node) -> bool:
    """Whether the other factor of a product is computed of nothing that the graph is given."""
    others = [each for each in product.all_input_nodes if each is not factor]
    return bool(others) and all(each.op != "placeholder" for each in ancestors(others))


def _weights_are_real(module: nn.Module, context: TransformContext) -> None:
    # A run that stops before load_weights has no weights to check.
    if not any(entry.key == "load_weights" and entry.enabled for entry in context.history):
        return
    tensors = chain(module.named_parameters(), module.named_buffers())
    if missing := [name for name, tensor in tensors if tensor.is_meta]:
        raise OnboardError(
            f"{len(missing)} tensors have no weights after loading, for example {missing[0]}",
            hint="The checkpoint and the model file disagree; generate the model again",
        )


def _attention_is_cached(module: nn.Module, context: TransformContext) -> None:
    if not any(
        entry.key == "insert_cached_attention" and entry.enabled for entry in context.history
    ):
        return
    _recurrences_are_cached(module)
    if left := uncached_attention(module):
        context.facts.append(
            f"{len(left)} attention calls have no cache, for example {left[0].name}"
        )
        return
    if context.factory.mode == "hf":
        # transformers' own code may sort tokens and put them back, and its logits are compared when
        # it loads
        return
    for _, gm in graph_modules(module):
        _tokens_are_apart(gm, context)


def _tokens_are_apart(gm: fx.GraphModule, context: TransformContext) -> None:
    try:
        mixing = token_mixing(gm, context.device)
    except Exception as error:  # operators run on numbers that are not the model's
        context.facts.append(
            f"whether the graph mixes tokens was not found out: {type(error).__name__}: {error}"
        )
        return
    if mixing is not None:
        raise NoCachedFormError(
            f"{mixing} mixes the tokens of a step and has no cached form, so the model cannot generate yet",
            hint="Its model file and equivalence tests are complete; run another architecture",
        )


def _recurrences_are_cached(module: nn.Module) -> None:
    """Refuse mixers without a cached form: over a row of several sequences they would mix these
    up.
    """
    if left := uncached_mixers(module):
        op = str(left[0].target).removeprefix("onboard.").removesuffix(".default")
        raise NoCachedFormError(
            f"{len(left)} calls of {op} have no cached form, so the model cannot generate yet",
            hint="Its model file and equivalence tests are complete; run another architecture",
        )


def uncached_mixers(module: nn.Module) -> list[fx.Node]:
    """Return the calls of other mixers than attention that see only the tokens of their own
    step.
    """
    mixers = [getattr(torch.ops.onboard, name) for name in sorted(stateful_ops())]
    graphs = [gm for _, gm in graph_modules(module)]
    convolutions = [
        node for gm in graphs for node in nodes_of(gm, aten.conv1d) if _sees_several(node)
    ]
    return [*(node for gm in graphs for node in nodes_of(gm, *mixers)), *convolutions]


def _sees_several(convolution: fx.Node) -> bool:
    weight = convolution.args[1]
    return isinstance(weight, fx.Node) and int(weight.meta["val"].shape[-1]) > 1


def uncached_attention(module: nn.Module) -> list[fx.Node]:
    """Return the attention calls, in any form, that see only the tokens of their own step."""
    canonical = [
        getattr(torch.ops.onboard, name) for name in sorted(attention_ops() - stateful_ops())
    ]
    return [
        node
        for _, gm in graph_modules(module)
        for node in (*nodes_of(gm, *canonical), *_plain_attention(gm))
    ]


_CHECKS: dict[Stages, Callable[[nn.Module, TransformContext], None]] = {
    Stages.PATTERN_MATCHER: _attention_is_canonical,
    Stages.WEIGHT_LOAD: _weights_are_real,
    Stages.CACHE_INIT: _attention_is_cached,
}
