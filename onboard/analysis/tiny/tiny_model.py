"""A tiny random model of a checkpoint's architecture: the object that every probe and proof looks
at.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.analysis import repository
from onboard.analysis.behaviour.code_numbers import code_of, literals
from onboard.analysis.repository_classes import hands_no_mask
from onboard.analysis.tiny.own_failures import refuse_own_code
from onboard.analysis.tiny.tiny_config import (
    KEPT_HEADS,
    KEPT_LAYERS,
    KEPT_SIZES,
    WAYS_TO_KEEP,
    one_line,
    tiny_config,
)
from onboard.analysis.tiny.tiny_sizes import ORIGINAL_POSITIONS, VOCABULARY, WINDOW
from onboard.errors import ConsentRequiredError, OnboardError
from onboard.hf.architecture import (
    causal_lm_class,
    decoder_config,
    language_model_types,
    text_config,
)
from onboard.hf.codebooks import codebooks_of
from onboard.hf.copied_model import copied
from onboard.hf.hf_model import build_reference
from onboard.hf.json_floats import json_floats
from onboard.hf.parameters_on import without_memory
from onboard.hub import with_own_type
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

__all__ = [
    "ORIGINAL_POSITIONS",
    "VOCABULARY",
    "WINDOW",
    "one_line",
    "tiny_config",
]  # where others look for them
_NORM = 0.7
_LAST = 8
"""Tokens: what becomes of one may show only once a block of them is whole."""
_LEAST, _MOST = 16, 1 << 16
"""Numbers that may be sizes of the checkpoint, and no others that code has."""
_ALL, _MOST_LAYERS = 10**6, 16
"""Layers: more than any model has, and those of the longest small model that is tried."""
_BELOW_LENGTH: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VOCABULARY = frozenset({"vocab_size", "padded_vocab_size"})


def load_config(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the transformers config object of a parsed config.json whose architecture is a causal
    language model.

    Raises:
        ConsentRequiredError: the model needs code from its repository.
        OnboardError: unknown or non-causal architecture, or values that transformers refuses.
    """
    config = with_own_type(config)
    model_type = config.get("model_type")
    own_code = repository.is_installed(model_type)
    if config.get("auto_map") and not own_code and model_type not in language_model_types():
        _refuse_remote_code(trust_remote_code)
    _check_names(model_type, config.get("architectures"))
    if model_type not in CONFIG_MAPPING_NAMES and not own_code:
        raise OnboardError(
            f"transformers has no architecture {model_type!r}", hint="Upgrade transformers"
        )
    values = {key: json_floats(value) for key, value in config.items() if key != "model_type"}
    try:
        made = AutoConfig.for_model(model_type, **values)
    except Exception as error:
        raise OnboardError(
            f"transformers refuses this {model_type} config: {one_line(error)}"
        ) from error
    causal_lm_class(made)
    return decoder_config(made)


def build_tiny(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """Return the tiny transformers model: float32, evaluation mode, eager attention, every
    parameter random.

    Raises:
        OnboardError: the code of a repository does not run.
    """
    small = tiny_config(config)
    model = build_small(small, seed)
    if not repository.is_installed(config.model_type):
        return model
    model = _with_all_classes(config, model, seed)
    if runs_as_it_is(model):
        return _with_whole_texts(config, model, seed)
    if (kept := _with_kept_heads(config, seed)) is not None:
        return kept
    if (longer := _with_more_layers(config, seed)) is not None:
        return longer
    if (kept := _with_kept_sizes(config, model, seed)) is not None:
        return kept
    refuse_own_code(model, from_zero(prompt(0, seed=3, tokens=vocabulary(model))))
    return model


def _with_all_classes(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module:
    """Return a small model with more layers where it lacks classes of the one with all layers: what
    a layer is made of may follow from its number.
    """
    try:
        with without_memory(computing=True):
            whole = build_reference(tiny_config(config, layers=_ALL), dtype=torch.float32)
    except Exception:
        return model  # what is in the way shows where the small model runs
    wanted = {type(module) for module in whole.modules()}
    for count in range(2, _MOST_LAYERS + 1):
        if wanted <= {type(module) for module in model.modules()}:
            return model
        KEPT_LAYERS[type(config)] = count
        model = build_small(tiny_config(config), seed)
    return model


def _with_whole_texts(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module:
    """Return a small model with the checkpoint's vocabulary where one with a small one has logits of
    no more tokens than it has words: code may cut the wrong axis, which no text is too long for.
    """
    words = vocabulary(model)
    text = torch.arange(words + 1).remainder(words)[None]
    try:
        with torch.no_grad():
            rows = model(input_ids=text, use_cache=False).logits.shape[1]
    except Exception:  # the text may be too long
        return model
    if rows != words:
        return model
    KEPT_SIZES[type(config)] = KEPT_SIZES.get(type(config), frozenset()) | _VOCABULARY
    return build_small(tiny_config(config), seed)


def _with_kept_heads(config: PretrainedConfig, seed: int) -> nn.Module | None:
    """Return a small model that keeps of the checkpoint's heads what its code needs to run; None
    where that does not help.
    """
    for kept in WAYS_TO_KEEP:
        KEPT_HEADS[type(config)] = kept
        model = build_small(tiny_config(config), seed)
        if runs_as_it_is(model):
            return model
    del KEPT_HEADS[type(config)]
    return None


def _with_more_layers(config: PretrainedConfig, seed: int) -> nn.Module | None:
    """Return a small model with as many layers as its code needs to run; None where that does not
    help.
    """
    for count in range(3, _MOST_LAYERS + 1):
        KEPT_LAYERS[type(config)] = count
        model = build_small(tiny_config(config), seed)
        if runs_as_it_is(model):
            return model
    del KEPT_LAYERS[type(config)]
    return None


def _with_kept_sizes(config: PretrainedConfig, model: nn.Module, seed: int) -> nn.Module | None:
    """Return a small model that keeps the sizes that stand in its code as numbers; None where that
    does not help.
    """
    full, small = config.to_dict(), tiny_config(config).to_dict()
    written = {number for number in literals(*code_of(model)) if _LEAST < number <= _MOST}
    changed = (name for name, value in full.items() if value != small.get(name))
    names = frozenset(name for name in changed if type(full[name]) is int and full[name] in written)
    if not names:
        return None
    KEPT_SIZES[type(config)] = names
    try:
        kept = build_small(tiny_config(config), seed)
        if runs_as_it_is(kept):
            return kept
    except OnboardError:
        pass  # what is said of the small model says more
    del KEPT_SIZES[type(config)]
    return None


def build_small(
    small: PretrainedConfig, seed: int = 0, attention: str | None = "eager"
) -> nn.Module:
    """Return the model of a config that is small already, as `build_tiny` does; with the attention
    that transformers chooses, if `attention` is None.

    What the config was before the model's constructor, which may change it, is `made_with(model)`.
    """
    before = copy.deepcopy(small)
    try:
        given = {"attn_implementation": attention} if attention else {}
        model = build_reference(small, dtype=torch.float32, **given)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(
            f"transformers cannot build {small.model_type}: {one_line(error)}"
        ) from error
    randomize(model, seed)
    vars(model)["made_with"] = before
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def made_with(model: nn.Module) -> Any:
    """Return the config that a small model was made with."""
    return vars(model)["made_with"]


def randomize(model: nn.Module, seed: int, center: float = _NORM) -> None:
    """Fill every floating-point tensor of the state dict, norm weights, biases and sinks too, with
    random values.

    Those of vectors lie around `center`, those of norms around 0.7. Recurrent mixers take their
    decay and their step from vectors through exp and softplus: with 0.7 they forget within a few
    tokens, with a negative center they remember for long. Norms of another size would let rounding
    errors grow from layer to layer. Tables that the model works out for itself (decays by distance)
    stay: with other numbers it would not be the model that it is.
    """
    tables = {name for name, buffer in model.named_buffers() if is_table(buffer)}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name not in tables:
                around = _NORM if name.endswith(".weight") else center
                scale, shift = (
                    (tensor.shape[-1] ** -0.5, 0.0) if tensor.dim() > 1 else (0.3, around)
                )
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + shift)
    fill_integers(model, generator)


def fill_integers(model: nn.Module, generator: torch.Generator) -> None:
    """Fill the tables of integers that checkpoints fill with zeros and ones, which tables of any
    numbers may have.

    So an expert of a token by a table is one of two, not the first for all.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dtype == torch.int64 and tensor.dim() > 1 and not is_table(tensor):
                tensor.copy_(torch.randint(2, tensor.shape, generator=generator))


def is_table(buffer: torch.Tensor) -> bool:
    """Whether a buffer was computed: what checkpoints fill starts as one number everywhere, and
    a single number as 0, 1 or without bound.
    """
    if buffer.dim() == 0:
        return not (buffer.isinf() or float(buffer) in (0.0, 1.0))
    return buffer.numel() > 1 and bool((buffer != buffer.flatten()[0]).any())


def layer_kind_names(config: PretrainedConfig) -> list[str]:
    """Return the kind of each decoder layer, as the config's per-layer lists tell it."""
    config = text_config(config)
    layers = config.num_hidden_layers
    types = _per_layer(config, "layer_types") or ["full_attention"] * layers
    rope = _per_layer(config, "no_rope_layers") or [True] * layers
    return [
        str(kind) if turned else f"{kind}_no_rope" for kind, turned in zip(types, rope, strict=True)
    ]


def _per_layer(config: PretrainedConfig, name: str) -> list[Any] | None:
    value = getattr(config, name, None)
    return (
        list(value)
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
        else None
    )


def vocabulary(model: nn.Module) -> int:
    """Return how many tokens a tiny transformers model has."""
    codebooks = codebooks_of(model)
    return VOCABULARY if codebooks.count == 1 else codebooks.tokens


def prompt(
    start: int, length: int = 21, batch: int = 2, seed: int = 0, tokens: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `position_ids` [batch, length]; row i begins at position start + 3
    i.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(tokens, (batch, length), generator=generator)
    positions = start + 3 * torch.arange(batch).unsqueeze(1) + torch.arange(length)
    return {"input_ids": ids, "position_ids": positions}


def prompts(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts for a transformers model, on both sides of `ORIGINAL_POSITIONS`.

    A model that counts positions by itself, or is causal nowhere else, gets rows that begin at
    zero.
    """
    tokens = vocabulary(model)
    if not begins_at_zero(model):
        return [
            prompt(2, seed=1, tokens=tokens),
            prompt(ORIGINAL_POSITIONS + 6, seed=2, tokens=tokens),
        ]
    long = prompt(0, length=ORIGINAL_POSITIONS + 6, seed=2, tokens=tokens)
    return [from_zero(prompt(0, seed=1, tokens=tokens)), from_zero(long)]


def counts_positions(model: nn.Module) -> bool:
    """Whether a transformers model pays no heed to `position_ids`: it counts tokens, or knows no
    positions.
    """
    inputs = prompt(0, seed=3, tokens=vocabulary(model))
    stretched = {**inputs, "position_ids": inputs["position_ids"] * 2}
    if positions_below_length(model):
        inputs = from_zero(inputs)
        stretched = {**inputs, "position_ids": inputs["position_ids"].flip(1)}
    # Without one, gaps count as the borders of packed sequences
    mask = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        one, other = (
            model(**item, attention_mask=mask, use_cache=False).logits
            for item in (inputs, stretched)
        )
    return bool(torch.equal(one, other))


def runs_as_it_is(model: nn.Module) -> bool:
    """Whether a transformers model runs with tokens alone; where it needs a mask or positions, it is
    given them from now on, and no mask where one token has none. A copy is run: a first run may
    change weights, or leave things behind.
    """
    model = copied(model)
    inputs = from_zero(prompt(0, seed=3, tokens=vocabulary(model)))
    mask = torch.ones_like(inputs["input_ids"])
    if _runs(model, inputs):
        one = {key: tensor[:, :1] for key, tensor in inputs.items()}
        if hands_no_mask(model, mask) and not _runs(model, {**inputs, "attention_mask": mask}):
            repository.spare_masks(type(model), always=True)
        elif _runs(model, one) and not _runs(model, {**one, "attention_mask": mask[:, :1]}):
            repository.spare_masks(type(model))
    elif _runs(model, {**inputs, "attention_mask": mask}):
        repository.give_masks(type(model))
    else:
        return False
    if not _runs(model, {"input_ids": inputs["input_ids"]}):
        repository.give_positions(type(model))
    return True


def begins_at_zero(model: nn.Module) -> bool:
    """Whether a transformers model wants texts that begin at position zero.

    It counts positions by itself; or it has a table of as many positions as the text has tokens;
    or it counts blocks of tokens from the text's first one on and shows them by position, so that
    elsewhere, and only there, a token changes the logits of those before it.
    """
    if positions_below_length(model):
        return True
    here, there = (prompt(start, batch=1, seed=3, tokens=vocabulary(model)) for start in (0, 9))
    return counts_positions(model) or (sees_ahead(model, there) and not sees_ahead(model, here))


def positions_below_length(model: nn.Module) -> bool:
    """Whether a transformers model fails at positions that its texts are too short for, or that
    are so far from the text's first: it cuts its table of positions to the text's length.
    """
    if model not in _BELOW_LENGTH:
        there = prompt(9, batch=1, seed=3, tokens=vocabulary(model))
        apart = {**there, "position_ids": there["position_ids"] * 2}
        fails = not (_runs(model, there) and _runs(model, apart))
        _BELOW_LENGTH[model] = fails and _runs(model, from_zero(there))
    return _BELOW_LENGTH[model]


@torch.no_grad()
def _runs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    try:
        model(**inputs, use_cache=False)
    except Exception:  # whatever a model's own code raises
        return False
    return True


def sees_ahead(model: nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether the last tokens of a prompt change the logits of those before them."""
    later = {**inputs, "input_ids": inputs["input_ids"].clone()}
    later["input_ids"][:, -_LAST:] = (later["input_ids"][:, -_LAST:] + 7) % vocabulary(model)
    with torch.no_grad():
        one, other = (model(**item, use_cache=False).logits[:, :-_LAST] for item in (inputs, later))
    return not rmse_ratio(one, other) <= SAME


def first_token_is_plain(model: nn.Module) -> bool:
    """Whether a transformers model gives a text of one token the logits that the first token of a
    longer one has.
    """
    same = []
    for inputs in prompts(model):
        first = {key: tensor[:, :1] for key, tensor in inputs.items()}
        with torch.no_grad():
            one, other = (model(**item, use_cache=False).logits[:, :1] for item in (first, inputs))
        same.append(torch.allclose(one, other, rtol=1e-5, atol=1e-5))
    return all(same)


def from_zero(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a prompt with the positions that a model counts by itself."""
    batch, length = inputs["input_ids"].shape
    return {**inputs, "position_ids": torch.arange(length).expand(batch, length).contiguous()}


def _refuse_remote_code(trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise ConsentRequiredError(
            "this model runs code from its repository",
            hint="Read that code, then pass --trust-remote-code",
        )
    raise OnboardError(
        "the model's own code was not imported",
        hint="Onboard it with the command, which does so apart",
    )


def _check_names(model_type: object, architectures: object) -> None:
    names = architectures if isinstance(architectures, list) else []
    for name in (model_type, *names):
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name.replace("-", "_")):
            raise OnboardError(
                f"config.json names an architecture {name!r}, which is not an identifier"
            )
