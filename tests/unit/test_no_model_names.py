"""The engine knows no model: none of the names that transformers has for models stands in its code.

Comments and docstrings may name models (they cite sources), and so may templates, ops and assets.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[2]
ENGINE = [*sorted((ROOT / "onboard").rglob("*.py")), *sorted((ROOT / "transforms").rglob("*.py"))]
NOT_ENGINE = ("ops", "assets", "content")

WORDS = {
    "align": "a verb; typography",
    "ast": "Python's module",
    "beam": "beam search, in fields that every config had",
    "bit": "ast.BitAnd and the like",
    "clip": "a verb; how encoders of images are called in configs' field names",
    "codegen": "the package that writes files",
    "encoder_decoder": "the config field is_encoder_decoder",
    "git": "the program",
    "gte": "ast.GtE",
    "led": "a verb",
    "opt": "an option",
}
"""Model types that are words of the language, of Python or of configs as well; each was looked at
where it stands.
"""
PACKAGES = {"mistral_common": "reads the messages of models with tekken.json"}
"""Names of packages that users have to install."""
FIELD_PREFIXES = {"mamba"}
"""Model types that configs' field names begin with (`mamba_d_state`); alone they are still names of
models.
"""
IMPORTED = {
    "onboard/hf/old/layers/attention_modules.py": {"llama"},
    "onboard/hf/old/rotary_forms.py": {"llama", "Llama"},
}
"""Files that stand in for an interface of older transformers, and the model whose functions that
interface had: an import, no case of its own.
"""
_FSTRING = getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)


@cache
def _type_pattern() -> re.Pattern[str]:
    names = sorted(
        {name.replace("-", "_").lower() for name in CONFIG_MAPPING_NAMES} - WORDS.keys(),
        key=len,
        reverse=True,
    )
    return re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, names))})(?![a-z0-9])")


@cache
def _class_pattern() -> re.Pattern[str]:
    stems = {
        name.removesuffix("Config").removesuffix("Text") for name in CONFIG_MAPPING_NAMES.values()
    }
    kept = sorted((stem for stem in stems if stem.lower() not in WORDS), key=len, reverse=True)
    return re.compile(rf"(?<![A-Za-z0-9])({'|'.join(map(re.escape, kept))})(?![a-z0-9])")


def names_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every model named in the tokens of Python code that are neither
    comment nor docstring.
    """
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        docstring = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        before = token.type
        if token.type in (tokenize.NAME, tokenize.STRING, _FSTRING) and not docstring:
            yield from ((token.start[0], name) for name in _names_in_token(token.string))


def _names_in_token(text: str) -> list[str]:
    words = text.replace("-", "_").lower()
    for package in PACKAGES:
        words = words.replace(package, "")
    types = _type_pattern().findall(words)
    fields = [
        name for name in FIELD_PREFIXES if re.search(rf"(?<![a-z0-9]){name}_[a-z]|_{name}_", words)
    ]
    return [
        name
        for name in dict.fromkeys((*types, *_class_pattern().findall(text)))
        if name not in fields
    ]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('if config.model_type == "llama":\n    pass\n', ["llama"]),
        ('TABLE = {"qwen3-moe": 1}\n', ["qwen3_moe"]),
        ("from transformers import Gemma2Config\n", ["Gemma2"]),
        ("llama_heads = 4\n", ["llama"]),
        ("is_deepseek_v3 = f'{x} gpt_neox'\n", ["deepseek_v3", "gpt_neox"]),
        ('kind = "mamba"\n', ["mamba"]),
        ('SIZES = ("mamba_d_state", "n_mamba_heads")\n', []),
        ('"""As in llama."""\nx = 1  # gemma2 does so\n', []),
        ('def f() -> None:\n    """Like Qwen3."""\n', []),
        ('rope = "llama3"\noptimum = clipped = 1\n', []),
    ],
)
def test_the_rule_itself(code: str, names: list[str]) -> None:
    assert [name for _, name in names_in(code)] == names


def test_the_engine_names_no_model() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in ENGINE
        if path.relative_to(ROOT).parts[1] not in NOT_ENGINE
        for line, name in names_in(path.read_text(encoding="utf-8"))
        if name not in IMPORTED.get(str(path.relative_to(ROOT)), ())
    ]
    assert found == []


def test_every_exception_is_needed() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in ENGINE).lower().replace("-", "_")
    known = {name.replace("-", "_").lower() for name in CONFIG_MAPPING_NAMES}
    classes = {name.removesuffix("Config").lower() for name in CONFIG_MAPPING_NAMES.values()}
    assert WORDS.keys() | FIELD_PREFIXES <= known | classes
    assert [name for name in (*WORDS, *PACKAGES) if name not in text] == []
    for path, names in IMPORTED.items():
        assert names == {name for _, name in names_in((ROOT / path).read_text(encoding="utf-8"))}
