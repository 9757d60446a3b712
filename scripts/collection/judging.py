"""Weights and logits of a repository's own class, with the transformers of its year."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from scripts.collection.own_model import own_model
from scripts.collection.table import table


def weights(out: Path, *names: str) -> None:
    """Write random weights of the named models."""
    for name in names:
        try:
            _save_weights(out / name)
        except Exception as error:  # the next one may work
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")


def _save_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = own_model(folder)
    model.tie_weights()  # as loading does, whatever the constructor has left
    generator = torch.Generator().manual_seed(1)
    seen: dict[int, str] = {}
    tensors = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, tensor in model.state_dict(keep_vars=True).items():
        if seen.setdefault(id(tensor), key) == key:
            if key in parameters:
                tensor.data.copy_(_random(key, tensor, generator))
            tensors[key] = tensor.detach().float().contiguous().clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    print(folder.name, len(tensors), "tensors")


def stand_in(folder: Path) -> None:
    """Write a weight file of one tensor, for a model whose own class cannot be made: why it is refused
    is for its code to say.
    """
    import torch
    from safetensors.torch import save_file

    save_file({"none": torch.zeros(1)}, str(folder / "model.safetensors"))


def _random(key: str, tensor: Any, generator: Any) -> Any:
    import torch

    if tensor.dim() > 1:
        return torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    center = 0.0 if key.endswith("bias") else 1.0
    return torch.randn(tensor.shape, generator=generator) * 0.3 + center


def judge(out: Path, name: str, logits: Path) -> None:
    """Add the logits [batch, length, vocabulary] of the repository's own class to a file."""
    import torch
    from safetensors.torch import load_file, save_file

    model = own_model(out / name)
    own = model.state_dict()
    loaded = load_file(str(out / name / "model.safetensors"))
    missing = [
        key for key in model.load_state_dict(loaded, strict=False).missing_keys if key in own
    ]
    print("not in the file:", missing)
    model.tie_weights()
    ids = load_file(str(logits))["ids"]
    model = model.float().eval()
    with torch.no_grad():  # text by text: some code takes several only with their mask
        of_last = _whole(model, ids[:1]).shape[1] == 1
        of_text = _by_prefix if of_last or table()[name].get("by_prefix") else _whole
        texts = [of_text(model, text[None]) for text in ids]
    save_file({"ids": ids, "logits": torch.cat(texts).contiguous()}, str(logits))


def _whole(model: Any, text: Any) -> Any:
    """Return the logits of a text, [1, length, vocabulary], or [1, 1, vocabulary] of its last token
    where its class gives no others.
    """
    taken = inspect.signature(model.forward).parameters.values()
    caches = any(item.name == "use_cache" or item.kind is item.VAR_KEYWORD for item in taken)
    how = {"use_cache": False} if caches else {}
    try:
        output = model(input_ids=text, **how)
    except TypeError:  # it wants images, which its language model does without
        output = model.language_model(input_ids=text, **how)
    except AttributeError:  # it wants to be told that all tokens count
        output = model(input_ids=text, attention_mask=text.new_ones(text.shape), **how)
    except IndexError:  # it wants to keep what it computes
        output = model(input_ids=text)
    except RuntimeError:  # it wants to be told where its tokens are
        output = model(input_ids=text, position_ids=_positions(text), **how)
    if isinstance(output, (tuple, dict)) and not hasattr(output, "logits"):
        parts = output if isinstance(output, tuple) else [output["logits"]]
        size = model.config.vocab_size
        output = next(
            item
            for item in parts
            if hasattr(item, "logits") or getattr(item, "shape", (0,))[-1:] == (size,)
        )
    logits = getattr(output, "logits", output)
    return logits.float() if logits.dim() == 3 else logits[:, None].float()


def _positions(text: Any) -> Any:
    import torch

    return torch.arange(text.shape[1]).expand_as(text)


def _by_prefix(model: Any, text: Any) -> Any:
    """Return of each token the last logits of the text up to it: what comes later changes what a
    model whose tables depend on the text's length says of earlier tokens.
    """
    import torch

    rows = [_whole(model, text[:, :end])[:, -1:] for end in range(1, text.shape[1] + 1)]
    return torch.cat(rows, dim=1)
