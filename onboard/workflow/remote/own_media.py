"""Prompts with images of a model whose processor and towers are code of its repository: in the child
process that may run it.

The processor makes token ids of a text and its images, the model's own `generate` the embeddings that
it hands to its language model; there it is stopped. Only what lies beside the language model has
weights, and the embedding of tokens.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from onboard.errors import OnboardError
from onboard.graph.weight_load.weight_names import match_names, module_renaming
from onboard.verify.own_logits import Stored, StoredWeights

_MOST_TOKENS = 2**20
_OF_NO_MODEL = {
    *("dtype", "torch_dtype", "_name_or_path", "transformers_version"),
    *("_attn_implementation", "_attn_implementation_autoset"),
}
"""Fields of configs that change nothing of what is computed."""
_TRIED = (3, 5, 4)
"""Tokens of the text that is tried without an image."""


class Opening(BaseModel):
    """What a model is opened with."""

    inner: dict[str, Any]
    """The config of the language model."""
    prefix: str
    """What the names of its weights begin with."""
    stored: dict[str, Stored]
    dtype: str
    files: dict[str, int]
    """Name -> number of an open file that belongs beside the code: vocabularies."""


class Asked(BaseModel):
    """A text with images, RGB bytes one after the other in an open file; what the language model is
    handed is written to another.
    """

    text: str
    sizes: list[tuple[int, int]]
    """Width and height of each image."""
    images: int
    output: int


class _HandedOver(Exception):
    """The model called its language model."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class OwnMedia:
    """A repository's processor and model, the latter without its language model's weights."""

    def __init__(self, folder: Path, config: Mapping[str, Any], opening: Opening) -> None:
        from onboard.hf.old.flash_by_name import allow_flash_by_name

        for name, file in opening.files.items():
            (folder / name).write_bytes(os.pread(file, os.fstat(file).st_size, 0))
        self.facts = allow_flash_by_name()
        self.dtype = getattr(torch, opening.dtype)
        _import_processors()
        self.model = _model(folder, config, self.facts)
        self.processor = _processor(folder, self.facts)
        self.inner = _language_model(self.model, opening)
        kept = f"{opening.prefix}{self.embedding}."
        _fill(self.model, opening.prefix, kept, StoredWeights(opening.stored), self.dtype)
        self._check_text_alone()

    @property
    def embedding(self) -> str:
        """The path of the embedding of tokens in the language model."""
        wanted = self.inner.get_input_embeddings()
        modules: list[tuple[str, nn.Module]] = list(self.inner.named_modules())
        return next(path for path, each in modules if each is wanted)

    @torch.no_grad()
    def read(self, asked: Asked) -> list[int]:
        """Write the embeddings [tokens, hidden] float32; return the token ids."""
        given = self._processed(asked)
        ids = torch.as_tensor(given["input_ids"])
        if asked.sizes and not given.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
            raise OnboardError(
                "the processor finds no place for images in the text",
                hint="Have the chat template write it, or give the text its placeholders",
            )
        if ids.shape[0] != 1 or ids.shape[1] > _MOST_TOKENS:
            raise OnboardError(f"the processor makes token ids of shape {list(ids.shape)}")
        embeds = self._handed({name: self._cast(value) for name, value in given.items()})
        if embeds.shape[:2] != ids.shape:
            raise OnboardError(
                f"the processor makes {ids.shape[1]} tokens, and the language model is handed"
                f" {embeds.shape[1]}"
            )
        os.ftruncate(asked.output, 0)
        os.pwrite(asked.output, embeds[0].float().contiguous().numpy().tobytes(), 0)
        return [int(each) for each in ids[0]]

    def _processed(self, asked: Asked) -> dict[str, Any]:
        images = _images(asked)
        try:
            return dict(self.processor(text=[asked.text], images=images, return_tensors="pt"))
        except Exception as error:  # placeholders and images that do not match, odd sizes, ...
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            name = type(self.processor).__name__
            raise OnboardError(f"{name} refuses these images ({reason})") from error

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value

    def _handed(self, given: Mapping[str, Any]) -> torch.Tensor:
        """Return the embeddings [1, tokens, hidden] that the language model is handed."""
        handed = _handed_over(self.model, self.inner, given)
        embeds = handed.pop("inputs_embeds", None)
        if embeds is None:
            embeds = self.inner.get_input_embeddings()(handed["input_ids"])
        handed.pop("input_ids", None)
        _check_plain(handed, embeds.shape[1])
        return embeds  # type: ignore[no-any-return]

    @torch.no_grad()
    def _check_text_alone(self) -> None:
        """Raise `OnboardError` where a text without images is more than its language model's."""
        ids = torch.tensor([_TRIED])
        own = self.inner.get_input_embeddings()(ids)
        try:
            handed = self._handed({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        except OnboardError as error:
            self.facts.append(f"a text without images was not tried: {error.message}")
            return
        if not torch.equal(handed, own):
            raise OnboardError(
                f"{type(self.model).__name__} changes the embeddings of a text without images",
                hint="Its language model alone is another model",
            )


def _handed_over(model: Any, inner: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the first call of the language model."""

    def stop(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert not args, "the language model is called by position"
        raise _HandedOver(dict(kwargs))

    parts = {id(each): each for each in (inner, inner.get_decoder())}
    handles = [
        each.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        for each in parts.values()
    ]
    try:
        model.generate(**given, max_new_tokens=1, do_sample=False)
    except _HandedOver as handed:
        return handed.arguments
    except Exception as error:  # whatever the repository's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise OnboardError(f"{type(model).__name__}.generate fails ({reason})") from error
    finally:
        for handle in handles:
            handle.remove()
    raise OnboardError(f"{type(model).__name__}.generate does not call its language model")


def _check_plain(handed: Mapping[str, Any], length: int) -> None:
    """Raise `OnboardError` unless the language model is asked for nothing but its text: positions
    from the first, a causal mask, no further tensor.
    """
    count = torch.arange(length)
    plain: dict[str, Callable[[torch.Tensor], bool]] = {
        "position_ids": lambda value: torch.equal(value.flatten(), count),
        "cache_position": lambda value: torch.equal(value, count),
        "attention_mask": lambda value: value.dim() == 2 and bool(value.all()),
    }
    for name, value in handed.items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and not (name in plain and plain[name](value)):
            raise OnboardError(f"the language model gets {name}, which is more than a text")


def _images(asked: Asked) -> list[Any]:
    from PIL import Image

    found, offset = [], 0
    for width, height in asked.sizes:
        pixels = os.pread(asked.images, 3 * width * height, offset)
        found.append(Image.frombytes("RGB", (width, height), pixels))
        offset += len(pixels)
    return found


def _model(folder: Path, config: Mapping[str, Any], facts: list[str]) -> Any:
    from onboard.analysis.repository import build_without_memory, install

    facts += install(folder, config)
    return build_without_memory(config).eval().requires_grad_(False)


def _language_model(model: Any, opening: Opening) -> Any:
    """Return the language model inside; raise `OnboardError` unless it is that of its config."""
    path = opening.prefix.rstrip(".")
    inner = dict(model.named_modules()).get(path)
    named = opening.inner.get("architectures")
    if inner is None or named != [type(inner).__name__]:
        raise OnboardError(
            f"{type(model).__name__}.{path} is {type(inner).__name__}, and config.json says {named}"
        )
    config: Any = inner.config
    told = type(config).from_dict(deepcopy(opening.inner)).to_dict()
    for name, value in config.to_dict().items():
        if name not in _OF_NO_MODEL and told.get(name) != value:
            raise OnboardError(
                f"{type(model).__name__} gives its language model {name} {value!r:.60}, and"
                f" config.json says {told.get(name)!r:.60}"
            )
    return inner


def _fill(model: Any, prefix: str, kept: str, weights: StoredWeights, dtype: torch.dtype) -> None:
    """Give the model the weights of all that does not begin with `prefix`, and what begins with
    `kept`: the embedding of tokens.
    """
    state = model.state_dict(keep_vars=True)
    wanted = [name for name in state if not name.startswith(prefix) or name.startswith(kept)]
    found = match_names(list(state), weights.names(), module_renaming(model))
    if missing := [name for name in wanted if name not in found]:
        raise OnboardError(f"the checkpoint has no {missing[0]}")
    for name in wanted:
        tensor = weights.read(found[name])
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(tensor.to(kind), requires_grad=False)
        else:
            owner._buffers[leaf] = tensor.to(kind)


def _import_processors() -> None:
    """Import what transformers has for processors, before packages that it looks for are stood in
    for.
    """
    import transformers.image_transforms
    import transformers.models.auto.image_processing_auto
    import transformers.models.auto.processing_auto
    import transformers.video_processing_utils  # noqa: F401


def _processor(folder: Path, facts: list[str]) -> Any:
    """Load the repository's processor; packages that are not installed are stood in for."""
    from transformers import AutoProcessor

    facts += _stand_in(folder)
    return AutoProcessor.from_pretrained(folder, trust_remote_code=True, local_files_only=True)


def _stand_in(folder: Path) -> list[str]:
    """Stand in for what the repository's files import and is not here; return what to say of it."""
    from onboard.hf.old import image_forms, names, packages

    facts: list[str] = []
    if packages.missing(["torchvision"]):
        packages.FORMS.update(image_forms.FORMS)
        facts += packages.stand_in("torchvision") + image_forms.stand_in_for_torchvision()
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        modules = [
            *(
                each.name
                for node in ast.walk(tree)
                if isinstance(node, ast.Import)
                for each in node.names
            ),
            *(node.module or "" for node in _imports(tree)),
        ]
        beside = {each.stem for each in folder.glob("*.py")}
        tops = {module.split(".")[0] for module in modules} - beside - {""}
        facts += [fact for name in packages.missing(tops) for fact in packages.stand_in(name)]
        for node in _imports(tree):
            if str(node.module).split(".")[0] == "transformers":
                facts += names.provide(str(node.module), [each.name for each in node.names])
    return facts


def _imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
