"""A byte-level BPE tokenizer made on the spot, in the files of a checkpoint."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from penstock.prompt.bundle import PromptBundle

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unexpected role ' ~ message.role) }}
    {%- endif %}
    {%- generation %}<|{{ message.role }}|>{{ message.content | trim }}<|end|>{% endgeneration %}

{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json (with a post-processor that puts `<s>` first), tokenizer_config.json, chat_template.jinja."""
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the river turns the wheel and the wheel turns the mill"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "pad_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def bundle(checkpoint: Path) -> PromptBundle:
    return PromptBundle.from_checkpoint(checkpoint, served_names=("tiny",), block_size=4, hash_seed="s", max_model_len=64)
