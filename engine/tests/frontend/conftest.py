"""Tokenizers and checkpoints made on the spot."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["the river turns the wheel and the wheel turns the mill", "naïve café — 水車 🌊 turns"] * 20
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE as in GPT-2 and Llama 3, 320 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece-like BPE as in Llama 2: `▁` for spaces, `<0xNN>` for what is not in the vocabulary."""
    words = ["<unk>", "▁", "t", "h", "e", "▁t", "▁th", "▁the"]
    vocabulary = {token: at for at, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_files(byte_level: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja in a folder."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_level.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|end|>"}))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path
