"""Train the demo checkpoint: a five-layer Llama on the project's own stories; about three minutes
on one GPU.

    python scripts/demo/train.py --output onboard/assets/demo

Writes config, tokenizer and chat template, one safetensors file (bfloat16, under 10 MB),
`heldout.txt` (stories that training never saw) and `training.json` (what was trained, with the
perplexity on the held-out text).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from stories import stories
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAINING_SEED, HELDOUT_SEED = 1, 2
VOCABULARY = 2048
LENGTH = 384
CHAT_TEMPLATE = """\
{#- A user's words are gone on with as they stand; what is said later begins a new paragraph. -#}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role != "assistant" and not loop.first %}
        {{- "\\n\\n" }}
    {%- endif %}
    {{- message.content or "" }}
{%- endfor %}
"""
"""A prompt ends where the model goes on, so it is the beginning of the next turn's."""


def train_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts `<s>` before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def build_model() -> LlamaForCausalLM:
    """Return the untrained model: 4.2 million parameters, grouped-query attention, tied
    embeddings.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return all texts as one row of tokens, each text closed by `</s>`."""
    rows = tokenizer(texts)["input_ids"]
    return torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]])


def batches(tokens: torch.Tensor, size: int, steps: int, device: str) -> Iterator[torch.Tensor]:
    """Yield `steps` batches [size, LENGTH] of windows drawn at random."""
    generator = torch.Generator().manual_seed(TRAINING_SEED)
    tokens = tokens.to(device)
    window = torch.arange(LENGTH, device=device)
    for _ in range(steps):
        start = torch.randint(len(tokens) - LENGTH, (size, 1), generator=generator).to(device)
        yield tokens[start + window]


def train(
    model: LlamaForCausalLM, tokens: torch.Tensor, steps: int, size: int, device: str
) -> None:
    """AdamW with warm-up and cosine decay, bfloat16 autocast over float32 weights."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    warmup = steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warmup) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))
        ),
    )
    for step, batch in enumerate(batches(tokens, size, steps, device)):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def perplexity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], device: str
) -> float:
    """Return exp of the mean negative log likelihood a token, each text on its own."""
    model.eval()
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(
            [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]], device=device
        )[:, :512]
        total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return math.exp(total / count)


def main() -> None:
    """Parse the options, train, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=150_000)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch-size", type=int, default=160)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(TRAINING_SEED)
    corpus = list(stories(TRAINING_SEED, options.stories))
    seen = set(corpus)
    heldout = [text for text in stories(HELDOUT_SEED, 60) if text not in seen]
    tokenizer = train_tokenizer(corpus[:20_000])
    model = build_model()
    tokens = encode(tokenizer, corpus)
    print(
        f"{len(tokens)} tokens, {sum(p.numel() for p in model.parameters())} parameters", flush=True
    )
    train(model, tokens, options.steps, options.batch_size, options.device)

    model.to(torch.bfloat16)
    score = perplexity(model.float(), tokenizer, heldout, options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    (options.output / "heldout.txt").write_text(
        "\n\n---\n\n".join(heldout) + "\n", encoding="utf-8"
    )
    facts = {
        "stories": options.stories,
        "steps": options.steps,
        "heldout_perplexity": round(score, 4),
    }
    (options.output / "training.json").write_text(
        json.dumps(facts, indent=2) + "\n", encoding="utf-8"
    )
    print(facts)
    for prompt in (
        "Once upon a time",
        "One day, Lily",
        "The little fox was sad because",
        "Tom and his friend went to",
    ):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=options.device)
        with torch.no_grad():
            text = model.generate(ids, max_new_tokens=90, do_sample=False)
        print("=>", tokenizer.decode(text[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
