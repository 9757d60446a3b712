"""Tiny models that take images or sound, with processors that transformers writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2AudioConfig,
    Qwen2AudioProcessor,
    Qwen2Config,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    WhisperFeatureExtractor,
    video_processing_utils,
)

from onboard.analysis.analyze import analyze
from onboard.analysis.tiny.random_weights import randomize
from onboard.codegen.model_file import generate_model_file
from onboard.hf.architecture import causal_lm_class

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}MARK{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = (
    "<eos>",
    "<image>",
    "<start>",
    "<end>",
    "<video>",
    "<sound>",
    "<sound_start>",
    "<sound_end>",
)
NAMES = {
    "image_token": "<image>",
    "boi_token": "<start>",
    "eoi_token": "<end>",
    "start_image_token": "<start>",
    "end_image_token": "<end>",
    "context_image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<sound>",
    "audio_bos_token": "<sound_start>",
    "audio_eos_token": "<sound_end>",
}


def tokenizer() -> Any:
    """A byte-level tokenizer with the tokens that stand for images and sound."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    fast.train_from_iterator(["the cat sat on the mat"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="<eos>", pad_token="<eos>", extra_special_tokens=NAMES
    )


TOKENIZER = tokenizer()
IDS = {name: TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL}
TEXT: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 0,
}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
DEEP = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}
QWEN = {
    "image_token_id": IDS["<image>"],
    "video_token_id": IDS["<video>"],
    "vision_start_token_id": IDS["<start>"],
    "vision_end_token_id": IDS["<end>"],
}


_VIDEOS = ("VideoProcessorMixin", "BaseVideoProcessor")
"""The base class of processors of videos: versions of transformers have one or the other."""


def without_videos(processor: Any, images: Any, **options: Any) -> Any:
    """A processor without its part for videos, which needs torchvision."""
    own = {"check_argument_for_proper_class": lambda *_: None}
    videos = next(filter(None, (getattr(video_processing_utils, name, None) for name in _VIDEOS)))
    return type(processor.__name__, (processor,), own)(images, tokenizer(), videos(), **options)


def qwen2_5_vl() -> tuple[Any, Any, str]:
    vision = {**DEEP, "window_size": 56, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": AXES}, vision_config=vision, **QWEN
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 112}
    images = Qwen2VLImageProcessorPil(size=size)
    processor = without_videos(Qwen2_5_VLProcessor, images)
    return config, processor, "<start><image><end>"


def qwen3_vl() -> tuple[Any, Any, str]:
    more = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64, "patch_size": 4}
    text = {**TEXT, "num_hidden_layers": 3, "head_dim": 16, "rope_parameters": AXES}
    config = Qwen3VLConfig(text_config=text, vision_config={**DEEP, **more}, **QWEN)
    size = {"shortest_edge": 16 * 16, "longest_edge": 16 * 32}
    images = Qwen2VLImageProcessorPil(size=size, patch_size=4)
    processor = without_videos(Qwen3VLProcessor, images)
    return config, processor, "<start><image><end>"


def gemma3() -> tuple[Any, Any, str]:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    config = Gemma3Config(
        text_config={**TEXT, **kinds, "head_dim": 16},
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=IDS["<image>"],
        boi_token_index=IDS["<start>"],
        eoi_token_index=IDS["<end>"],
    )
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return config, Gemma3Processor(images, tokenizer(), image_seq_length=4), "<start>"


def llava() -> tuple[Any, Any, str]:
    vision = CLIPVisionConfig(**VISION, image_size=32, patch_size=8, projection_dim=32)
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=vision,
        image_token_index=IDS["<image>"],
        image_seq_length=16,
    )
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    strategy = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(images, tokenizer(), **strategy, num_additional_image_tokens=1)
    return config, processor, "<image>"


def internvl() -> tuple[Any, Any, str]:
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = InternVLConfig(
        text_config=Qwen2Config(**TEXT),
        vision_config=vision,
        image_token_id=IDS["<image>"],
        image_seq_length=4,
    )
    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=4)
    processor = without_videos(InternVLProcessor, images, image_seq_length=4)
    return config, processor, "<image>"


def qwen2_audio() -> tuple[Any, Any, str]:
    sound = {
        "d_model": 32,
        "encoder_ffn_dim": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "max_source_positions": 50,
        "num_mel_bins": 8,
    }
    config = Qwen2AudioConfig(
        audio_config=sound,
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_index=IDS["<sound>"],
    )
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    named = {"audio_token": "<sound>", "audio_bos_token": "<sound_start>"}
    processor = Qwen2AudioProcessor(extractor, tokenizer(), **named, audio_eos_token="<sound_end>")
    return config, processor, "<sound>"


FAMILIES: dict[str, Callable[[], tuple[Any, Any, str]]] = {
    each.__name__: each for each in (qwen2_5_vl, qwen3_vl, gemma3, llava, internvl, qwen2_audio)
}


@dataclass
class MediaModel:
    """A tiny checkpoint with its processor, and transformers' own model of the same weights."""

    checkpoint: Path
    root: Path
    hf: Any
    processor: Any
    mark: str
    """What stands for an image or a sound in a text."""

    def greedy(self, text: str, count: int, **media: Any) -> list[int]:
        """Return the tokens of transformers' own processor and `generate`."""
        given = self.processor(text=[text], return_tensors="pt", **media)
        self.hf.generation_config.eos_token_id = None
        found = self.hf.generate(**given, do_sample=False, max_new_tokens=count)
        return found[0, given["input_ids"].shape[1] :].tolist()


def make_media_model(folder: Path, family: str, model_file: Path | None = None) -> MediaModel:
    """Save a random tiny model of a family; its file is generated unless there is one."""
    config, processor, mark = FAMILIES[family]()
    model = causal_lm_class(config)._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, 5)
    checkpoint = folder / "checkpoint"
    model.eval().save_pretrained(checkpoint)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE.replace("MARK", mark)
    processor.save_pretrained(checkpoint)
    (folder / "models").mkdir()
    target = folder / "models" / f"modeling_{config.model_type}.py"
    if model_file is not None:
        shutil.copy(model_file, target)
    else:
        spec = analyze(model.config.to_dict(), model=str(folder))
        target.write_text(generate_model_file(spec), encoding="utf-8")
    return MediaModel(checkpoint, folder, model, processor, mark)
