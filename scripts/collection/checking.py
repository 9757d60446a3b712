"""What becomes of a model by the whole command, and whether its repository's class agrees."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.collection.table import SCRIPT, table

_PROMPTS, _TOKENS = (1, 9, 40, 110), 132
"""Lengths of prompts, and of each with what is generated behind it."""
_SAME = 1e-4
"""Largest error of a text's log-probabilities, relative."""
_SECONDS = 900


def check(out: Path, *names: str) -> None:
    """Onboard and judge the named models, or all; print a line a model."""
    found = [
        _check_one(out, name, entry)
        for name, entry in table().items()
        if not names or name in names
    ]
    sys.exit(not all(found))


def _check_one(out: Path, name: str, entry: dict[str, Any]) -> bool:
    start, root = time.monotonic(), Path(tempfile.mkdtemp(prefix=f"{name}-"))
    found, expected = (
        _verdict(out, name, entry, root),
        entry.get("expect", "onboarded"),
    )
    as_expected = _is_expected(found, expected)
    said = "" if as_expected else f"; not as expected ({expected}), see {root}"
    print(f"{name}: {found}, {time.monotonic() - start:.0f} s{said}", flush=True)
    if as_expected:
        shutil.rmtree(root)
    return as_expected


def _is_expected(found: str, expected: str) -> bool:
    kind, _, reason = expected.partition(": ")
    return found.startswith(kind) and reason in found


def _verdict(out: Path, name: str, entry: dict[str, Any], root: Path) -> str:
    """Return what became of a model."""
    old = Path(os.environ["OLD_TRANSFORMERS"])
    folders = (entry["transformers"], "common", entry.get("kernels_of", "common"))
    path = ":".join(str(old / folder) for folder in folders)
    then = {"PYTHONPATH": path, "HF_HOME": str(root / "home")}
    if entry.get("kernels_of"):
        then["PYTHONOPTIMIZE"] = "1"  # assertions say what those kernels take
    if not (out / name / "model.safetensors").is_file():
        _run([str(SCRIPT), "weights", str(out), name], then)
    if not (out / name / "model.safetensors").is_file():
        _run([str(SCRIPT), "stand_in", str(out / name)], {})
    words = ["--trust-remote-code", "--device", "cpu", "--yes", "--root", str(root)]
    if failed := _run(["-m", "onboard", str(out / name), *words], {}):
        return f"refused: {failed.removeprefix('onboard: ')}"
    logits = root / "logits.safetensors"
    steps = [("generate", {}), ("judge", then), ("compare", {})]
    for step, environment in steps:
        places = [str(out), name, *([] if step == "judge" else [str(root)]), str(logits)]
        if failed := _run([str(SCRIPT), step, *places], environment):
            return f"{'not judged' if step == 'judge' else f'WRONG: {step}'}: {failed}"
    return f"onboarded, {(root / 'error.txt').read_text()}"


def _run(words: list[str], environment: dict[str, str]) -> str:
    """Run Python; return the last line of what it said if it failed."""
    command = [sys.executable, "-W", "ignore", *words]
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    try:
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"ended after {_SECONDS} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
    return lines[-1][:300] if done.returncode else ""


def generate(out: Path, name: str, root: Path, logits: Path) -> None:
    """Write texts (`ids`) that the onboarded model generates, and their log-probabilities."""
    import torch
    from safetensors.torch import save_file

    from onboard import LLM, SamplingParams

    llm = LLM(str(out / name), root=root, device="cpu", dtype="float32")
    everything = SamplingParams(max_tokens=1, logprobs=2**31)
    [probe] = llm.generate({"prompt_token_ids": [3]}, everything)
    vocabulary = len((probe.logprobs or [{}])[0])
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    found = {}
    for length in _PROMPTS:
        prompt = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=_TOKENS - length, temperature=0.0, logprobs=vocabulary, ignore_eos=True
        )
        [output] = llm.generate({"prompt_token_ids": prompt}, params)
        rows = [[step[token] for token in range(vocabulary)] for step in output.logprobs or ()]
        found[f"ours.{length}"] = torch.tensor(rows)
        found.setdefault("ids", torch.zeros(0, _TOKENS, dtype=torch.long))
        text = torch.tensor([[*prompt, *output.token_ids]])
        found["ids"] = torch.cat((found["ids"], text))
    save_file(
        {key: value.contiguous() for key, value in found.items() if key != "ids"},
        root / "ours.safetensors",
    )
    save_file({"ids": found["ids"]}, logits)


def compare(out: Path, name: str, root: Path, logits: Path) -> None:
    """Compare what was generated with what was judged; exit with a line where they differ."""
    from safetensors.torch import load_file

    ours, judged = load_file(root / "ours.safetensors"), load_file(logits)["logits"]
    worst = 0.0
    for length, row in zip(_PROMPTS, judged, strict=True):
        mine, theirs = ours[f"ours.{length}"], row[length - 1 : -1].log_softmax(-1)
        error = (mine - theirs).square().mean() / theirs.square().mean()
        worst = max(worst, float(error.nan_to_num(float("inf")).sqrt()))
    (root / "error.txt").write_text(f"error {worst:.1e}")
    if not worst <= _SAME:
        sys.exit(f"the log-probabilities differ by {worst:.1e}, relative")
