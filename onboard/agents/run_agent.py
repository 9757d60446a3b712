"""The run agent: builds a model from its standalone config in this process, generates, and reports as JSON.

The run phase starts it as `python -m onboard.agents.run_agent`, a process of its own: all memory is returned when it
ends, and a crash of a kernel does not take the workflow down.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from onboard.agents.coherence import HELD_OUT, HELD_OUT_FILE, Coherence, judge, mean_nll, weights_excess
from onboard.config import RuntimeConfig
from onboard.errors import NotFiniteError, OnboardError
from onboard.graph.context import TransformContext
from onboard.hub import open_source
from onboard.registry import load_standalone
from onboard.runtime.build import make_context
from onboard.runtime.llm import LLM
from onboard.runtime.sampling import SamplingParams

PROMPTS = (
    "Once upon a time there was a little girl who",
    "The capital of France is",
    "To make a good cup of tea, first",
    "In simple words, gravity is",
)
PROMPTS_FILE = "prompts.txt"
"""Prompts beside a checkpoint, a line each, of the kind that the model was trained on; used in place of `PROMPTS`."""
CHAT = [{"role": "user", "content": "In one sentence, why is the sky blue?"}]
MAX_NEW_TOKENS = 64

# How far below the best logit of a full prefill a greedily chosen token may lie, as a share of the row's spread, and
# how many may lie further: half precision flips near ties, float32 does not.
_TOLERANCE = {torch.float32: (1e-3, 0.0), torch.float16: (3e-2, 0.05), torch.bfloat16: (3e-2, 0.05)}


@dataclass(frozen=True)
class Prompt:
    """A prompt as it is shown and as the model gets it."""

    text: str | None
    """None for token ids of a checkpoint without a tokenizer."""
    token_ids: list[int]
    chat: bool = False
    """Rendered with the tokenizer's chat template."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told by the command line; the result is the JSON file, failures included."""
    options = _parse(arguments)
    if options.exit_with_parent:
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    result = run(
        load_standalone(options.config),
        options.root,
        device=options.device,
        dtype=options.dtype,
        num_hidden_layers=options.layers,
    )
    options.output.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
    return 0 if result["status"] == "success" else 1


def run(
    config: RuntimeConfig,
    root: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    num_hidden_layers: int | None = None,
) -> dict[str, Any]:
    """Build, generate and judge; return what happened, with `status` and `error`.

    `device` and `dtype` other than "auto" override the config for this run; `num_hidden_layers` makes it a reduced run,
    whose text is not judged.
    """
    facts: list[str] = []
    result: dict[str, Any] = {"status": "compile_error", "error": None, "facts": facts}
    try:
        config = _adapted(config, facts, device=device, dtype=dtype, num_hidden_layers=num_hidden_layers)
        session = Session.start(config, root)
        result |= {
            "settings": session.settings(),
            "seconds": {"build": session.build_seconds},
            "status": "runtime_error",
        }
        result |= session.report()
        prompts = build_prompts(session, facts)
        result |= generate(session.llm, prompts, result["seconds"])
        result |= check(session, result["prompts"], judged=num_hidden_layers is None)
        facts += session.llm.engine.facts
        result["status"] = "bad_generation" if result["error"] else "success"
    except NotFiniteError as error:
        result |= {"status": "bad_generation", "error": error.message}
    except Exception as error:  # whatever a model, a kernel or a library raises is this run's result
        traceback.print_exc()
        result["error"] = _one_line(error)
    device_type = result.get("settings", {}).get("device", "cpu")
    return result | {"peak_memory_bytes": peak_memory(device_type)}


@dataclass(frozen=True)
class Session:
    """A built model and the context that it was built in."""

    llm: LLM
    context: TransformContext
    build_seconds: float

    @classmethod
    def start(cls, config: RuntimeConfig, root: Path) -> Session:
        """Build the model as users do, through `LLM`."""
        start = time.perf_counter()
        llm = LLM(config.model, root=root, config=config)
        seconds = time.perf_counter() - start
        source = open_source(config.model, revision=config.revision)
        return cls(llm, make_context(source.files(), config, root=root, model=config.model), seconds)

    @property
    def text_config(self) -> Any:
        """The Hugging Face config of the language model."""
        return self.context.factory.text_config

    def settings(self) -> dict[str, Any]:
        """Return what the run's "auto" settings came to."""
        device, runtime = self.context.device, self.context.runtime
        return {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": str(self.context.dtype).removeprefix("torch."),
            "mode": runtime.mode,
            "attn_backend": self.context.attn_backend,
            "compile_backend": _compile_backend(self.context),
            "world_size": runtime.world_size,
            "max_seq_len": runtime.max_seq_len,
            "num_hidden_layers": getattr(self.text_config, "num_hidden_layers", None),
        }

    def report(self) -> dict[str, Any]:
        """Return the pipeline's history."""
        return {"transforms": [asdict(entry) for entry in self.llm.engine.history]}


def build_prompts(session: Session, facts: list[str]) -> list[Prompt]:
    """Return the built-in prompts and a chat turn when there is a template, or random tokens without a tokenizer."""
    room = max(1, session.llm.engine.capacity // 2)
    tokenizer = session.llm.engine.tokenizer
    if tokenizer is None:
        facts.append("the checkpoint has no tokenizer: prompts are random token ids")
        draw = random.Random(0)
        vocabulary = session.text_config.vocab_size
        return [Prompt(None, [draw.randrange(vocabulary) for _ in range(min(n, room))]) for n in (5, 9, 17, 3)]
    prompts = [Prompt(text, tokenizer.encode(text)) for text in _texts(session.context.factory.checkpoint)]
    if getattr(tokenizer.hf, "chat_template", None):
        text = tokenizer.hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(text, tokenizer.hf(text, add_special_tokens=False)["input_ids"], chat=True))
    for prompt in prompts:
        if len(prompt.token_ids) > room:
            facts.append(f"prompt {prompt.text!r} is cut to {room} tokens: the model has few positions")
            del prompt.token_ids[room:]
    return prompts


def _texts(checkpoint: Path) -> Sequence[str]:
    own = checkpoint / PROMPTS_FILE
    return own.read_text(encoding="utf-8").splitlines() if own.is_file() else PROMPTS


def generate(llm: LLM, prompts: Sequence[Prompt], seconds: dict[str, float]) -> dict[str, Any]:
    """Generate greedily for all prompts in one batch; return prompts and outputs verbatim, and the figures."""
    room = llm.engine.capacity - max(len(prompt.token_ids) for prompt in prompts)
    params = SamplingParams(max_tokens=max(1, min(MAX_NEW_TOKENS, room)), temperature=0.0)
    before = llm.engine.stats.graph_replays
    start = time.perf_counter()
    outputs = llm.generate([prompt.token_ids for prompt in prompts], params)
    seconds["generate"] = time.perf_counter() - start
    records = [
        {
            "prompt": prompt.text,
            "chat": prompt.chat,
            "token_ids": prompt.token_ids,
            "output": output.text if prompt.text is not None else None,
            "output_ids": output.token_ids,
            "finish_reason": output.finish_reason,
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    replays = llm.engine.stats.graph_replays - before
    return {
        "prompts": records,
        "tokens_per_second": sum(len(output.token_ids) for output in outputs) / seconds["generate"],
        "cache": llm.engine.stats.cache(),
        "cuda_graphs": {"used": replays > 0, "replays": replays, "batch_sizes": llm.engine.cache.info.decode_sizes},
    }


def check(session: Session, records: list[dict[str, Any]], *, judged: bool) -> dict[str, Any]:
    """Compare the generated tokens with a full prefill and judge the text; `error` says what is wrong, if anything."""
    agreement, finite, vocabulary = compare_with_prefill(session, records)
    found: dict[str, Any] = {"agreement": agreement, "finite": finite, "coherence": None}
    if not finite:
        return found | {"error": "the logits are not finite"}
    if not agreement["agrees"]:
        count, gap = f"{agreement['differing']} of {agreement['tokens']}", f"{agreement['largest_gap']:.3g}"
        error = f"{count} tokens generated with the cache are not what a full prefill chooses (by {gap} of the spread)"
        return found | {"error": error}
    if not judged:
        return found | {"error": None}
    coherence = judge_text(session, [record["output_ids"] for record in records], vocabulary)
    problem = f"the text is not coherent: {coherence.reason}" if coherence.verdict == "incoherent" else None
    return found | {"coherence": asdict(coherence), "error": problem}


def compare_with_prefill(session: Session, records: list[dict[str, Any]]) -> tuple[dict[str, Any], bool, int]:
    """Prefill each prompt with its output and look up the generated tokens: with greedy decoding each is the best one.

    Returns the comparison, whether all logits are finite, and the size of the vocabulary.
    """
    tolerance, allowed = _TOLERANCE[session.context.dtype]
    gaps: list[float] = []
    finite, vocabulary = True, 0
    for record in records:
        prompt, output = record["token_ids"], record["output_ids"]
        logits = session.llm.logits([*prompt, *output])
        finite, vocabulary = finite and bool(torch.isfinite(logits).all()), logits.shape[-1]
        rows = logits[len(prompt) - 1 : -1]
        best, worst = rows.amax(dim=-1), rows.amin(dim=-1)
        chosen = rows.gather(-1, torch.tensor(output)[:, None])[:, 0]
        gaps += ((best - chosen) / (best - worst).clamp_min(torch.finfo(torch.float32).tiny)).tolist()
    differing = sum(not gap <= tolerance for gap in gaps)
    agreement = {
        "agrees": finite and differing <= allowed * len(gaps),
        "batch_size": len(records),
        "tokens": len(gaps),
        "differing": differing,
        "largest_gap": max(gaps) if finite else None,
    }
    return agreement, finite, vocabulary


def judge_text(session: Session, outputs: list[list[int]], vocabulary: int) -> Coherence:
    """Measure the loss on held-out text and judge the outputs."""
    config, folder, tokenizer = (
        session.context.runtime,
        session.context.factory.checkpoint,
        session.llm.engine.tokenizer,
    )
    if tokenizer is None:
        return judge(outputs, held_out_nll=None, vocabulary=vocabulary, excess=None)
    capacity = session.llm.engine.capacity
    ids = tokenizer.encode(held_out_text(folder)[: 8 * capacity])[:capacity]
    return judge(
        outputs,
        held_out_nll=mean_nll(session.llm.logits(ids), ids),
        vocabulary=vocabulary,
        excess=None if config.skip_loading_weights else weights_excess(folder),
        reference=lambda: reference_nll(session, ids),
    )


def held_out_text(folder: Path) -> str:
    """Return the checkpoint's own held-out text, or plain English."""
    path = folder / HELD_OUT_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else HELD_OUT


def reference_nll(session: Session, ids: list[int]) -> float | None:
    """Return the loss of Hugging Face's own model on the same tokens, or None when transformers cannot load it."""
    from onboard.graph.reference import load_reference

    factory, dtype = session.context.factory, session.context.dtype
    try:
        model = load_reference(factory.config, factory.checkpoint, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, OnboardError) as error:
        print(f"no reference from transformers: {_one_line(error)}", file=sys.stderr)
        return None
    with torch.inference_mode():
        return mean_nll(model(torch.tensor([ids])).logits[0], ids)


def peak_memory(device_type: str) -> int:
    """Return the most bytes that were in use: on the GPU when the run was there, else resident in this process."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _adapted(
    config: RuntimeConfig, facts: list[str], *, device: str, dtype: str, num_hidden_layers: int | None
) -> RuntimeConfig:
    """Return the config with this run's overrides; what departs from the file is a fact."""
    changes: dict[str, Any] = {}
    for name, value in (("device", device), ("dtype", dtype)):
        if value not in ("auto", getattr(config, name)):
            changes[name] = value
            facts.append(f"{name} is {value} for this run; the config says {getattr(config, name)}")
    if num_hidden_layers is not None:
        changes["model_kwargs"] = config.model_kwargs | {"num_hidden_layers": num_hidden_layers}
    return RuntimeConfig.model_validate(config.model_dump(exclude_unset=True) | changes)


def _compile_backend(context: TransformContext) -> str:
    if context.runtime.compile_backend != "auto":
        return context.runtime.compile_backend
    return "torch-cudagraph" if context.device.type == "cuda" else "torch-simple"


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, OnboardError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _exit_with_parent() -> None:
    """End this process when its standard input closes, which is when the process that started it is gone."""
    # Not through sys.stdin: a thread that still holds its lock when the interpreter ends makes that a fatal error.
    while os.read(0, 1024):
        pass
    os._exit(1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m onboard.agents.run_agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the standalone config")
    parser.add_argument("--root", type=Path, required=True, help="where the generated model file is looked up first")
    parser.add_argument("--output", type=Path, required=True, help="where the result goes, as JSON")
    parser.add_argument("--device", default="auto", help="override of the config's device")
    parser.add_argument("--dtype", default="auto", help="override of the config's dtype")
    parser.add_argument("--layers", type=int, default=None, help="build only this many layers")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
