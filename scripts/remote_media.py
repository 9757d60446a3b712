"""Small models whose processor and towers are code, as public repositories have it: tokens compared
with those of that code by itself, with the transformers of its year.

    python scripts/remote_media.py fill CLONES OUT [NAME ...]
    python scripts/remote_media.py check OUT [NAME ...]

`remote_media.yaml` names the files; CLONES and OLD_TRANSFORMERS are as `remote_collection.py` has
them, and `common` in the latter has einops and torchvision. None of the files become part of this
project. `fill` writes code, small configs and a tokenizer; `check` writes random weights where there
are none, has `LLM` and the code answer questions about images, and prints a line a model.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".yaml")
SPECIAL = ("<|endoftext|>", "<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>")
ABSENT = ("peft", "eaglevl", "liger_kernel", "decord", "timm", "flash_attn")
"""Packages that the code imports and does not need here."""
TOKENS = 8


def table() -> dict[str, dict[str, Any]]:
    """Return what is known of each model."""
    import yaml

    return dict(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def fill(clones: Path, out: Path, *names: str) -> None:
    """Write code, small configs and a tokenizer of the named models, or of all."""
    for name, entry in table().items():
        if not names or name in names:
            for source in entry["sources"]:
                _copy(clones, out / name, source, entry.get("modules", []))
            _shrink(out / name, entry)


def _copy(clones: Path, folder: Path, source: dict[str, Any], modules: list[str]) -> None:
    clone = clones / source["repository"].replace("/", "+")
    place = clone / "repo" if (clone / "repo").is_dir() else clone
    folder.mkdir(parents=True, exist_ok=True)
    for file in source["files"]:
        named = f"{source['commit']}:{source['path']}/{file}"
        shown = subprocess.run(
            ["git", "-C", str(place), "show", named], capture_output=True, text=True, check=True
        )
        text = shown.stdout
        for module in modules:
            text = re.sub(rf"from [\w.]+\.{module} import", f"from .{module} import", text)
        (folder / file).write_text(text, encoding="utf-8")


def _shrink(folder: Path, entry: dict[str, Any]) -> None:
    words = _save_tokenizer(folder)
    changes = {
        "config.json": entry["config"],
        "processor_config.json": {**entry["processor"], "auto_map": entry["images"]["auto_map"]},
        "preprocessor_config.json": entry["images"],
    }
    for name, change in changes.items():
        path = folder / name
        values = json.loads(path.read_text(encoding="utf-8"))
        for key, value in change.items():
            values[key] = {**values[key], **value} if isinstance(value, dict) else value
        if name == "config.json":
            values["image_token_index"] = words.index("<IMG_CONTEXT>")
            ends = {"bos_token_id": 0, "eos_token_id": words.index("<|im_end|>")}
            values["text_config"] |= {"vocab_size": len(words), **ends}
        path.write_text(json.dumps(values, indent=2), encoding="utf-8")


def _save_tokenizer(folder: Path) -> list[str]:
    """Save a byte-level tokenizer; return its tokens in order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    fast.train_from_iterator(["the cat sat on the mat"], trainer)
    fast.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    found: dict[str, int] = fast.get_vocab()
    return sorted(found, key=lambda word: found[word])


def check(out: Path, *names: str) -> None:
    """Compare the named models, or all; print a line a model."""
    verdicts = [
        _check_one(out / name, entry["transformers"])
        for name, entry in table().items()
        if not names or name in names
    ]
    sys.exit(not all(verdicts))


def _check_one(folder: Path, year: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        asked = _questions(Path(scratch))
        if not (folder / "model.safetensors").is_file():
            _then(year, Path(scratch), "save", folder)
        theirs = json.loads(_then(year, Path(scratch), "answer", folder, json.dumps(asked)))
        ours = _own_answers(folder, asked, Path(scratch) / "root")
    same = [
        mine.prompt_token_ids == their["ids"] and mine.token_ids == their["tokens"]
        for mine, their in zip(ours, theirs, strict=True)
    ]
    margin = min(their["margin"] for their in theirs)
    print(
        f"{folder.name}: {sum(same)} of {len(same)} alike, nearest logits {margin:.1e}", flush=True
    )
    return all(same)


def _questions(folder: Path) -> list[Any]:
    """Save images; return conversations about none, one and two of them."""
    from PIL import Image

    print("seed", seed := random.randrange(2**31))
    parts = []
    for index, (width, height) in enumerate([(160, 90), (60, 130)]):
        pixels = random.Random(seed + index).randbytes(3 * width * height)
        path = folder / f"{index}.png"
        Image.frombytes("RGB", (width, height), pixels).save(path)
        parts.append({"type": "image", "image": str(path)})
    texts = [{"type": "text", "text": text} for text in ("what is it?", "the cat", "and")]
    contents = [[parts[0], texts[0]], [texts[1]], [parts[0], texts[2], parts[1], texts[0]]]
    return [[{"role": "user", "content": content}] for content in contents]


def _own_answers(folder: Path, asked: list[Any], root: Path) -> list[Any]:
    from PIL import Image

    from onboard import LLM, SamplingParams

    def opened(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": Image.open(part["image"])} if part["type"] == "image" else part

    conversations = [
        [{"role": "user", "content": [opened(part) for part in message["content"]]}]
        for (message,) in asked
    ]
    llm = LLM(folder, root=root, device="cpu", trust_remote_code=True)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return llm.chat(conversations, params)


def _then(year: str, home: Path, *words: object) -> str:
    """Run this file's `then` with the transformers of a year; return what it answers."""
    old = Path(os.environ["OLD_TRANSFORMERS"])
    own = {"PYTHONPATH": f"{old / year}:{old / 'common'}", "HF_HOME": str(home / "home")}
    command = [sys.executable, "-W", "ignore", __file__, "then", *map(str, words)]
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return done.stdout.rpartition("ANSWERS")[2]


def then(what: str, folder: Path, asked: str = "[]") -> None:
    """In the year's transformers: save random weights, or print the code's own answers."""
    import torch
    from safetensors.torch import load_file, save_file

    model = _model_of_its_year(folder)
    if what == "save":
        generator, tensors = torch.Generator().manual_seed(3), {}
        parameters = dict(model.named_parameters())
        for name, tensor in model.state_dict().items():
            if name in parameters:
                center = 1.0 if tensor.dim() == 1 and name.endswith("weight") else 0.0
                size = 0.3 if tensor.dim() == 1 else 1.5 * tensor[0].numel() ** -0.5
                tensors[name] = torch.randn(tensor.shape, generator=generator) * size + center
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    model.load_state_dict(load_file(str(folder / "model.safetensors")), strict=False)
    model.language_model.tie_weights()
    print("ANSWERS" + json.dumps([_answer(model, folder, each) for each in json.loads(asked)]))


def _answer(model: Any, folder: Path, messages: list[Any]) -> dict[str, Any]:
    import torch
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder, trust_remote_code=True, use_fast=True)
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images, videos = processor.process_vision_info(messages)
    given = processor(text=[text], images=images, videos=videos, return_tensors="pt", padding=True)
    ends = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(
        **given, **ends, do_sample=False, max_new_tokens=TOKENS, output_logits=True
    )
    best = torch.cat(found.logits).topk(2).values
    return {
        "ids": given["input_ids"][0].tolist(),
        "tokens": found.sequences[0].tolist(),
        "margin": float((best[:, 0] - best[:, 1]).min()),
    }


def _model_of_its_year(folder: Path) -> Any:
    """Return the repository's model; what asks for flash_attention_2 gets attention written out."""
    import torch

    compiled = torch.library.register_fake
    torch.library.register_fake = lambda *_, **__: (
        lambda item: item
    )  # of torchvision's compiled part
    import torchvision.transforms.v2.functional  # type: ignore[import-not-found]  # noqa: F401

    torch.library.register_fake = compiled
    from transformers import AutoConfig, AutoModel, PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sys.meta_path.append(_Absent())
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    flash: Any = PreTrainedModel
    flash._check_and_enable_flash_attn_2 = classmethod(_flash_by_name)
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = _attention
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.text_config._attn_implementation = "flash_attention_2"
    how = {"torch_dtype": torch.float32, "attn_implementation": "flash_attention_2"}
    return AutoModel.from_config(config, trust_remote_code=True, **how).eval()


def _flash_by_name(cls: type, config: Any, *_: Any, **__: Any) -> Any:
    config._attn_implementation = "flash_attention_2"
    return config


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any
) -> Any:
    import torch

    groups, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    causal = options.get("is_causal")
    if module.is_causal if causal is None else causal:
        later = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)
        scores = scores.masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


class _Absent:
    """Finds packages that are imported for what is not called here."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return a spec for these packages."""
        from importlib.machinery import ModuleSpec

        known = name.split(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> Any:
        """Make a module of which every name is a class."""
        from types import ModuleType

        def leaf(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda *_, **__: None})

        made = ModuleType(spec.name)
        made.__path__ = []
        made.__getattr__ = leaf  # type: ignore[method-assign]
        return made

    def exec_module(self, module: Any) -> None:
        """Run nothing."""


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "then":
        then(rest[0], Path(rest[1]), *rest[2:])
    elif command == "fill":
        fill(Path(rest[0]), Path(rest[1]), *rest[2:])
    else:
        check(Path(rest[0]), *rest[1:])
