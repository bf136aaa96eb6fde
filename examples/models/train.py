"""Trains a demo model and its tokenizer, and writes them as a Hugging Face folder.

    python examples/models/train.py --preset tiny --out examples/models/penstock-tiny

Everything is drawn from --seed. The answers are the docstrings of the Python that runs this: another Python, another model.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from corpus import ASSISTANT, BOS, EOT, PAD, SPECIAL_TOKENS, SYSTEM, USER, Corpus, entries, plain_text
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
TOKENS_PER_STEP = 8192
# Row lengths and how often: mostly short for speed, sometimes long so that answers hold up behind a long prompt.
ROW_LENGTHS = {256: 0.80, 1024: 0.16, 2048: 0.04}
MATRIX_RATE, OTHER_RATE = 0.02, 4e-3

PRESETS = {
    "tiny": {"hidden_size": 256, "intermediate_size": 576, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64},
    "draft": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32},
}
# A name on the client's side ("developer") and the field's ("system") are one thing; any other role is refused by name.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    # Tools stand in one system message, after the text of the conversation's own.
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].content }}{{ '\n\n' }}{% endif %}"
    "{{ 'These functions can be called:\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    '{{ \'A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.\' }}'
    "{{ eos_token }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message.role in ['system', 'developer']) %}"
    "{% if message.role == 'system' or message.role == 'developer' %}{{ '<|system|>' }}"
    "{% elif message.role == 'user' or message.role == 'tool' %}{{ '<|user|>' }}"
    "{% elif message.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ raise_exception('messages: unsupported role ' ~ message.role) }}{% endif %}"
    "{% if message.role == 'tool' %}{{ '<tool_response>' ~ message.content ~ '</tool_response>' }}"
    "{% else %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' ~ call.function.arguments | tojson"
    " ~ '}</tool_call>' }}"
    "{% endfor %}"
    "{% endif %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE ids: any text encodes and decodes to itself. Plain text is given a leading <|bos|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)])
    return tokenizer


def build_model(preset: str, tokenizer: Tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOT),
        pad_token_id=tokenizer.token_to_id(PAD),
        **PRESETS[preset],
    )
    return LlamaForCausalLM(config)


def draw_batch(corpus: Corpus, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and "is to be predicted" flags, both [rows, length], of about TOKENS_PER_STEP tokens."""
    length = rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()))[0]
    rows = [corpus.row(rng, length) for _ in range(TOKENS_PER_STEP // length)]
    return torch.tensor([ids for ids, _ in rows]), torch.tensor([learned for _, learned in rows])


def answer_loss(model: LlamaForCausalLM, ids: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats a token) over the tokens to be predicted; the output head runs only where they are."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1][learned[:, 1:]])
    return functional.cross_entropy(logits.float(), ids[:, 1:][learned[:, 1:]])


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float) -> float:
    """Share of the full rate at `progress` in [0, 1]: a short warm-up, then half a cosine down to 2 %."""
    if progress < 0.03:
        return progress / 0.03
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97))


def train(model: LlamaForCausalLM, corpus: Corpus, steps: int, seed: int, console: Console) -> float:
    """Trains in place; returns the loss of the last steps, smoothed."""
    rng = random.Random(seed)
    optimizers = make_optimizers(model)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    smooth = math.log(VOCAB_SIZE)
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=steps)
        for step in range(steps):
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * learning_rate(step / steps)
            loss = answer_loss(model, *draw_batch(corpus, rng))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            smooth += (loss.item() - smooth) * 0.05
            bar.update(task, advance=1, description=f"loss {smooth:.3f}")
            if step % 100 == 0 and not console.is_terminal:
                console.log(f"step {step}/{steps} loss {smooth:.3f}")
    return smooth


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOT,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=700, help=f"of {TOKENS_PER_STEP} tokens each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    console = Console()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    known = entries()
    tokenizer = train_tokenizer([entry.answer for entry in known] * 4 + [plain_text()])
    special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    corpus = Corpus(known, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, special)
    model = build_model(args.preset, tokenizer)
    console.print(f"{len(known)} entries, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    began = time.monotonic()
    loss = train(model, corpus, args.steps, args.seed, console)
    save(model, tokenizer, args.out)
    console.print(f"loss {loss:.3f} nats a token after {(time.monotonic() - began) / 60:.1f} minutes; wrote {args.out}")


if __name__ == "__main__":
    main()
