"""Whether a checkpoint's tokenizer and generation config load, and speak of the tokens that the
model has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.sources.gguf_source import TOKENIZER_ERROR
from onboard.untrusted.bounds import TEXT_BYTES, read_text
from onboard.workflow.checkpoint.checkpoint_size import native_values

GENERATION = "generation_config.json"


def check_vocabulary(folder: Path, config: dict[str, Any], *, generates: bool) -> list[str]:
    """Load both, never by a repository's code.

    Args:
        folder: the checkpoint's.
        config: its parsed config.json.
        generates: text is to be generated, so that a tokenizer that does not load is an error, not
            a fact.

    Returns:
        Facts: token ids that the model does not have.

    Raises:
        OnboardError: one of them is broken, or no text would ever end.
    """
    values = native_values(config)
    ids = values | {key: value for key, value in _generation(folder).items() if value is not None}
    facts, largest = _tokenizer(folder, generates=generates)
    size = values.get("vocab_size")
    if not isinstance(size, int):
        return facts
    _require_an_end(ids.get("eos_token_id"), size)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if outside := [each for each in _listed(ids.get(name)) if each >= size]:
            facts.append(f"{name} {outside[0]} is outside the vocabulary of {size}")
    if largest >= size:
        facts.append(
            f"the tokenizer has ids up to {largest}, the vocabulary {size} tokens: prompts with others fail"
        )
    return facts


def _not_converted(file: Path) -> str:
    reason = read_text(file, TEXT_BYTES)
    return f"the GGUF file's tokenizer cannot be converted ({reason}); a tokenizer.json beside it would do"


def _generation(folder: Path) -> dict[str, Any]:
    """Return the generation config's fields; none without a file."""
    if not (folder / GENERATION).is_file():
        return {}
    from transformers import GenerationConfig

    try:
        values: dict[str, Any] = GenerationConfig.from_pretrained(
            folder, local_files_only=True
        ).to_dict()
    except Exception as error:  # its values run through whatever the class does with them
        reason = " ".join(str(error).split())[:300]
        raise OnboardError(
            f"transformers refuses {folder / GENERATION} ({reason})",
            hint="Correct it, or fetch the model again",
        ) from error
    return values


def _tokenizer(folder: Path, *, generates: bool) -> tuple[list[str], int]:
    """Return why there is no tokenizer, unless it is needed, and the largest id that it gives (-1:
    none).
    """
    from onboard.runtime.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder)
    except OnboardError as error:
        if generates:
            raise
        return [error.message], -1
    if tokenizer is None:
        failed = folder / TOKENIZER_ERROR
        return [_not_converted(failed)] if failed.is_file() else [], -1
    notes = [tokenizer.note] if tokenizer.note else []
    return notes, max(tokenizer.hf.get_vocab().values(), default=-1)


def _require_an_end(eos: Any, size: int) -> None:
    """Raise `OnboardError` where every token that ends a text is one that the model does not
    have.
    """
    ends = _listed(eos)
    if ends and all(each >= size for each in ends):
        raise OnboardError(
            f"eos_token_id is {eos}, and the vocabulary has {size} tokens: no text would end",
            hint="Weights, config.json and generation_config.json have to be of one model",
        )


def _listed(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if bad := [each for each in values if type(each) is not int]:
        raise OnboardError(
            f"{bad[0]!r} is given for a token id", hint=f"Correct config.json or {GENERATION}"
        )
    return values
