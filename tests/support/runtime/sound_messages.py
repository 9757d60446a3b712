"""A tiny model that hears, whose processor makes tokens of messages by a package of their own."""

from __future__ import annotations

import base64
import json
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from onboard.analysis.analyze import analyze
from onboard.analysis.tiny.random_weights import randomize
from onboard.codegen.model_file import generate_model_file

SPECIAL = 32
VOCABULARY = 256 + SPECIAL
_NAMED = {
    **{0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 11: "<pad>"},
    **{24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 26: "[TRANSCRIBE]"},
}
_OTHERS = (
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
)


def save_vocabulary(folder: Path) -> None:
    """Write a tekken.json: bytes, and the special tokens that messages need."""
    others = iter(_OTHERS)
    names = [_NAMED.get(rank) or next(others, f"<other_{rank}>") for rank in range(27)]
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    vocabulary = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    config = {
        "pattern": r"[^\s]+|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": VOCABULARY,
        "default_num_special_tokens": SPECIAL,
        "version": "v7",
    }
    encoding = {"num_mel_bins": 8, "hop_length": 160, "window_size": 400}
    audio = {"sampling_rate": 16_000, "frame_rate": 12.5, "chunk_length_s": 30.0}
    audio["audio_encoding_config"] = encoding  # type: ignore[assignment]
    content = {"config": config, "vocab": vocabulary, "special_tokens": special, "audio": audio}
    (folder / "tekken.json").write_text(json.dumps(content))


@dataclass
class Hearing:
    """A tiny checkpoint, the root with its model file, and transformers' own model."""

    checkpoint: Path
    root: Path
    hf: Any

    def given(self, messages: list[dict[str, Any]]) -> Any:
        """Return what transformers' processor makes of messages."""
        processor = VoxtralProcessor.from_pretrained(self.checkpoint)
        return processor.apply_chat_template(messages)

    def greedy(self, messages: list[dict[str, Any]], count: int) -> list[int]:
        """Return the tokens of transformers' own processor and `generate`."""
        self.hf.generation_config.eos_token_id = None
        given = self.given(messages)
        found = self.hf.generate(**given, do_sample=False, max_new_tokens=count)
        return found[0, given["input_ids"].shape[1] :].tolist()


def make_hearing(folder: Path) -> Hearing:
    """Save a random tiny model; its file is generated."""
    text = {
        **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 64, "head_dim": 16},
        **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 1e4},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11},
    }
    sound = {
        **{"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 1500},
    }
    config = VoxtralConfig(audio_config=sound, text_config=text, audio_token_id=24)
    model = VoxtralForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    randomize(model, 5)
    checkpoint = folder / "checkpoint"
    model.eval().save_pretrained(checkpoint)
    WhisperFeatureExtractor(feature_size=8).save_pretrained(checkpoint)
    path = checkpoint / "preprocessor_config.json"
    named = {**json.loads(path.read_text()), "processor_class": VoxtralProcessor.__name__}
    path.write_text(json.dumps(named))
    save_vocabulary(checkpoint)
    (folder / "models").mkdir()
    file = generate_model_file(analyze(model.config.to_dict(), model=str(folder)))
    (folder / "models" / f"modeling_{config.model_type}.py").write_text(file, encoding="utf-8")
    return Hearing(checkpoint, folder, model)


def sound_file(folder: Path, name: str, count: int, seed: int) -> Path:
    """Write `count` random samples."""
    values = np.random.default_rng(seed).integers(-9000, 9000, count, dtype=np.int16)
    with wave.open(str(folder / name), "wb") as file:
        file.setparams((1, 2, 16_000, count, "NONE", ""))
        file.writeframes(values.tobytes())
    return folder / name
