"""A tiny model whose towers and processor are code of its repository, and the judge: that code itself,
in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CODE = Path(__file__).parent / "remote_code" / "media" / "halo2025"
SPECIAL = ("<eos>", "<picture>", "<start>", "<end>")
_OF_THE_JUDGE = """
import json, sys
from pathlib import Path
from types import ModuleType
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedModel, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

for name in ("peft", "torchvision", "torchvision.io"):  # imported for what is not used here
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)
    module.get_peft_model = None
sys.modules["torchvision"].io = sys.modules["torchvision.io"]

def attention(module, query, key, value, attention_mask, scaling=None, **_):
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

def named(self, name, *_, **__):
    return name or "eager"

PreTrainedModel._check_and_adjust_attn_implementation = named
PreTrainedConfig._attn_implementation_autoset = False
ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("flash_attention_2", eager_mask)
folder = Path(sys.argv[1])
torch.manual_seed(3)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
config.text_config._attn_implementation = "flash_attention_2"
how = {"trust_remote_code": True, "dtype": torch.float32}
"""
_SAVE = """
from safetensors.torch import save_file
model = AutoModel.from_config(config, **how).eval()
values = {}
for name, tensor in model.state_dict().items():
    center = 1.0 if tensor.dim() == 1 and name.endswith("weight") else 0.0
    values[name] = torch.randn(tensor.shape) * (0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5) + center
save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
"""
_ANSWER = """
from PIL import Image
from safetensors.torch import load_file
model = AutoModel.from_config(config, **how).eval()
model.load_state_dict(load_file(folder / "model.safetensors"))
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
answers = []
for text, files in json.loads(sys.argv[2]):
    given = processor(text=[text], images=[Image.open(file) for file in files], return_tensors="pt")
    found = model.generate(**given, do_sample=False, max_new_tokens=int(sys.argv[3]), pad_token_id=0,
                           eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    logits = torch.cat(found.logits).topk(2).values
    answers.append({"ids": given["input_ids"][0].tolist(), "tokens": found.sequences[0].tolist(),
                    "margin": float((logits[:, 0] - logits[:, 1]).min()),
                    "logprobs": found.logits[0][0].log_softmax(-1).tolist()})
print("ANSWERS" + json.dumps(answers))
"""


def save_media_code(folder: Path, **fields: Any) -> Path:
    """Save a random checkpoint with its code beside it; return the folder."""
    shutil.copytree(CODE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    words = _tokenizer()
    words.save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    config["image_token_index"] = words.convert_tokens_to_ids("<picture>")
    config["text_config"]["vocab_size"] = len(words)
    path.write_text(json.dumps(config))
    _run(_SAVE, str(folder))
    return folder


def own_answers(
    folder: Path, asked: Sequence[tuple[str, Sequence[Path]]], count: int
) -> list[dict[str, Any]]:
    """Return what the repository's own processor and `generate` make of texts with images: token ids
    of the prompt, `count` greedy tokens, the smallest difference of the two best logits, and the
    first token's log-probabilities.
    """
    given = json.dumps([(text, [str(file) for file in files]) for text, files in asked])
    printed = _run(_ANSWER, str(folder), given, str(count))
    answers: list[dict[str, Any]] = json.loads(printed.rpartition("ANSWERS")[2])
    return answers


def _run(what: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", _OF_THE_JUDGE + what, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _tokenizer() -> Any:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    fast.train_from_iterator(["the cat sat on the mat"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<eos>",
        pad_token="<eos>",
        additional_special_tokens=list(SPECIAL[1:]),
    )
