"""A tiny checkpoint whose tokens are letters first, so that regular expressions say what its outputs are."""

import json
import shutil
from pathlib import Path

from test_core_with_runner import VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-"


def with_letters(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint, with such a tokenizer; its last token ends an output."""
    path = shutil.copytree(source, folder)
    vocabulary = {letter: at for at, letter in enumerate(LETTERS)}
    vocabulary |= {f"<{at}>": at for at in range(len(vocabulary), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{at}>" for at in range(len(LETTERS), VOCAB)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": VOCAB - 1}))
    return path
