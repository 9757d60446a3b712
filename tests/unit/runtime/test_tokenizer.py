from __future__ import annotations

import ast
import io
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onboard
from onboard.cli.commands.demo import CHECKPOINT as DEMO
from onboard.errors import OnboardError
from onboard.runtime.tokenizer import Detokenizer, Tokenizer
from onboard.verify.held_out import stories
from tests.support.runtime.tiny import save_tokenizer

TEXT = "the cat sat on the mat, the dog \N{GRINNING FACE} sat \N{LATIN SMALL LETTER E WITH ACUTE}t\N{HIRAGANA LETTER A}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path, TEXT)
    return path


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_a_broken_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(OnboardError, match=f"tokenizer in {tmp_path} does not load"):
        Tokenizer.load(tmp_path)


def test_text_grows_as_tokens_do_and_never_shows_half_a_character(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT + " zebra \N{SNOWMAN}\N{ROCKET}")
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.update(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert texts[-1] == tokenizer.decode(tokens)
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before)
        assert "\N{REPLACEMENT CHARACTER}" not in after
    assert len(set(texts)) < len(texts)  # some token was but a part of a character


def test_bytes_of_tokens_join_to_the_text() -> None:
    """Where a character takes several tokens, too."""
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    seed = random.randrange(10**6)
    print("seed", seed)
    letters = random.Random(seed).choices("aé日😀 \n\N{COMBINING ACUTE ACCENT}", k=40)
    tokens = tokenizer.encode_plain("".join(letters))
    assert any("\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token]) for token in tokens)
    found = b"".join(map(tokenizer.bytes_of, tokens))
    assert found.decode() == tokenizer.decode(tokens) == "".join(letters)


def test_bytes_are_those_that_a_piece_names() -> None:
    """As SentencePiece's vocabularies have bytes; a special token has its text's."""
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    rust = Rust(models.BPE(words, [], byte_fallback=True))
    rust.decoder = decoders.ByteFallback()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>"))
    assert [tokenizer.bytes_of(2 + byte) for byte in "é".encode()] == [b"\xc3", b"\xa9"]
    assert [tokenizer.bytes_of(token) for token in (0, 1)] == [b"<s>", b"a"]


def test_special_tokens_are_left_out_of_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokens = [*tokenizer.encode("the cat"), tokenizer.hf.eos_token_id]
    assert tokenizer.decode(tokens) == "the cat"


def test_random_tokens_have_the_texts_of_transformers(tmp_path: Path) -> None:
    """Also where it cleans up spaces, which the Rust library does not."""
    save_tokenizer(tmp_path, TEXT + " , . ! don 't")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw, most = random.Random(seed), len(tokenizer.hf)
    for cleaned in (False, True):
        tokenizer = Tokenizer(tokenizer.hf)
        tokenizer.hf.clean_up_tokenization_spaces = cleaned
        tokenizer.hf.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
        for skipped in (True, False):
            tokens = [draw.randrange(most) for _ in range(200)]
            text = tokenizer.hf.decode(tokens, skip_special_tokens=skipped)
            assert tokenizer.decode(tokens, skip_special_tokens=skipped) == text
    clean = tokenizer.encode("the , cat")
    assert tokenizer.decode(clean) == tokenizer.hf.decode(clean)


CODE = """
raise AssertionError("code of a repository was imported")
"""


@pytest.fixture
def _eager_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One who says yes to every question; and nothing of a repository may have been imported in the
    end.
    """
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda question="": pytest.fail(f"asked {question!r}"))
    before = set(sys.modules)
    yield
    assert not [
        name for name in set(sys.modules) - before if name.startswith("transformers_modules")
    ]


def _with_code(folder: Path, **auto_map: str) -> None:
    (folder / "theirs.py").write_text(CODE)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "their_own", "auto_map": auto_map})
    )


@pytest.mark.usefixtures("_eager_user")
def test_a_model_that_brings_code_has_its_tokenizer_without_a_question(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, TEXT)
    _with_code(tmp_path, AutoConfig="theirs.Config", AutoModelForCausalLM="theirs.Model")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def _tokenizer_of_code(tmp_path: Path, auto_map: object) -> None:
    save_tokenizer(tmp_path, TEXT)
    _with_code(tmp_path, AutoConfig="theirs.Config")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "tokenizer_class": "Their", "auto_map": auto_map}
        )
    )


AUTO_MAPS = ({"AutoTokenizer": ["theirs.Slow", None]}, ["theirs.Slow", "theirs.Fast"])


@pytest.mark.usefixtures("_eager_user")
@pytest.mark.parametrize("auto_map", AUTO_MAPS)
def test_of_a_tokenizer_that_is_code_the_whole_file_is_taken(
    tmp_path: Path, folder: Path, auto_map: object
) -> None:
    _tokenizer_of_code(tmp_path, auto_map)
    tokenizer, plain = Tokenizer.load(tmp_path), Tokenizer.load(folder)
    assert tokenizer is not None
    assert plain is not None
    assert tokenizer.encode(TEXT) == plain.encode(TEXT)
    assert tokenizer.decode(plain.encode("the cat")) == "the cat"
    assert "is not run" in tokenizer.note
    assert not plain.note


@pytest.mark.usefixtures("_eager_user")
@pytest.mark.parametrize("auto_map", AUTO_MAPS)
def test_a_tokenizer_that_is_code_alone_is_refused_in_one_line(
    tmp_path: Path, auto_map: object
) -> None:
    _tokenizer_of_code(tmp_path, auto_map)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        OnboardError, match="is code of the model's repository, which is not run here"
    ) as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in caught.value.hint
    assert "\n" not in str(caught.value)


SANDBOXED, TASKS = "workflow/remote/own_media.py", "workflow/remote/tasks.py"
"""What runs a repository's processor, and what does so behind walls."""


def test_no_auto_class_is_left_to_ask() -> None:
    """Each `Auto....from_pretrained` of the package says that code of repositories is not to be
    run; one runs it, and only the sandbox's tasks import its module.
    """
    package = Path(onboard.__file__).parent
    calls = [
        (path, call)
        for path in sorted(package.rglob("*.py"))
        if path != package / SANDBOXED
        if "from_pretrained" in (text := path.read_text(encoding="utf-8"))
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and re.match(r"Auto\w+\.from_pretrained$", ast.unparse(call.func))
    ]
    assert calls
    name = f".{Path(SANDBOXED).stem} import"
    importing = [path for path in package.rglob("*.py") if name in path.read_text("utf-8")]
    assert importing == [package / TASKS]
    for path, call in calls:
        assert "trust_remote_code=False" in map(ast.unparse, call.keywords), f"{path}:{call.lineno}"


PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p.text }}{% endfor %}{% endfor %}"
)
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TALK = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": [{"type": "text", "text": "really?"}]},
]


def test_a_template_of_parts_gets_texts_as_parts(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokenizer.hf.chat_template = PARTS
    whole = "[user]Who are you?[assistant]a cat[user]really?"
    assert tokenizer.chat(TALK) == whole
    parts = [{**TALK[0], "content": [{"type": "text", "text": "Who are you?"}]}]
    expected = tokenizer.hf.apply_chat_template(parts, tokenize=False)
    assert tokenizer.chat(TALK[:1]) == expected


def test_a_template_of_texts_gets_texts(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokenizer.hf.chat_template = TEXTS
    assert tokenizer.chat(TALK[:2]) == "[user]Who are you?[assistant]a cat"


def test_a_prompt_and_answer_of_the_demo_are_the_beginning_of_the_next_turn() -> None:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    words = re.findall(r" ?[^ ]+", random.choice(stories(DEMO)))
    roles = ["system", *["user", "assistant"] * random.randint(1, 4)][random.randint(0, 1) :]
    cuts = sorted(random.sample(range(1, len(words)), len(roles) - 1))
    said = ["".join(words[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    text, before = "<s>", list[int]()
    for count, turn in enumerate(turns):
        if turn["role"] == "assistant":
            prompt = tokenizer.encode_plain(tokenizer.chat(turns[:count]))
            assert prompt[: len(before)] == before
            before = [*prompt, *tokenizer.encode_plain(turn["content"])]
        text += ("\n\n" if count and turn["role"] != "assistant" else "") + turn["content"]
        assert tokenizer.chat(turns[: count + 1]) == text
