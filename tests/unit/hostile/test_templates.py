"""A chat template is a program of whoever made the checkpoint: it ends, and its failure is a fact."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.runtime import tokenizer as module
from onboard.runtime.tokenizer import Tokenizer
from onboard.untrusted import bounds
from onboard.untrusted.bounds import Bound
from onboard.workflow.run_model.run_prompts import PROMPTS, QUESTION, build_prompts
from tests.support.runtime.tiny import save_tokenizer

CHAT = [{"role": "user", "content": QUESTION}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
LOOP += "{{ i }}{% endfor %}{% endfor %}{% endfor %}"
TEMPLATES = {
    LOOP: "TimeoutError",
    "{{ 'x' * (10 ** 11) }}": "MemoryError",
    "{% set x = namespace(a=[]) %}{% for i in range(9999) %}{% for j in range(9999) %}"
    "{% set x.a = x.a + x.a + [i] %}{% endfor %}{% endfor %}": "MemoryError|TimeoutError",
    "{{ 'x' * 2000000 }}": "2,000,000 bytes",
    "{% for": "TemplateSyntaxError",
    "{{ raise_exception('no\\nway') }}": "no way",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path, " ".join(PROMPTS))
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("template", TEMPLATES)
def test_it_ends_and_its_failure_is_a_fact(
    template: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "TimeoutError" in TEMPLATES[template]:  # others have all the time: garbage collection counts
        monkeypatch.setattr(module, "TEMPLATE_SECONDS", Bound(0.2, "seconds", "this test"))
    tokenizer.hf.chat_template = template
    start = time.process_time()
    with pytest.raises(OnboardError, match=TEMPLATES[template]) as caught:
        tokenizer.chat(CHAT)
    assert time.process_time() - start < 5
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_with_plain_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.hf.chat_template = "{{ raise_exception('never') }}"
    facts: list[str] = []
    prompts = build_prompts(tokenizer, tmp_path, [], 100, facts)
    assert [prompt.text for prompt in prompts] == list(PROMPTS)
    assert any("no chat turn" in fact and "never" in fact for fact in facts)


def test_a_chat_turn_asks_the_last_of_the_prompts_of_a_checkpoint(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    own = tmp_path / "prompts.txt"
    tokenizer.hf.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    asked = {
        "": [*PROMPTS, f"[{QUESTION}]"],
        "one\n": ["one", "[one]"],
        "a\nb\nc\n": ["a", "b", "[c]"],
    }
    for lines, texts in asked.items():
        own.write_text(lines)
        prompts = build_prompts(tokenizer, tmp_path, [], 100, [])
        assert [prompt.text for prompt in prompts] == texts
        assert [prompt.chat for prompt in prompts] == [False] * (len(texts) - 1) + [True]


def test_a_good_one_is_rendered(tokenizer: Tokenizer) -> None:
    tokenizer.hf.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    assert tokenizer.chat(CHAT) == f"<user> {CHAT[0]['content']}"
    assert bounds.TEMPLATE_SECONDS.most >= 5
