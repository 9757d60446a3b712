"""Models that try to fool the tool: a decoder whose code does something else for some lengths,
batches, tokens, layers.

Each is transformers' Llama with a few lines changed. The tool may refuse it, or make a model of it
that computes what it computes, also at the sizes that set off the change: in prefill, in cached
decode, and whatever the batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from onboard import LLM, SamplingParams
from onboard.analysis.analyze import analyze
from onboard.analysis.behaviour.cache_probe import DIFFERS
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.testing import all_logprobs, hf_causal_lm, ragged_prompts
from onboard.verify.blocks import prove
from onboard.verify.error import rmse_ratio
from tests.support.mutation.mutants import Mutator, importable, installed

ARCHITECTURE = "LlamaForCausalLM"
VOCABULARY = 307
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": [ARCHITECTURE],
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
RUNTIME = {
    "max_seq_len": 640,
    "max_num_tokens": 96,
    "max_batch_size": 4,
    "cuda_graph_config": {"batch_sizes": [1]},
}
"""A step has fewer tokens than the longest prompts, which are read in chunks."""
NEW_TOKENS = 4
TOLERANCE = 1e-4

# Where a change goes: what the new lines are put in front of.
MODEL = "        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)\n"
EMBEDDING = (
    "        if use_cache and past_key_values is None:\n            past_key_values = DynamicCache"
)
ATTENTION = "        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS"
MLP = "        down_proj = self.down_proj("
LAYER = "        hidden_states = residual + hidden_states\n        residual = hidden_states\n"
ROPE = "        emb = torch.cat((freqs, freqs), dim=-1)\n        cos = emb.cos()"
NORM = "        input_dtype = hidden_states.dtype\n"
MASKED = "        hidden_states = inputs_embeds\n"
ATTENTION_INIT = "        self.is_causal = True\n"
MODEL_INIT = "        self.gradient_checkpointing = False\n"


@dataclass(frozen=True)
class Fool:
    """A change of the decoder: lines that go in front of places, texts that take others' places,
    config fields.

    `length`: of a prompt that sets off the change, where one has to have just so many tokens.
    """

    name: str
    lines: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    swaps: Mapping[str, str] = field(default_factory=dict)
    length: int = 1

    def text(self) -> str:
        """Return the changed modeling file."""
        text = _original()
        for old, new in self.swaps.items():
            assert text.count(old) == 1, f"{self.name}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        for place, lines in self.lines.items():
            assert text.count(place) == 1, (
                f"{self.name}: {place!r} is there {text.count(place)} times"
            )
            text = text.replace(place, _indented(lines) + place)
        return text


@cache
def _original() -> str:
    return Mutator("transformers.models.llama.modeling_llama", set(), "").unchanged()


def _indented(lines: str) -> str:
    return "".join(f"        {line}\n" for line in lines.strip("\n").split("\n"))


class Fooled(Exception):
    """The tool was satisfied with a model that is not the one that it was given."""


def examine(fool: Fool, folder: Path, seed: int, *, export: bool = True) -> str:
    """Return how a case ends: "refused at ...: why", or "right"; raise `Fooled`.

    `folder` is one that mutated modules can be imported from.
    """
    name = "modeling_fool_" + "".join(each if each.isalnum() else "_" for each in fool.name)
    model_class = importable(fool.text(), name, folder, ARCHITECTURE)
    with installed(LlamaConfig, model_class):
        stage = "analyze"
        try:
            spec = analyze({**CONFIG, **fool.fields}, model="test/fool")
            stage = "generate"
            text = generate_model_file(spec)
            stage = "prove"
            prove(text, spec, export=export)
            stage = "run"
            reference = _reference(model_class, fool, seed)
            llm = _served(reference, text, folder / name)
        except OnboardError as error:
            return f"refused at {stage}: {error.message}"
        differences = _differences(llm, reference, (*LENGTHS, fool.length), seed)
    own = [each for each in differences if each.startswith(OWN_DECODE)]
    if own == differences and (named := [note for note in spec.tricky if note.startswith(DIFFERS)]):
        return f"right in prefill and decode, and named: {named[0]}"
    if differences:
        raise Fooled("; ".join(differences))
    return "right"


def _reference(model_class: type[nn.Module], fool: Fool, seed: int) -> nn.Module:
    fields = {key: value for key, value in {**CONFIG, **fool.fields}.items() if key != "model_type"}
    return hf_causal_lm(model_class, LlamaConfig(**fields), seed)


def _served(reference: nn.Module, text: str, folder: Path) -> LLM:
    root, checkpoint = folder / "root", folder / "checkpoint"
    (root / "models").mkdir(parents=True)
    (root / "models" / "modeling_llama.py").write_text(text, encoding="utf-8")
    reference.save_pretrained(checkpoint)
    return LLM(checkpoint, root=root, device="cpu", dtype="float32", config=RUNTIME)


OWN_DECODE = "transformers' decode"
LENGTHS = (5, 23, 150, 330)


@torch.no_grad()
def _differences(llm: LLM, reference: nn.Module, lengths: Sequence[int], seed: int) -> list[str]:
    """Compare with transformers: each text alone and beside its like, and each new token of a
    cached decode.
    """
    prompts = ragged_prompts(VOCABULARY, lengths, seed)
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=VOCABULARY
    )
    found = []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        text = torch.tensor([prompt + output.token_ids])
        alone = reference(text, use_cache=False).logits[0]
        twice = reference(text.repeat(2, 1), use_cache=False).logits[0]
        ours = {
            "prefill": (
                llm.logits(prompt),
                reference(torch.tensor([prompt]), use_cache=False).logits[0],
            )
        }
        ours["a batch"] = (alone, twice)
        new = all_logprobs(output.logprobs)
        ours["decode"] = (new, alone[len(prompt) - 1 : -1].log_softmax(-1))
        ours[OWN_DECODE] = (new, _decoded(reference, text, len(prompt)).log_softmax(-1))
        errors = {what: rmse_ratio(*pair) for what, pair in ours.items()}
        found += [
            f"{what} of {len(prompt)} tokens {error:.1e}"
            for what, error in errors.items()
            if not error <= TOLERANCE
        ]
    return found


def _decoded(reference: nn.Module, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits with which transformers chooses the tokens after a prompt, one by one with
    its cache.
    """
    output = reference(text[:, :prompt], use_cache=True)
    logits = [output.logits[0, -1]]
    for place in range(prompt, text.shape[1] - 1):
        output = reference(
            text[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True
        )
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


_TWELVE = {"num_hidden_layers": 12}
_LOGN = "1.0 + torch.log(torch.clamp((torch.arange(1024) + 1) / {at}, min=1.0))"
_OWN_MASK = """
places = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
far = places[:, None] - places[None, :] >= {span}
causal_mask = causal_mask.masked_fill(far[None, None], torch.finfo(inputs_embeds.dtype).min)
"""
_IMPORT = "from transformers.masking_utils import create_causal_mask"

CASES = [
    Fool("base", {}),
    # Beyond the lengths that anything is tried with.
    Fool(
        "a1 named window",
        {},
        {"sliding_window": 100},
        {
            _IMPORT: "from transformers.masking_utils import create_sliding_window_causal_mask",
            "causal_mask = create_causal_mask(": "causal_mask = create_sliding_window_causal_mask(",
            "scaling=self.scaling, **kwargs)\n        attn_output = attn": (
                "scaling=self.scaling, sliding_window=self.config.sliding_window, **kwargs)\n        attn_output = attn"
            ),
        },
    ),
    Fool(
        "a2 rope by position",
        {ROPE: "freqs = torch.where(position_ids[..., None] > 100, freqs * 0.5, freqs)"},
    ),
    Fool(
        "a3 far arange",
        {
            MODEL: "places = torch.arange(hidden_states.shape[1], device=hidden_states.device)\n"
            "hidden_states = torch.where((places > 100)[None, :, None], hidden_states * 1.5, hidden_states)"
        },
    ),
    Fool(
        "a4 largest position",
        {MODEL: "if position_ids.max() > 200:\n    hidden_states = hidden_states * 1.5"},
    ),
    Fool("a5 own mask", {MASKED: _OWN_MASK.format(span=100)}),
    Fool(
        "a5b own mask by getattr",
        {MASKED: _OWN_MASK.format(span="getattr(self.config, 'span', 100)")},
    ),
    Fool(
        "a6 length 100",
        {MODEL: "if hidden_states.shape[1] > 100:\n    hidden_states = hidden_states * 1.5"},
    ),
    Fool(
        "a6b length 128",
        {MODEL: "if hidden_states.shape[1] > 128:\n    hidden_states = hidden_states * 1.5"},
    ),
    Fool(
        "a6c exact length",
        {NORM: "if hidden_states.shape[1] == 200:\n    hidden_states *= 1.5"},
        length=200,
    ),
    Fool("a6d exact rows", {MLP: "if x.shape[0] == 5:\n    x = x * 1.5"}),
    Fool(
        "a7 key length",
        {ATTENTION: "if key_states.shape[-2] > 120:\n    query_states = query_states * 1.2"},
    ),
    Fool(
        "a8 log-n table sliced by the cache",
        {
            ATTENTION_INIT: f"self.register_buffer('logn', ({_LOGN.format(at=128)})[None, None, :, None], False)",
            ATTENTION: "start = key_states.shape[2] - query_states.shape[2]\n"
            "query_states = query_states * self.logn[:, :, start:key_states.shape[2]]",
        },
    ),
    Fool(
        "a8b log-n table sliced from the start",
        {
            MODEL_INIT: f"self.register_buffer('logn', ({_LOGN.format(at=100)})[None, :, None], persistent=False)",
            MODEL: "hidden_states = hidden_states * self.logn[:, : hidden_states.shape[1]]",
        },
    ),
    Fool(
        "a8c log-n list",
        {
            ATTENTION_INIT: "self.logn = torch.tensor([max(1.0, (i + 1) / 110) for i in range(1024)])",
            ATTENTION: "seen = key_states.shape[2]\n"
            "query_states = query_states * self.logn[seen - query_states.shape[2] : seen].view(1, 1, -1, 1)",
        },
    ),
    # Tokens, and the first position.
    Fool(
        "b1 one token",
        {
            EMBEDDING: "inputs_embeds = torch.where((input_ids == 200)[..., None], inputs_embeds * 2, inputs_embeds)"
        },
    ),
    Fool(
        "b2 upper tokens",
        {
            EMBEDDING: "inputs_embeds = inputs_embeds * (1 + (input_ids >= 180).to(inputs_embeds.dtype))[..., None]"
        },
    ),
    Fool(
        "b3 any token",
        {EMBEDDING: "if (input_ids == 200).any():\n    inputs_embeds = inputs_embeds * 2"},
    ),
    Fool(
        "b4 position 0",
        {
            MODEL: "hidden_states = torch.where((position_ids == 0)[..., None], hidden_states * 2, hidden_states)"
        },
    ),
    Fool(
        "b5 first row sliced",
        {
            MODEL: "hidden_states = torch.cat((hidden_states[:, :1] * 2, hidden_states[:, 1:]), dim=1)"
        },
    ),
    # One layer of twelve.
    Fool(
        "c1 layer in init",
        {ATTENTION_INIT: "if layer_idx == 7:\n    self.scaling = self.scaling * 1.5"},
        _TWELVE,
    ),
    Fool(
        "c2 layer in forward",
        {ATTENTION: "if self.layer_idx == 7:\n    query_states = query_states * 1.5"},
        _TWELVE,
    ),
    Fool(
        "c3 list in config",
        {
            ATTENTION: "if self.layer_idx in self.config.sharp:\n    query_states = query_states * 1.5"
        },
        {**_TWELVE, "sharp": [7, 9]},
    ),
    Fool(
        "c4 upper half",
        {
            ATTENTION: "if self.layer_idx >= self.config.num_hidden_layers // 2:\n    query_states = query_states * 1.5"
        },
        _TWELVE,
    ),
    Fool(
        "c5 modulo",
        {ATTENTION: "if self.layer_idx % 5 == 4:\n    query_states = query_states * 1.5"},
        _TWELVE,
    ),
    Fool(
        "c6 number of layers",
        {
            ATTENTION: "if self.config.num_hidden_layers > 10:\n    query_states = query_states * 1.5"
        },
        _TWELVE,
    ),
    Fool(
        "c7 factor by index",
        {ATTENTION: "query_states = query_states * (1 + 0.1 * self.layer_idx)"},
        _TWELVE,
    ),
    Fool(
        "c8 enumerate",
        {},
        _TWELVE,
        {
            "        for decoder_layer in self.layers[:self.config.num_hidden_layers]:\n": (
                "        for index, decoder_layer in enumerate(self.layers):\n"
                "            if index == 9:\n"
                "                hidden_states = hidden_states * 1.5\n"
            )
        },
    ),
    Fool(
        "c9 width",
        {ATTENTION: "if self.config.hidden_size < 50:\n    query_states = query_states * 1.5"},
    ),
    Fool(
        "c10 vocabulary",
        {ATTENTION: "if self.config.vocab_size > 300:\n    query_states = query_states * 1.5"},
    ),
    Fool(
        "c12 norm behind token 20",
        {
            NORM: "behind = (torch.arange(hidden_states.shape[1]) > 20)[None, :, None]\n"
            "hidden_states = torch.where(behind, hidden_states * 0.5, hidden_states)"
        },
    ),
    Fool(
        "c13 norm behind token 600",
        {
            NORM: "behind = (torch.arange(hidden_states.shape[1]) > 600)[None, :, None]\n"
            "hidden_states = torch.where(behind, hidden_states.abs(), hidden_states)"
        },
        length=610,
    ),
    Fool(
        "c13b norm in slices of 600",
        {
            NORM: "hidden_states = torch.cat((hidden_states[:, :600], hidden_states[:, 600:].abs()), dim=1)"
        },
        length=610,
    ),
    Fool(
        "c13c norm of texts of 600",
        {NORM: "if hidden_states.shape[1] == 600:\n    hidden_states = hidden_states.abs()"},
        length=600,
    ),
    Fool(
        "c11 eps of a layer",
        {MODEL_INIT: "if len(self.layers) > 8:\n    self.norm.variance_epsilon = 0.5"},
        _TWELVE,
    ),
    # The batch.
    Fool(
        "d1 several rows",
        {MODEL: "if hidden_states.shape[0] > 1:\n    hidden_states = hidden_states * 1.5"},
    ),
    Fool(
        "d2 one row",
        {MODEL: "if hidden_states.shape[0] == 1:\n    hidden_states = hidden_states * 1.5"},
    ),
    Fool(
        "d3 mean of the batch",
        {MODEL: "hidden_states = hidden_states - 0.5 * hidden_states.mean(0, keepdim=True)"},
    ),
    # Data.
    Fool(
        "e1 large values",
        {MODEL: "if hidden_states.abs().max() > 8:\n    hidden_states = hidden_states * 0.5"},
    ),
    Fool(
        "e2 mean",
        {MODEL: "if float(hidden_states.mean()) > 2:\n    hidden_states = hidden_states * 0.5"},
    ),
    Fool(
        "e3 large values by where",
        {MODEL: "hidden_states = torch.where(hidden_states.abs() > 8, 8.0, hidden_states)"},
    ),
    # Decode alone.
    Fool(
        "f1 cached",
        {
            MODEL: "if past_key_values is not None and past_key_values.get_seq_length() > 0:\n"
            "    hidden_states = hidden_states * 1.5"
        },
    ),
    Fool(
        "f2 counted in steps",
        {
            MODEL: "late = torch.arange(hidden_states.shape[1]) > 300\n"
            "hidden_states = torch.where(late[None, :, None], hidden_states * 1.5, hidden_states)"
        },
    ),
    # Layers that a small model need not have.
    Fool(
        "g1 short texts in a late layer",
        {
            ATTENTION: "if self.layer_idx == 5 and query_states.shape[2] > 3:\n"
            "    query_states = query_states * 1.5"
        },
        {"num_hidden_layers": 6},
        length=3,
    ),
    # Fields that the config need not have.
    Fool(
        "h1 getattr",
        {MODEL: "hidden_states = hidden_states * getattr(self.config, 'boost', 1.3)"},
        {"boost": 1.7},
    ),
    Fool(
        "h2 hasattr",
        {MODEL: "if hasattr(self.config, 'boost'):\n    hidden_states = hidden_states * 1.7"},
        {"boost": 1.7},
    ),
    # Buffers.
    Fool(
        "j1 persistent frequencies",
        {},
        {},
        {"nn.Buffer(inv_freq, persistent=False)": "nn.Buffer(inv_freq * 1.3, persistent=True)"},
    ),
    Fool(
        "j2 scalar",
        {
            MODEL_INIT: "self.register_buffer('boost', torch.tensor(1.7))",
            MODEL: "hidden_states = hidden_states * self.boost",
        },
    ),
    Fool(
        "j3 flag",
        {
            MODEL_INIT: "self.register_buffer('flag', torch.tensor(True))",
            MODEL: "if self.flag:\n    hidden_states = hidden_states * 1.5",
        },
    ),
    # Dtype, state, surroundings.
    Fool(
        "k1 dtype",
        {
            MODEL: "if hidden_states.dtype == torch.bfloat16:\n    hidden_states = hidden_states * 1.5"
        },
    ),
    Fool("l1 dropout", {MODEL: "hidden_states = nn.functional.dropout(hidden_states, 0.1)"}),
    Fool(
        "l2 counter",
        {
            MODEL_INIT: "self.calls = 0",
            MODEL: "self.calls += 1\nif self.calls > 40:\n    hidden_states = hidden_states * 1.5",
        },
    ),
    Fool(
        "l3 environment",
        {MODEL: "if os.environ.get('FOOL'):\n    hidden_states = hidden_states * 1.5"},
        {},
        {"import torch\n": "import os\nimport torch\n"},
    ),
]

_CONDITIONS = {
    "length": "{shaped}.shape[1] > {at}",
    "short": "{shaped}.shape[1] < {at}",
    "one token": "{shaped}.shape[1] == 1",
    "exact length": "{shaped}.shape[1] == {at}",
    "rows": "{shaped}.shape[0] > {rows}",
    "one row": "{shaped}.shape[0] == 1",
    "tokens": "{shaped}.shape[0] * {shaped}.shape[1] > {at}",
    "width": "{shaped}.shape[-1] > {at}",
    "data": "{shaped}.abs().amax() > {at}",
    "dtype": "{shaped}.dtype == torch.bfloat16",
    "remainder": "{shaped}.shape[1] % {at} == 0",
    "cached": "past_key_values is not None and past_key_values.get_seq_length() > 0",
    "layer": "self.layer_idx == {rows} and {shaped}.shape[2] > {at}",
}
_BY_TOKEN = {
    "position": "(position_ids > {at})[..., None]",
    "place": "(torch.arange({shaped}.shape[1]) > {at})[None, :, None]",
    "counted": "(torch.ones({shaped}.shape[1], dtype=torch.int64).cumsum(0) > {at})[None, :, None]",
}
_PLACES = {
    "model": (MODEL, "hidden_states"),
    "embedding": (EMBEDDING, "inputs_embeds"),
    "MLP": (MLP, "x"),
}
_ATTENTION_PLACES = {"attention": (ATTENTION, "query_states"), "norm": (NORM, "hidden_states")}


def drawn(seed: int) -> Fool:
    """Return a model that does something else under a condition, at a place and a threshold drawn
    from a seed.
    """
    draw = random.Random(seed)
    at, rows = draw.choice([3, 20, 40, 66, 100, 130, 200, 300]), draw.choice([1, 2, 5])
    kind = draw.choice([*_CONDITIONS, *_BY_TOKEN])
    places = (
        {"model": _PLACES["model"]}
        if kind in ("position", "cached")
        else _PLACES | _ATTENTION_PLACES
    )
    if kind in _BY_TOKEN:
        places = {name: place for name, place in places.items() if name != "attention"}
    where = draw.choice(list(places)) if kind != "layer" else "attention"
    place, shaped = (_PLACES | _ATTENTION_PLACES)[where]
    changed = f"{shaped} * {draw.choice([0.5, 1.5])}"
    condition = (_CONDITIONS | _BY_TOKEN)[kind].format(shaped=shaped, at=at, rows=rows)
    if where == "attention":  # heads come before the tokens there
        condition = condition.replace("shape[1]", "shape[2]")
    if kind in _BY_TOKEN:
        line = f"{shaped} = torch.where({condition}, {changed}, {shaped})"
    else:
        line = f"if {condition}:\n    {shaped} = {changed}"
    fields = {"num_hidden_layers": 6} if kind == "layer" else {}
    return Fool(f"{seed} {kind} {at} in {where}", {place: line}, fields, length=at)
